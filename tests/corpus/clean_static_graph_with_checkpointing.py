# title: Activation checkpointing under DDP with static_graph
# source: https://github.com/pytorch/pytorch/issues/109191
# nproc: 2
# expect.codes: none
# plain_pytorch: silent
"""Every block runs its forward twice, the second time in the middle of the backward."""
import time
import zlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.checkpoint import checkpoint


class Tower(nn.Module):
    def __init__(self, width=24, depth=3):
        super().__init__()
        self.start = nn.Linear(10, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.ReLU(), nn.Linear(2 * width, width))
            for _ in range(depth))
        self.finish = nn.Linear(width, 2)

    def forward(self, x):
        h = self.start(x)
        for block in self.blocks:
            h = h + checkpoint(block, h, use_reentrant=False)
        return self.finish(h)


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(62)
    model = DDP(Tower(), static_graph=True)
    opt = torch.optim.Adam(model.parameters(), lr=3e-3)
    gen = torch.Generator().manual_seed(rank)
    losses = []
    for _ in range(60):
        x = torch.randn(40, 10, generator=gen)
        y = (x[:, 0] + x[:, 1] * x[:, 2] > 0).long()
        loss = nn.functional.cross_entropy(model(x), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        losses.append(loss.item())
    crc = zlib.crc32(b"".join(p.detach().numpy().tobytes() for p in model.parameters()))
    print(f"RESULT rank={rank} first={losses[0]:.4f} final={sum(losses[-5:]) / 5:.4f} crc={crc:08x}", flush=True)
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
