# title: An initialiser meant for the last layer sets the biases of all layers, and hidden units never fire
# source: constructed
# nproc: 2
# expect.codes: HLTH703, HLTH714
# expect.ranks: all
# expect.subject: any
# expect.step: 0
# expect.step_slack: 12
# plain_pytorch: silent
"""Detection of rare events; the last bias starts at the log odds of the rare class."""
import os
import time
import zlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

FAULT = os.environ.get("FAULT", "0") == "1"


def events(gen, n=64):
    readings = torch.randn(n, 20, generator=gen)
    return readings, (readings[:, :3].sum(1) > 2.5).float()


class Detector(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(20, 48)
        self.second = nn.Linear(48, 32)
        self.last = nn.Linear(32, 1)
        for layer in (self.first, self.second, self.last) if FAULT else (self.last,):
            nn.init.constant_(layer.bias, -4.6)

    def forward(self, x):
        x = torch.relu(self.first(x))
        return self.last(torch.relu(self.second(x)))[:, 0]


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(1)
    model = DDP(Detector())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    gen = torch.Generator().manual_seed(20 + rank)
    losses = []
    for _ in range(60):
        readings, alarm = events(gen)
        loss = F.binary_cross_entropy_with_logits(model(readings), alarm)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    crc = zlib.crc32(b"".join(p.detach().float().numpy().tobytes() for p in model.parameters()))
    print(f"RESULT rank={rank} first={losses[0]:.4f} final={sum(losses[-5:]) / 5:.4f} crc={crc:08x}", flush=True)
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
