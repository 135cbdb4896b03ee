# title: Gradient accumulation as documented: no_sync around all micro-batches but the last
# source: https://pytorch.org/docs/stable/generated/torch.nn.parallel.DistributedDataParallel.html
# nproc: 2
# expect.codes: none
# plain_pytorch: silent
"""Between two steps the ranks hold different, unreduced gradients, on purpose."""
import time
import zlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

WINDOW = 3


def micro_batches(gen, rule):
    for k in range(WINDOW):
        x = torch.randn(16, 10, generator=gen)
        yield k, x, (x @ rule > 0).long().squeeze(1)


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    rule = torch.randn(10, 1)
    model = DDP(nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 2)))
    opt = torch.optim.Adam(model.parameters(), lr=5e-3)
    gen = torch.Generator().manual_seed(rank)
    losses = []
    for _ in range(50):
        total = 0.0
        for k, x, y in micro_batches(gen, rule):
            if k < WINDOW - 1:
                with model.no_sync():
                    loss = nn.functional.cross_entropy(model(x), y) / WINDOW
                    loss.backward()
            else:
                loss = nn.functional.cross_entropy(model(x), y) / WINDOW
                loss.backward()
            total += loss.item()
        opt.step()
        opt.zero_grad()
        losses.append(total)
    crc = zlib.crc32(b"".join(p.detach().numpy().tobytes() for p in model.parameters()))
    print(f"RESULT rank={rank} first={losses[0]:.4f} final={sum(losses[-5:]) / 5:.4f} crc={crc:08x}", flush=True)
    time.sleep(0.3)
    dist.destroy_process_group()


main()
