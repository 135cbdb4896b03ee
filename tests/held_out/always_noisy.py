# title: Noise is added to the input also when the model is evaluated
# source: constructed
# nproc: 1
# expect.codes: RCP820
# expect.ranks: all
# expect.subject: any
# expect.step: any
# plain_pytorch: silent
"""A denoising regression of heart rates with an evaluation after every epoch."""
import os

import torch
import torch.nn as nn

FAULT = os.environ.get("FAULT") == "1"


class HeartRate(nn.Module):
    def __init__(self, noise=0.3):
        super().__init__()
        self.noise = noise
        self.net = nn.Sequential(nn.Linear(30, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, x):
        if self.training or FAULT:
            x = x + self.noise * torch.randn_like(x)
        return self.net(x)


def pulses(n):
    rate = torch.rand(n, 1)
    return torch.sin((1 + 2 * rate) * torch.arange(30) * 0.3), rate


def main():
    torch.manual_seed(3)
    model = HeartRate()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    criterion = nn.MSELoss()
    held = [pulses(32) for _ in range(4)]
    for epoch in range(6):
        model.train()
        for _ in range(16):
            x, rate = pulses(32)
            loss = criterion(model(x), rate)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            val = sum(criterion(model(x), rate).item() for x, rate in held) / 4
        print(f"epoch {epoch} val {val:.4f}")


main()
