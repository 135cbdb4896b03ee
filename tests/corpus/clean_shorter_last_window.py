# title: The last accumulation window of an epoch is shorter, and divided by its own length
# source: https://github.com/huggingface/pytorch-image-models/blob/main/train.py
# nproc: 1
# expect.codes: none
# plain_pytorch: silent
"""Gradient accumulation over two micro-batches, one in the last window."""
import time
import zlib

import torch
from torch import nn


def main():
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 10))
    opt = torch.optim.SGD(model.parameters(), lr=0.001)
    losses = []
    for _ in range(3):
        for micro in range(41):
            length = 1 if micro == 40 else 2
            loss = nn.functional.cross_entropy(model(torch.randn(32, 16)), torch.randint(10, (32,)))
            (loss / length).backward()
            if micro % 2 == 1 or micro == 40:
                opt.step()
                opt.zero_grad()
                losses.append(loss.item())
    crc = zlib.crc32(b"".join(p.detach().numpy().tobytes() for p in model.parameters()))
    print(f"RESULT rank=0 first={losses[0]:.4f} final={sum(losses[-5:]) / 5:.4f} crc={crc:08x}", flush=True)
    time.sleep(0.3)


if __name__ == "__main__":
    main()
