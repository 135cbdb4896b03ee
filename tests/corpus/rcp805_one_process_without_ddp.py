# title: The evaluation runs in train mode, dropout and running statistics included; one process, no DDP
# source: https://docs.pytorch.org/docs/stable/notes/autograd.html#evaluation-mode-nn-module-eval
# nproc: 1
# expect.codes: RCP805
# expect.ranks: all
# expect.subject: any
# expect.step: 20
# expect.step_slack: 1
# plain_pytorch: silent
"""A regression with an evaluation after every epoch."""
import os
import time
import zlib

import torch
from torch import nn

FAULT = os.environ.get("FAULT", "0") == "1"


def evaluate(model, x, y):
    was = model.training
    model.train(was and FAULT)
    with torch.no_grad():
        error = sum(nn.functional.mse_loss(model(x[i:i + 16]), y[i:i + 16]).item() for i in range(0, len(x), 16))
    model.train(was)
    return error


def main():
    torch.set_num_threads(1)
    torch.manual_seed(8)
    rule = torch.randn(12, 1)
    model = nn.Sequential(nn.Linear(12, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 1))
    opt = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    x_val = torch.randn(96, 12)
    losses = []
    for _ in range(4):
        for _ in range(20):
            x = torch.randn(32, 12)
            loss = nn.functional.mse_loss(model(x), (x @ rule).tanh())
            opt.zero_grad()
            loss.backward()
            opt.step()
            losses.append(loss.item())
        evaluate(model, x_val, (x_val @ rule).tanh())
    crc = zlib.crc32(b"".join(p.detach().numpy().tobytes() for p in model.parameters()))
    print(f"RESULT rank=0 first={losses[0]:.4f} final={sum(losses[-5:]) / 5:.4f} crc={crc:08x}", flush=True)
    time.sleep(0.3)


if __name__ == "__main__":
    main()
