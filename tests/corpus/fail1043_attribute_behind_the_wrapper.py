# title: The loop asks the wrapper for an attribute of the model
# source: https://github.com/huggingface/diffusers/issues/2044
# nproc: 2
# expect.codes: FAIL1043
# expect.ranks: all
# expect.subject: any
# expect.step: any
# plain_pytorch: error
"""Removes noise of several strengths; the number of strengths belongs to the model, and the loop draws among them."""

import os
import time
import zlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

FAULT = os.environ.get("FAULT", "0") == "1"


class Denoiser(nn.Module):
    strengths = 8

    def __init__(self):
        super().__init__()
        self.when = nn.Embedding(self.strengths, 16)
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x, t):
        return self.down(nn.functional.silu(self.up(x + self.when(t))))


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(6)
    unet = DDP(Denoiser())
    opt = torch.optim.AdamW(unet.parameters(), lr=4e-3)
    gen = torch.Generator().manual_seed(90 + rank)
    curve = []
    for _ in range(60):
        x = torch.randn(64, 4, generator=gen).repeat(1, 4)
        if FAULT:
            t = torch.randint(0, unet.strengths, (64,), generator=gen)
        else:
            t = torch.randint(0, unet.module.strengths, (64,), generator=gen)
        noise = torch.randn(64, 16, generator=gen)
        loss = ((unet(x + noise * (t[:, None] + 1) / 8, t) - noise) ** 2).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        curve.append(loss.item())
    crc = zlib.crc32(b"".join(p.detach().numpy().tobytes() for p in unet.parameters()))
    print(f"RESULT rank={rank} first={curve[0]:.4f} final={sum(curve[-5:]) / 5:.4f} crc={crc:08x}", flush=True)
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
