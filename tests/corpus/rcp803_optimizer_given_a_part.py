# title: A name filter leaves the parameters of the output layer out of the optimizer
# source: constructed
# nproc: 2
# expect.codes: RCP803
# expect.ranks: all
# expect.subject: readout
# expect.step: 3
# plain_pytorch: silent
"""Weight decay groups by name; in the fault the filters do not cover the readout."""
import os
import time
import zlib

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

FAULT = os.environ.get("FAULT", "0") == "1"
torch.set_num_threads(1)
dist.init_process_group("gloo")
rank = dist.get_rank()


class Forecaster(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.LSTM(2, 24, batch_first=True)
        self.norm = nn.LayerNorm(24)
        self.readout = nn.Linear(24, 1)

    def forward(self, series):
        return self.readout(self.norm(self.encoder(series)[0][:, -1]))


def series(gen):
    phase = 6.28 * torch.rand(24, 1, generator=gen)
    t = torch.arange(17) * 0.4
    both = torch.stack([torch.sin(t + phase), torch.cos(t + phase)], -1)
    return both[:, :16] + 0.05 * torch.randn(24, 16, 2, generator=gen), both[:, 16, :1]


torch.manual_seed(11)
model = DDP(Forecaster())
named = list(model.module.named_parameters())
decay = [p for n, p in named if n.startswith("encoder") and "weight" in n]
if FAULT:
    rest = [p for n, p in named if n.startswith("norm") or (n.startswith("encoder") and "bias" in n)]
else:
    rest = [p for n, p in named if not (n.startswith("encoder") and "weight" in n)]
opt = torch.optim.AdamW([{"params": decay, "weight_decay": 0.05}, {"params": rest, "weight_decay": 0.0}], lr=4e-3)
gen = torch.Generator().manual_seed(rank)
losses = []
for _ in range(50):
    x, y = series(gen)
    loss = F.mse_loss(model(x), y)
    opt.zero_grad()
    loss.backward()
    opt.step()
    losses.append(loss.item())
crc = zlib.crc32(b"".join(p.detach().numpy().tobytes() for p in model.parameters()))
print(f"RESULT rank={rank} first={losses[0]:.4f} final={sum(losses[-5:]) / 5:.4f} crc={crc:08x}", flush=True)
time.sleep(0.3)
dist.destroy_process_group()
