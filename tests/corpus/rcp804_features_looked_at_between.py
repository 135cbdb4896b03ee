# title: Features are plotted after step 15: `model.trunk.eval()` before it, and no `train()` after it
# source: constructed
# nproc: 2
# expect.codes: RCP804
# expect.ranks: all
# expect.subject: trunk
# expect.step: 16
# plain_pytorch: silent
"""The model as a whole says that it trains; from step 16 on its trunk drops nothing."""
import os
import time
import zlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

FAULT = os.environ.get("FAULT", "1") == "1"


class Regressor(nn.Module):
    def __init__(self):
        super().__init__()
        layers = [nn.Sequential(nn.Linear(16, 16), nn.ELU(), nn.Dropout(0.2)) for _ in range(3)]
        self.trunk = nn.ModuleList(layers)
        self.out = nn.Linear(16, 2)

    def features(self, x):
        for layer in self.trunk:
            x = x + layer(x)
        return x

    def forward(self, x):
        return self.out(self.features(x))


def spread_of_features(model, x):
    model.trunk.eval()
    with torch.no_grad():
        spread = model.features(x).std().item()
    if not FAULT:
        model.trunk.train()
    return spread


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(17)
    model = Regressor()
    ddp = DistributedDataParallel(model)
    opt = torch.optim.Adam(ddp.parameters(), lr=2e-3)
    truth = torch.randn(16, 2)
    gen = torch.Generator().manual_seed(3 + rank)
    torch.manual_seed(700 + rank)
    losses = []
    for step in range(60):
        x = torch.randn(32, 16, generator=gen)
        loss = nn.functional.mse_loss(ddp(x), (x @ truth).sin())
        opt.zero_grad()
        loss.backward()
        opt.step()
        losses.append(loss.item())
        if step == 15:
            spread_of_features(model, x)
    crc = zlib.crc32(b"".join(p.detach().numpy().tobytes() for p in ddp.parameters()))
    print(f"RESULT rank={rank} first={losses[0]:.4f} final={sum(losses[-5:]) / 5:.4f} crc={crc:08x}", flush=True)
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
