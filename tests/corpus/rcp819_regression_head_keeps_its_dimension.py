# title: Predictions of shape (N, 1) meet targets of shape (N,) in mse_loss
# source: constructed
# nproc: 2
# expect.codes: RCP819
# expect.ranks: all
# expect.subject: MseLoss
# expect.step: 0
# plain_pytorch: silent
"""House prices from a table; the fault does not squeeze the head's output."""
import warnings
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
warnings.filterwarnings("ignore", message="Using a target size")
torch.manual_seed(6)
model = DDP(nn.Sequential(nn.Linear(9, 32), nn.SiLU(), nn.Linear(32, 1)))
opt = torch.optim.RMSprop(model.parameters(), lr=1e-3)
gen = torch.Generator().manual_seed(70 + rank)
weights = torch.randn(9, generator=torch.Generator().manual_seed(2))
losses = []
for _ in range(60):
    table = torch.randn(32, 9, generator=gen)
    price = table @ weights + 0.1 * torch.randn(32, generator=gen)
    predicted = model(table)
    if not FAULT:
        predicted = predicted.squeeze(-1)
    loss = F.mse_loss(predicted, price)
    opt.zero_grad()
    loss.backward()
    opt.step()
    losses.append(loss.item())
crc = zlib.crc32(b"".join(p.detach().numpy().tobytes() for p in model.parameters()))
print(f"RESULT rank={rank} first={losses[0]:.4f} final={sum(losses[-5:]) / 5:.4f} crc={crc:08x}", flush=True)
time.sleep(0.3)
dist.destroy_process_group()
