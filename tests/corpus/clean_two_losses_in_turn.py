# title: A task loss in each step and, after every fourth, an update on a consistency loss of its own
# source: https://arxiv.org/abs/1912.04958
# nproc: 2
# expect.codes: none
# plain_pytorch: silent
"""Lazy regularisation: one optimizer, two losses of other sizes and gradients, which come in turn."""
import time
import zlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss
from torch.nn.parallel import DistributedDataParallel


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(3)
    net = nn.Sequential(nn.Linear(6, 64), nn.ReLU(), nn.Linear(64, 4))
    model = DistributedDataParallel(net)
    opt = torch.optim.Adam(model.parameters(), lr=2e-3)
    gen = torch.Generator().manual_seed(40 + rank)
    truth = torch.randn(6, 4, generator=torch.Generator().manual_seed(7))
    losses = []
    for step in range(120):
        x = torch.randn(64, 6, generator=gen)
        loss = cross_entropy(model(x), (x @ truth).argmax(1))
        opt.zero_grad()
        loss.backward()
        opt.step()
        losses.append(loss.item())
        if step % 4 == 3:
            x = torch.randn(64, 6, generator=gen)
            near = x + 0.05 * torch.randn(64, 6, generator=gen)
            apart = 30 * mse_loss(model(near), net(x).detach())
            opt.zero_grad()
            apart.backward()
            opt.step()
    crc = zlib.crc32(b"".join(p.detach().numpy().tobytes() for p in net.parameters()))
    print(f"RESULT rank={rank} first={losses[0]:.4f} final={sum(losses[-5:]) / 5:.4f} crc={crc:08x}", flush=True)
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
