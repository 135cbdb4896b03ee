# title: Each sample's gradient is clipped by itself, noise is added, and the sum is reduced by hand
# source: https://arxiv.org/abs/1607.00133
# nproc: 2
# expect.codes: none
# plain_pytorch: silent
"""Training for differential privacy without a library: what is clipped is added up elsewhere and cleared."""

import time
import zlib

import torch
import torch.distributed as dist
from torch import nn


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 20), nn.Tanh(), nn.Linear(20, 3))
    opt = torch.optim.SGD(model.parameters(), lr=0.5)
    rule = torch.randn(12, 3, generator=torch.Generator().manual_seed(1))
    gen = torch.Generator().manual_seed(70 + rank)
    samples, limit = 8, 1.0
    curve = []
    for _ in range(50):
        x = torch.randn(samples, 12, generator=gen)
        sums = [torch.zeros_like(p) for p in model.parameters()]
        whole = 0.0
        for one in x:
            loss = nn.functional.cross_entropy(model(one[None]), (one @ rule).argmax()[None])
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), limit)
            for total, p in zip(sums, model.parameters(), strict=True):
                total += p.grad
            opt.zero_grad()
            whole += loss.item() / samples
        for total, p in zip(sums, model.parameters(), strict=True):
            total += 0.1 * limit * torch.randn(total.shape, generator=gen)
            dist.all_reduce(total)
            p.grad = total / (samples * world)
        opt.step()
        opt.zero_grad()
        curve.append(whole)
    crc = zlib.crc32(b"".join(p.detach().numpy().tobytes() for p in model.parameters()))
    print(f"RESULT rank={rank} first={curve[0]:.4f} final={sum(curve[-5:]) / 5:.4f} crc={crc:08x}", flush=True)
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
