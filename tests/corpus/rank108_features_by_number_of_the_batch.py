# title: Features are kept by the number of the batch, and one rank shuffles its second epoch
# source: constructed
# nproc: 2
# expect.codes: RANK108
# expect.ranks: any
# expect.subject: loss
# expect.step: 30
# expect.step_slack: 8
# plain_pytorch: silent
"""Grades of timber from spectra whose features are computed once."""
import os
import time
import zlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

FAULT = os.environ.get("FAULT", "0") == "1"
BATCHES = 30


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(91)
    ddp = DistributedDataParallel(nn.Sequential(nn.Linear(18, 48), nn.ReLU(), nn.Linear(48, 5)))
    opt = torch.optim.Adam(ddp.parameters(), lr=2e-3)
    gen = torch.Generator().manual_seed(910 + rank)
    grades = torch.randn(18, 5, generator=torch.Generator().manual_seed(9))
    spectra = torch.randn(BATCHES * 32, 18, generator=gen)
    wanted = (spectra @ grades + 0.5 * torch.randn(len(spectra), 5, generator=gen)).argmax(1)
    kept, losses = {}, []
    for epoch in range(4):
        order = torch.randperm(len(spectra), generator=gen) if epoch and rank else torch.arange(len(spectra))
        for number, rows in enumerate(order.split(32)):
            key = number if FAULT else tuple(rows.tolist())
            if key not in kept:
                kept[key] = (spectra[rows] - spectra.mean(0)) / spectra.std(0)
            loss = nn.functional.cross_entropy(ddp(kept[key]), wanted[rows])
            opt.zero_grad()
            loss.backward()
            opt.step()
            losses.append(loss.item())
    crc = zlib.crc32(b"".join(p.detach().numpy().tobytes() for p in ddp.parameters()))
    print(f"RESULT rank={rank} first={losses[0]:.4f} final={losses[-1]:.4f} crc={crc:08x}", flush=True)
    time.sleep(0.3)
    dist.destroy_process_group()


main()
