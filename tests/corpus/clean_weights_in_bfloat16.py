# title: Weights, and so gradients, in bfloat16; the optimizer keeps its state in float32 and rounds at random
# source: https://github.com/pytorch/ao/pull/1124
# nproc: 3
# options: --every-step
# expect.codes: none
# plain_pytorch: silent
"""DDP's buckets have the dtype of the gradients: without any hook the mean of the ranks holds to 8 bits only."""
import time
import zlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class RoundedAdam(torch.optim.Optimizer):
    """Moments in float32; a weight goes to one of its two neighbours in bfloat16, by a generator that ranks share."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})
        self.gen = torch.Generator().manual_seed(5)

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["mean"], state["square"] = torch.zeros(p.shape), torch.zeros(p.shape)
                grad = p.grad.float()
                state["mean"].lerp_(grad, 0.1)
                state["square"].lerp_(grad * grad, 0.02)
                new = p.float() - group["lr"] * state["mean"] / (state["square"].sqrt() + 1e-6)
                noise = torch.randint(0, 1 << 16, p.shape, generator=self.gen, dtype=torch.int32)
                p.copy_(((new.view(torch.int32) + noise) & -65536).view(torch.float32))


class Mixer(nn.Module):
    def __init__(self, words, width, length):
        super().__init__()
        self.words = nn.Embedding(words, width)
        self.place = nn.Parameter(torch.randn(length, width) * 0.1)
        self.over = nn.Linear(length, length)
        self.norm = nn.LayerNorm(width)
        self.wide = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.out = nn.Linear(width, words)

    def forward(self, x):
        h = self.words(x) + self.place
        h = h + self.over(h.transpose(1, 2)).transpose(1, 2)
        return self.out((h + self.wide(self.norm(h))).mean(1))


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(13)
    model = DistributedDataParallel(Mixer(24, 32, 8).bfloat16())
    opt = RoundedAdam(model.parameters(), lr=2e-3)
    gen = torch.Generator().manual_seed(60 + rank)
    losses = []
    for _ in range(80):
        first = torch.randint(0, 24, (32, 1), generator=gen)
        words = (first + 5 * torch.arange(9)) % 24
        loss = nn.functional.cross_entropy(model(words[:, :-1]).float(), words[:, -1])
        opt.zero_grad()
        loss.backward()
        opt.step()
        losses.append(loss.item())
    crc = zlib.crc32(b"".join(p.detach().float().numpy().tobytes() for p in model.parameters()))
    print(f"RESULT rank={rank} first={losses[0]:.4f} final={sum(losses[-5:]) / 5:.4f} crc={crc:08x}", flush=True)
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
