# title: A weight matrix is filled with one value, so that all units of the layer are copies of each other
# source: constructed
# nproc: 2
# expect.codes: HLTH715
# expect.ranks: all
# expect.subject: hidden.weight
# expect.step: 0
# expect.step_slack: 0
# plain_pytorch: silent
"""Prediction of credit defaults; the initialiser for biases was applied to weights."""
import os
import time
import zlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

FAULT = os.environ.get("FAULT", "0") == "1"


class Scorer(nn.Module):
    def __init__(self):
        super().__init__()
        self.hidden = nn.Linear(14, 36)
        self.second = nn.Linear(36, 18)
        self.score = nn.Linear(18, 1)
        for layer in (self.hidden, self.second):
            nn.init.constant_(layer.weight if FAULT else layer.bias, 0.05)

    def forward(self, x):
        return self.score(F.leaky_relu(self.second(F.leaky_relu(self.hidden(x)))))[:, 0]


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(1)
    model = DDP(Scorer())
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    gen = torch.Generator().manual_seed(rank)
    losses = []
    for _ in range(50):
        x = torch.randn(64, 14, generator=gen)
        loss = F.binary_cross_entropy_with_logits(model(x), (x[:, 0] > x[:, 1]).float())
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
