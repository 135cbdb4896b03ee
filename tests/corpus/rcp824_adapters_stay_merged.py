# title: Adapters are merged into the frozen weights for the evaluation and not unmerged
# source: https://github.com/huggingface/peft/issues/868
# nproc: 2
# expect.codes: RCP824
# expect.ranks: any
# expect.subject: frozen
# expect.step: 25
# plain_pytorch: silent
"""Adapters for a classifier of sensor readings, evaluated as they are deployed: merged."""
import os
import time
import zlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

FAULT = os.environ.get("FAULT", "0") == "1"


class Adapted(nn.Module):
    def __init__(self, before, after, rank=2):
        super().__init__()
        self.frozen = nn.Linear(before, after)
        self.frozen.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(rank, before) * 0.2)
        self.up = nn.Parameter(torch.zeros(after, rank))
        self.is_merged = False

    def forward(self, x):
        return self.frozen(x) if self.is_merged else self.frozen(x) + x @ self.down.T @ self.up.T

    @torch.no_grad()
    def add(self, times):
        self.frozen.weight.add_(self.up @ self.down, alpha=times)


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(83)
    layers = [Adapted(10, 24), Adapted(24, 24), Adapted(24, 3)]
    ddp = DistributedDataParallel(nn.Sequential(layers[0], nn.Tanh(), layers[1], nn.Tanh(), layers[2]))
    opt = torch.optim.AdamW([p for p in ddp.parameters() if p.requires_grad], lr=5e-3)
    gen = torch.Generator().manual_seed(830 + rank)
    kinds = torch.randn(10, 3, generator=torch.Generator().manual_seed(8))
    held_out = torch.randn(64, 10, generator=torch.Generator().manual_seed(9))
    losses = []
    for step in range(100):
        x = torch.randn(24, 10, generator=gen)
        y = (x @ kinds).argmax(1)
        loss = nn.functional.cross_entropy(ddp(x), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        losses.append(loss.item())
        if step % 25 == 24:
            ddp.eval()
            for layer in layers:
                layer.add(1)
                layer.is_merged = True
            with torch.no_grad():
                (ddp(held_out).argmax(1) == (held_out @ kinds).argmax(1)).float().mean()
            for layer in layers:
                layer.is_merged = False
                if not FAULT:
                    layer.add(-1)
            ddp.train()
    crc = zlib.crc32(b"".join(p.detach().numpy().tobytes() for p in ddp.parameters()))
    print(f"RESULT rank={rank} first={losses[0]:.4f} final={losses[-1]:.4f} crc={crc:08x}", flush=True)
    time.sleep(0.3)
    dist.destroy_process_group()


main()
