# title: The loop sets the learning rate of the first group, and the one without weight decay keeps the peak for ever
# source: https://docs.pytorch.org/docs/stable/optim.html
# nproc: 2
# expect.codes: RCP807
# expect.ranks: all
# expect.step: 5
# plain_pytorch: silent
"""A small network over spectra with a warm-up and a decay by hand."""
import os
import time
import zlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

FAULT = os.environ.get("FAULT") == "1"
PEAK, WARM, STEPS = 4e-3, 8, 60


def rate(step):
    return PEAK * (step + 1) / WARM if step < WARM else PEAK * (1 - (step - WARM) / (STEPS - WARM))


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(61)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(20, 40), nn.LayerNorm(40), nn.SiLU(), nn.Linear(40, 3)))
    groups = [
        {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": 0.05},
        {"params": [p for p in model.parameters() if p.dim() == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=PEAK)
    generator = torch.Generator().manual_seed(110 + rank)
    losses = []
    for step in range(STEPS):
        for group in optimizer.param_groups[: 1 if FAULT else None]:
            group["lr"] = rate(step)
        spectra = torch.randn(32, 20, generator=generator)
        loss = nn.functional.cross_entropy(model(spectra), spectra[:, :3].argmax(1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    crc = zlib.crc32(b"".join(p.detach().numpy().tobytes() for p in model.parameters()))
    print(f"RESULT rank={rank} first={losses[0]:.4f} final={sum(losses[-5:]) / 5:.4f} crc={crc:08x}", flush=True)
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
