# title: Two tasks in turn, each with its own head, with find_unused_parameters
# source: constructed
# nproc: 2
# expect.codes: none
# plain_pytorch: silent
"""Two tasks in turn, each with its own head, with find_unused_parameters."""

import os
import time
import zlib

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class MultiTask(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(12, 48), nn.SiLU())
        self.heads = nn.ModuleDict({"class": nn.Linear(48, 4), "value": nn.Linear(48, 1)})

    def forward(self, x, task):
        return self.heads[task](self.trunk(x))


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(3)
    model = DDP(MultiTask(), find_unused_parameters=True)
    opt = torch.optim.AdamW(model.parameters(), lr=3e-3)
    gen, losses = torch.Generator().manual_seed(rank), []
    for step in range(60):
        x = torch.randn(32, 12, generator=gen)
        if step % 3:
            loss = F.cross_entropy(model(x, "class"), x[:, :4].argmax(1))
        else:
            loss = F.mse_loss(model(x, "value")[:, 0], x[:, 5] - x[:, 6])
        opt.zero_grad(set_to_none=True)
        loss.backward()
        opt.step()
        losses.append(loss.item())
    crc = zlib.crc32(b"".join(p.detach().numpy().tobytes() for p in model.parameters()))
    print(f"RESULT rank={rank} first={losses[0]:.4f} final={losses[-1]:.4f} crc={crc:08x}", flush=True)
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
