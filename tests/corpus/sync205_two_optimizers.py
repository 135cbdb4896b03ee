# title: Matrices and vectors have an optimizer each, and the last micro-batch runs under `no_sync()`
# source: constructed
# nproc: 2
# expect.codes: SYNC205
# expect.ranks: all
# expect.step: 0
# plain_pytorch: silent
"""Both optimizers step on what that one backward has left: one mistake, one finding."""
import os
import time
import zlib
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

FAULT = os.environ.get("FAULT", "1") == "1"


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(23)
    ddp = DistributedDataParallel(nn.Sequential(nn.Linear(14, 40), nn.LayerNorm(40), nn.GELU(), nn.Linear(40, 3)))
    matrices = torch.optim.SGD([p for p in ddp.parameters() if p.dim() == 2], lr=0.05, momentum=0.9)
    vectors = torch.optim.AdamW([p for p in ddp.parameters() if p.dim() == 1], lr=2e-3)
    truth = torch.randn(14, 3)
    gen = torch.Generator().manual_seed(50 + rank)
    losses = []
    for _ in range(40):
        for micro in range(2):
            synced = (micro == 0) if FAULT else (micro == 1)
            with nullcontext() if synced else ddp.no_sync():
                x = torch.randn(24, 14, generator=gen)
                loss = nn.functional.cross_entropy(ddp(x), (x @ truth).argmax(1)) / 2
                loss.backward()
        losses.append(2 * loss.item())
        matrices.step()
        vectors.step()
        ddp.zero_grad()
    crc = zlib.crc32(b"".join(p.detach().numpy().tobytes() for p in ddp.parameters()))
    print(f"RESULT rank={rank} first={losses[0]:.4f} final={sum(losses[-5:]) / 5:.4f} crc={crc:08x}", flush=True)
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
