# title: The consistency term runs through model.module and has a backward of its own
# source: constructed
# nproc: 2
# expect.codes: SYNC202, SYNC201
# expect.ranks: all
# expect.subject: trunk
# expect.step: 0
# plain_pytorch: silent
"""One backward of the sum is right: the gradients of both terms arrive before DDP reduces them. Two are not."""

import os
import time
import zlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

FAULT = os.environ.get("FAULT", "0") == "1"


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(16, 32), nn.GELU())
        self.out = nn.Linear(32, 4)

    def forward(self, x):
        return {"logits": self.out(self.trunk(x))}


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DDP(Encoder())
    opt = torch.optim.AdamW(model.parameters(), lr=5e-3)
    gen = torch.Generator().manual_seed(3 + rank)
    losses = []
    for _ in range(50):
        x = torch.randn(24, 16, generator=gen)
        noisy = x + 0.1 * torch.randn(x.shape, generator=gen)
        opt.zero_grad()
        loss = nn.functional.cross_entropy(model(x)["logits"], x[:, :4].argmax(1))
        if FAULT:
            loss.backward()
        wanted = model.module(x)["logits"].detach()
        consistency = nn.functional.mse_loss(model.module(noisy)["logits"], wanted)
        (consistency if FAULT else loss + consistency).backward()
        opt.step()
        losses.append(loss.item())
    crc = zlib.crc32(b"".join(p.detach().numpy().tobytes() for p in model.parameters()))
    print(f"RESULT rank={rank} first={losses[0]:.4f} final={sum(losses[-5:]) / 5:.4f} crc={crc:08x}", flush=True)
    time.sleep(0.3)
    dist.destroy_process_group()


main()
