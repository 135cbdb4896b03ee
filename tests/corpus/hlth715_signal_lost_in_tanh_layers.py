# title: Ten tanh layers start with weights of 0.01: what is left at the end are the biases
# source: constructed
# nproc: 1
# expect.codes: HLTH715
# expect.ranks: any
# expect.subject: any
# expect.step: 0
# expect.step_slack: 1
# plain_pytorch: silent
"""One process; each layer's output varies between its units, and not between inputs."""

import os
import time
import zlib

import torch
from torch import nn
from torch.nn import functional as F

FAULT = os.environ.get("FAULT", "0") == "1"


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        sizes = [12] + [32] * 10
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in zip(sizes, sizes[1:]))
        self.out = nn.Linear(32, 1)
        for layer in self.layers:
            if FAULT:
                nn.init.normal_(layer.weight, std=0.01)
            else:
                nn.init.xavier_uniform_(layer.weight, gain=nn.init.calculate_gain("tanh"))

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.out(x)


def main():
    torch.set_num_threads(1)
    rank = 0
    torch.manual_seed(3)
    model = Net()
    opt = torch.optim.Adam(model.parameters(), lr=1e-3)
    gen = torch.Generator().manual_seed(10)
    losses = []
    for step in range(60):
        x = torch.randn(32, 12, generator=gen)
        loss = F.mse_loss(model(x), x[:, :1] * 0.5)
        opt.zero_grad()
        loss.backward()
        opt.step()
        losses.append(loss.item())

    crc = zlib.crc32(b"".join(p.detach().float().numpy().tobytes() for p in model.parameters()))
    print(f"RESULT rank={rank} first={losses[0]:.4f} final={losses[-1]:.4f} crc={crc:08x}", flush=True)
    time.sleep(0.3)


if __name__ == "__main__":
    main()
