# title: The model is built after seeding with the rank, and DDP's broadcast repairs it
# source: https://github.com/facebookresearch/detr/issues/544
# nproc: 2
# expect.codes: RANK111
# expect.ranks: any
# expect.subject: weight
# expect.step: 0
# plain_pytorch: silent
"""Nothing is wrong with the run: the ranks' first weights differ, rank 0's are used."""
import os
import random
import time
import zlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

FAULT = os.environ.get("FAULT", "0") == "1"


def seed_everything(seed):
    random.seed(seed)
    torch.manual_seed(seed)


def make_model():
    return nn.Sequential(nn.Linear(12, 40), nn.Mish(), nn.Linear(40, 3))


torch.set_num_threads(1)
dist.init_process_group("gloo")
rank = dist.get_rank()
if FAULT:
    seed_everything(42 + rank)
    model = DDP(make_model())
else:
    seed_everything(42)
    model = DDP(make_model())
    seed_everything(42 + rank)

opt = torch.optim.AdamW(model.parameters(), lr=4e-3)
losses = []
for _ in range(50):
    x = torch.randn(32, 12)
    y = (x[:, 0] > 0).long() + (x[:, 1] > 0).long()
    loss = nn.functional.cross_entropy(model(x), y)
    opt.zero_grad()
    loss.backward()
    opt.step()
    losses.append(loss.item())
crc = zlib.crc32(b"".join(p.detach().numpy().tobytes() for p in model.parameters()))
print(f"RESULT rank={rank} first={losses[0]:.4f} final={sum(losses[-5:]) / 5:.4f} crc={crc:08x}", flush=True)
time.sleep(0.3)
dist.destroy_process_group()
