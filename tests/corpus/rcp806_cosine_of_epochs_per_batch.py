# title: A cosine whose length is the number of epochs is stepped after each batch
# source: constructed
# nproc: 2
# expect.codes: RCP806
# expect.ranks: all
# expect.subject: CosineAnnealingLR
# expect.step: 5
# expect.step_slack: 1
# plain_pytorch: silent
"""Bird calls by their spectra; the rate goes up and down within each epoch instead of once in five."""
import os
import time
import zlib

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

FAULT = os.environ.get("FAULT", "0") == "1"
EPOCHS = 5


def calls():
    gen = torch.Generator().manual_seed(8)
    kind = torch.randint(0, 4, (448,), generator=gen)
    spectra = torch.rand(448, 20, generator=gen)
    spectra[torch.arange(448), 5 * kind] += 1
    return TensorDataset(spectra, kind)


def epoch(model, loader, optimizer, scheduler):
    for spectra, kind in loader:
        loss = F.cross_entropy(model(spectra), kind)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if FAULT:
            scheduler.step()
        yield loss.item()
    if not FAULT:
        scheduler.step()


torch.set_num_threads(1)
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(19)
model = DDP(nn.Sequential(nn.Linear(20, 32), nn.GELU(), nn.Linear(32, 4)))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=EPOCHS)
sampler = DistributedSampler(calls(), seed=2)
loader = DataLoader(calls(), batch_size=16, sampler=sampler)
losses = []
for number in range(EPOCHS):
    sampler.set_epoch(number)
    losses += epoch(model, loader, optimizer, scheduler)
crc = zlib.crc32(b"".join(p.detach().numpy().tobytes() for p in model.parameters()))
print(f"RESULT rank={rank} first={losses[0]:.4f} final={sum(losses[-5:]) / 5:.4f} crc={crc:08x}", flush=True)
time.sleep(0.3)
dist.destroy_process_group()
