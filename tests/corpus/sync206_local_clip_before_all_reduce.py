# title: Each rank clips its own gradient before the hand-written all-reduce
# source: https://github.com/LeelaChessZero/lczero-training/pull/162
# nproc: 2
# expect.codes: SYNC206, SYNC204
# expect.ranks: any
# expect.subject: any
# expect.step: 0
# expect.step_slack: 3
# plain_pytorch: silent
"""No DDP: gradients are averaged by hand. Afterwards the ranks agree, on a sum with uneven weights."""
import os
import time
import zlib

import torch
import torch.distributed as dist
from torch import nn

FAULT = os.environ.get("FAULT", "0") == "1"
MAX_NORM = 0.35


def average_gradients(parameters):
    for p in parameters:
        dist.all_reduce(p.grad)
        p.grad /= dist.get_world_size()


def clip(parameters):
    return nn.utils.clip_grad_norm_(parameters, MAX_NORM)


class Evaluator(nn.Module):
    """Value of a small board position."""

    def __init__(self):
        super().__init__()
        self.board = nn.Conv2d(2, 12, 3, padding=1)
        self.value = nn.Sequential(nn.Flatten(), nn.Linear(12 * 25, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, x):
        return torch.tanh(self.value(torch.relu(self.board(x))))


def positions(gen, loudness, n=32):
    x = (torch.rand(n, 2, 5, 5, generator=gen) > 0.6).float()
    advantage = (x[:, 0] - x[:, 1]).sum((1, 2)) / 5
    return x, torch.tanh(loudness * advantage)[:, None]


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(64)
    net = Evaluator()
    for p in net.parameters():
        dist.broadcast(p.data, src=0)
    params = list(net.parameters())
    opt = torch.optim.SGD(params, lr=0.1, momentum=0.9)
    gen = torch.Generator().manual_seed(rank)
    losses = []
    for _ in range(60):
        x, y = positions(gen, loudness=1.0 + rank)
        loss = (net(x) - y).square().mean()
        opt.zero_grad()
        loss.backward()
        if FAULT:
            clip(params)
            average_gradients(params)
        else:
            average_gradients(params)
            clip(params)
        opt.step()
        losses.append(loss.item())
    crc = zlib.crc32(b"".join(p.detach().numpy().tobytes() for p in params))
    print(f"RESULT rank={rank} first={losses[0]:.4f} final={sum(losses[-5:]) / 5:.4f} crc={crc:08x}", flush=True)
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
