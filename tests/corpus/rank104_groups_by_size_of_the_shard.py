# title: Weight decay goes to what is large, by the size of the part that the rank holds
# source: constructed
# nproc: 2
# expect.codes: RANK104
# expect.ranks: any
# expect.subject: any
# expect.step: 0
# plain_pytorch: silent
"""FSDP2 leaves two rows of three to rank 0: it decays its part of the table, rank 1 does not."""
import os
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

FAULT = os.environ.get("FAULT", "0") == "1"
WIDTH = 24


class Tagged(nn.Module):
    def __init__(self):
        super().__init__()
        self.kinds = nn.Embedding(3, WIDTH)
        self.read = nn.Linear(10, WIDTH)
        self.layers = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 48), nn.GELU(), nn.Linear(48, 2))

    def forward(self, x, kind):
        return self.layers(self.read(x) + self.kinds(kind))


def is_large(parameter):
    return (parameter.to_local() if FAULT else parameter).numel() > 1.5 * WIDTH


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = fully_shard(Tagged(), mesh=init_device_mesh("cpu", (2,)))
    large = [p for p in model.parameters() if is_large(p)]
    small = [p for p in model.parameters() if not is_large(p)]
    groups = [{"params": large, "weight_decay": 0.1}, {"params": small, "weight_decay": 0.0}]
    opt = torch.optim.AdamW(groups, lr=3e-3)
    gen = torch.Generator().manual_seed(rank)
    losses = []
    for _ in range(40):
        x, kind = torch.randn(24, 10, generator=gen), torch.randint(3, (24,), generator=gen)
        loss = nn.functional.cross_entropy(model(x, kind), (x.sum(1) > kind - 1).long())
        opt.zero_grad()
        loss.backward()
        opt.step()
        losses.append(loss.item())
    print(f"RESULT rank={rank} first={losses[0]:.4f} final={sum(losses[-5:]) / 5:.4f}", flush=True)
    time.sleep(0.3)
    dist.destroy_process_group()


main()
