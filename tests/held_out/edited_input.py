# title: A residual is added in place to a tensor that the derivative of tanh needs
# source: constructed
# nproc: 2
# expect.codes: FAIL1005
# expect.ranks: any
# expect.subject: any
# expect.step: any
# expect.location: edited_input.py:45
# plain_pytorch: error
"""Forecast of a load curve by layers with residuals."""
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

FAULT = os.environ.get("FAULT") == "1"


class Layer(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.linear = nn.Linear(d, d)

    def forward(self, x):
        out = torch.tanh(self.linear(x))
        if FAULT:
            out += x
            return out
        return out + x


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(24, 32), Layer(32), Layer(32), nn.Linear(32, 4)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    gen = torch.Generator().manual_seed(dist.get_rank())
    for step in range(40):
        start = torch.rand(32, 1, generator=gen) * 6
        load = torch.sin(start + torch.arange(28) * 0.26) + 0.1 * torch.randn(32, 28, generator=gen)
        loss = nn.functional.mse_loss(model(load[:, :24]), load[:, 24:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"rank {dist.get_rank()} {loss.item():.4f}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
