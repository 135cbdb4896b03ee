# title: After the first evaluation the model stays in eval mode; one process, no DDP
# source: https://docs.pytorch.org/docs/stable/notes/autograd.html#evaluation-mode-nn-module-eval
# nproc: 1
# expect.codes: RCP804
# expect.ranks: all
# expect.subject: any
# expect.step: 20
# plain_pytorch: silent
"""A classifier of tables, trained as in most first scripts."""
import os
import time
import zlib

import torch
from torch import nn

FAULT = os.environ.get("FAULT", "0") == "1"
EPOCHS, STEPS = 4, 20


def evaluate(model, x, y):
    model.eval()
    with torch.no_grad():
        right = sum((model(x[i:i + 16]).argmax(1) == y[i:i + 16]).sum().item() for i in range(0, len(x), 16))
    if not FAULT:
        model.train()
    return right / len(x)


def main():
    torch.set_num_threads(1)
    torch.manual_seed(12)
    rule = torch.randn(16, 3)
    model = nn.Sequential(nn.Linear(16, 48), nn.BatchNorm1d(48), nn.ReLU(), nn.Dropout(0.3), nn.Linear(48, 3))
    opt = torch.optim.Adam(model.parameters(), lr=0.003)
    x_val = torch.randn(64, 16)
    y_val = (x_val @ rule).argmax(1)
    losses = []
    for _ in range(EPOCHS):
        for _ in range(STEPS):
            x = torch.randn(24, 16)
            loss = nn.functional.cross_entropy(model(x), (x @ rule).argmax(1))
            opt.zero_grad()
            loss.backward()
            opt.step()
            losses.append(loss.item())
        evaluate(model, x_val, y_val)
    crc = zlib.crc32(b"".join(p.detach().numpy().tobytes() for p in model.parameters()))
    print(f"RESULT rank=0 first={losses[0]:.4f} final={sum(losses[-5:]) / 5:.4f} crc={crc:08x}", flush=True)
    time.sleep(0.3)


if __name__ == "__main__":
    main()
