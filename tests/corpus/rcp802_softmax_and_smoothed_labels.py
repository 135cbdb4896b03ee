# title: A softmax layer stands in front of a cross entropy with label smoothing
# source: constructed
# nproc: 1
# expect.codes: RCP802
# expect.ranks: all
# expect.subject: any
# expect.step: 0
# expect.step_slack: 1
# plain_pytorch: silent
"""One process, without DDP."""

import os
import time
import zlib

import torch
from torch import nn

FAULT = os.environ.get("FAULT", "0") == "1"


def main():
    torch.set_num_threads(1)
    rank = 0
    torch.manual_seed(3)
    parts = [nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 5)]
    model = nn.Sequential(*parts, *([nn.Softmax(dim=1)] if FAULT else []))
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
    opt = torch.optim.Adam(model.parameters(), lr=3e-3)
    gen = torch.Generator().manual_seed(10 + rank)
    losses = []
    for step in range(50):
        x = torch.randn(32, 8, generator=gen)
        loss = criterion(model(x), x[:, :5].argmax(1))
        opt.zero_grad()
        loss.backward()
        opt.step()
        losses.append(loss.item())

    crc = zlib.crc32(b"".join(p.detach().float().numpy().tobytes() for p in model.parameters()))
    print(f"RESULT rank={rank} first={losses[0]:.4f} final={losses[-1]:.4f} crc={crc:08x}", flush=True)
    time.sleep(0.3)


if __name__ == "__main__":
    main()
