# title: Federated rounds in which each rank sits out in turn, the first round included
# source: https://arxiv.org/abs/1602.05629
# nproc: 3
# expect.codes: none
# plain_pytorch: silent
"""No DDP on purpose: the ranks train apart, take different numbers of steps, and are averaged after each round."""
import time
import zlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy


def average(net, world):
    with torch.no_grad():
        for p in net.parameters():
            dist.all_reduce(p)
            p /= world


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(5)
    net = nn.Linear(6, 4)
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    gen = torch.Generator().manual_seed(60 + rank)
    truth = torch.randn(6, 4, generator=torch.Generator().manual_seed(7))
    losses = []
    for round_number in range(8):
        for _ in range(0 if rank == round_number % world else 8):
            x = torch.randn(20, 6, generator=gen)
            loss = cross_entropy(net(x), (x @ truth).argmax(1))
            opt.zero_grad()
            loss.backward()
            opt.step()
            losses.append(loss.item())
        average(net, world)
    crc = zlib.crc32(b"".join(p.detach().numpy().tobytes() for p in net.parameters()))
    print(f"RESULT rank={rank} first={losses[0]:.4f} final={sum(losses[-5:]) / 5:.4f} crc={crc:08x}", flush=True)
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
