# title: Local SGD by hand: every step under no_sync, the parameters are averaged after every eighth
# source: https://arxiv.org/abs/1805.09767
# nproc: 2
# expect.codes: none
# plain_pytorch: silent
"""Parameters differ between two averagings; nothing declares it but that they agree again."""
import time
import zlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

PERIOD, STEPS = 8, 60


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(4)
    slope = torch.randn(11, 1) / 3
    model = DistributedDataParallel(nn.Sequential(nn.Linear(11, 32), nn.Tanh(), nn.Linear(32, 1)))
    opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    gen = torch.Generator().manual_seed(rank)
    losses = []
    for step in range(STEPS):
        x = torch.randn(40, 11, generator=gen)
        with model.no_sync():
            loss = nn.functional.mse_loss(model(x), (x @ slope).sin())
            loss.backward()
        opt.step()
        opt.zero_grad()
        losses.append(loss.item())
        if (step + 1) % PERIOD == 0:
            with torch.no_grad():
                for p in model.parameters():
                    dist.all_reduce(p)
                    p /= dist.get_world_size()
    crc = zlib.crc32(b"".join(p.detach().numpy().tobytes() for p in model.parameters()))
    print(f"RESULT rank={rank} first={losses[0]:.4f} final={sum(losses[-5:]) / 5:.4f} crc={crc:08x}", flush=True)
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
