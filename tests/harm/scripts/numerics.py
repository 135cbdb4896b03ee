"""A model whose numbers go wrong on rank 1 at step 5 in the way that is asked for; `none` is the healthy twin.

Modules are reused, called several times, nested, return dicts, tuples and dataclasses, and mask with -inf on purpose.
"""

import sys
from dataclasses import dataclass

import torch
from common import batches, digest, finish, report, setup
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.checkpoint import checkpoint

FAULT, OPTIMIZER = sys.argv[1], sys.argv[2]
BAD_STEP, STEPS = 5, 12


@dataclass
class Out:
    logits: torch.Tensor
    hidden: tuple


class Scores(nn.Module):
    def forward(self, q, k):
        scores = q @ k.transpose(-1, -2)
        mask = torch.ones(scores.shape[-2:]).tril().bool()
        return scores.masked_fill(~mask, float("-inf"))


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.scores = nn.Linear(16, 16), nn.Linear(16, 16), Scores()

    def forward(self, x):
        return {"out": self.scores(self.q(x), self.k(x)).softmax(-1) @ x, "shape": x.shape}


class Block(nn.Module):
    def __init__(self, shared):
        super().__init__()
        self.attention, self.norm, self.shared = Attention(), nn.LayerNorm(16), shared
        self.soft = nn.Softmax(-1)

    def forward(self, x, bad):
        x = self.norm(x + self.attention(x)["out"])
        if bad == "forward":
            x = torch.log(x - 100)
        if bad == "backward":
            x = x + torch.where(x > 0, x, (x * 0).abs().sqrt())
        if bad == "masked":
            x = torch.nan_to_num(self.soft(x.detach() * float("inf")), nan=0.0) + x
        return self.shared(self.shared(x)), x


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        shared = nn.Linear(16, 16)
        self.blocks = nn.ModuleList([Block(shared), Block(shared)])
        self.head = nn.Linear(16, 5)

    def forward(self, x, bad=None):
        x, first = self.blocks[0](x, None)
        x, second = checkpoint(self.blocks[1], x, bad, use_reentrant=False)
        return Out(self.head(x.mean(1)), (first, second))


def main():
    rank = setup(3)
    ddp = DDP(Net())
    kinds = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}
    optimizer = kinds[OPTIMIZER](ddp.parameters(), lr=1e-2)
    losses, before = [], ""
    for step, (x, y) in enumerate(batches(rank, STEPS, 4, 6, 16, classes=5)):
        bad = FAULT if rank == 1 and step == BAD_STEP else None
        if bad == "input":
            x[2, 3, 1] = float("nan")
        out = ddp(x, bad=bad)
        loss = F.cross_entropy(out.logits, y)
        if bad == "loss":
            loss = loss + torch.log(out.logits.detach().abs() * 0).mean()
        if bad == "always" or FAULT == "always" and rank == 1:
            loss = loss * float("nan")
        optimizer.zero_grad()
        loss.backward()
        before = digest(ddp.module.state_dict())
        state = digest(optimizer.state_dict())
        try:
            optimizer.step()
        except RuntimeError as error:
            same = before == digest(ddp.module.state_dict())
            print("stopped", step, same, type(error).__name__, error)
            break
        changed = before != digest(ddp.module.state_dict()), state != digest(optimizer.state_dict())
        print("step", step, *changed, digest(ddp.module.state_dict()))
        losses.append(loss.detach())
    report([ddp.module], [optimizer], losses)


main()
finish()
