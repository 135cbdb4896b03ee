# title: A squared loss jumps to a billion in one step on every rank, the gradient is clipped, and training goes on
# source: constructed
# nproc: 4
# expect.codes: none
# plain_pytorch: silent
"""Insurance claims with one catastrophe; large is not infinite."""
import time
import zlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def claims(gen, step, n=32):
    x = torch.randn(n, 7, generator=gen)
    y = (x[:, :2].sum(1, keepdim=True) + 0.2 * torch.randn(n, 1, generator=gen)).exp().clamp_max(20.0)
    if step == 22:
        y[0] += 200_000.0
    return x, y


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(22)
    model = DDP(nn.Sequential(nn.Linear(7, 40), nn.Softplus(), nn.Linear(40, 1)))
    opt = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    gen = torch.Generator().manual_seed(200 + rank)
    losses = []
    for step in range(60):
        x, y = claims(gen, step)
        loss = (model(x) - y).square().mean()
        opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 2.0)
        opt.step()
        losses.append(loss.item())
    crc = zlib.crc32(b"".join(p.detach().numpy().tobytes() for p in model.parameters()))
    print(f"RESULT rank={rank} first={losses[0]:.4f} final={sum(losses[-5:]) / 5:.4f} crc={crc:08x} "
          f"highest={max(losses):.3g}", flush=True)
    time.sleep(0.3)
    dist.destroy_process_group()


main()
