# title: Rank 0 looks at the critic's scores in train mode, which advances the power iteration of its spectral norm
# source: constructed
# nproc: 2
# expect.codes: RANK102
# expect.ranks: any
# expect.subject: _u
# expect.step: 21
# expect.step_slack: 1
# plain_pytorch: silent
"""Without the broadcast of buffers the ranks' vectors agree only as long as they run equally many forwards."""

import os
import time
import zlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

FAULT = os.environ.get("FAULT", "0") == "1"


def critic():
    normed = nn.utils.parametrizations.spectral_norm
    return nn.Sequential(normed(nn.Linear(8, 24)), nn.LeakyReLU(0.2), normed(nn.Linear(24, 1)))


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DDP(critic(), broadcast_buffers=False)
    opt = torch.optim.Adam(model.parameters(), lr=2e-3)
    gen = torch.Generator().manual_seed(rank)
    losses = []
    for step in range(50):
        real = torch.randn(16, 8, generator=gen) + 1
        fake = torch.randn(16, 8, generator=gen)
        scores = model(torch.cat([real, fake]))
        loss = nn.functional.relu(1 - scores[:16]).mean() + nn.functional.relu(1 + scores[16:]).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        losses.append(loss.item())
        if step == 20 and (rank == 0 or not FAULT):
            with torch.no_grad():
                model.module(torch.ones(4, 8))
    crc = zlib.crc32(b"".join(p.detach().numpy().tobytes() for p in model.parameters()))
    print(f"RESULT rank={rank} first={losses[0]:.4f} final={sum(losses[-5:]) / 5:.4f} crc={crc:08x}", flush=True)
    time.sleep(0.3)
    dist.destroy_process_group()


main()
