# title: Weights were saved from the wrapper and are loaded into the model inside of it
# source: https://github.com/pytorch/pytorch/issues/3805
# nproc: 2
# expect.codes: FAIL1030
# expect.ranks: all
# expect.subject: any
# expect.step: any
# plain_pytorch: error
"""Keeps the best weights of a small autoencoder and goes back to them in the middle of the run."""

import os
import time
import zlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

FAULT = os.environ.get("FAULT", "0") == "1"


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(21)
    coder = nn.Sequential(nn.Linear(24, 10), nn.Softplus(), nn.Linear(10, 24))
    ddp = DDP(coder)
    opt = torch.optim.Adam(ddp.parameters(), lr=8e-3)
    mixing = torch.randn(5, 24, generator=torch.Generator().manual_seed(2))
    gen = torch.Generator().manual_seed(500 + rank)
    best = {}
    curve = []
    for step in range(60):
        signal = torch.randn(40, 5, generator=gen) @ mixing
        loss = (ddp(signal) - signal).abs().mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        curve.append(loss.item())
        if step == 24:
            best = {name: value.clone() for name, value in ddp.state_dict().items()}
        if step == 32:
            if FAULT:
                coder.load_state_dict(best)
            else:
                ddp.load_state_dict(best)
    crc = zlib.crc32(b"".join(p.detach().numpy().tobytes() for p in ddp.parameters()))
    print(f"RESULT rank={rank} first={curve[0]:.4f} final={sum(curve[-5:]) / 5:.4f} crc={crc:08x}", flush=True)
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
