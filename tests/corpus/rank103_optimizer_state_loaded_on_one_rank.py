# title: On resume every rank gets the weights, but only rank 0 gets the optimizer state
# source: constructed
# nproc: 3
# expect.codes: RANK103, RANK101
# expect.ranks: 0
# expect.subject: exp_avg
# expect.step: 32
# expect.step_slack: 1
# plain_pytorch: silent
"""Character model that returns to its last snapshot half way through the job."""
import copy
import os
import time
import zlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

FAULT = os.environ.get("FAULT", "0") == "1"
TEXT = ("the quick brown fox jumps over the lazy dog and the slow red hen naps under the old oak tree " * 20)
CHARS = sorted(set(TEXT))
CODES = torch.tensor([CHARS.index(c) for c in TEXT])
CONTEXT = 6


def sample(gen, n=48):
    at = torch.randint(0, len(CODES) - CONTEXT, (n,), generator=gen)
    window = CODES[at[:, None] + torch.arange(CONTEXT + 1)]
    return window[:, :-1], window[:, -1]


def build():
    return nn.Sequential(nn.Embedding(len(CHARS), 12), nn.Flatten(), nn.Linear(12 * CONTEXT, 64), nn.GELU(),
                         nn.Linear(64, len(CHARS)))


def snapshot(model, optimizer):
    return copy.deepcopy({"model": model.module.state_dict(), "optimizer": optimizer.state_dict()})


def resume(model, optimizer, state, rank):
    model.module.load_state_dict(state["model"])
    if rank == 0 or not FAULT:
        optimizer.load_state_dict(state["optimizer"])


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(6)
    model = DDP(build())
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    gen = torch.Generator().manual_seed(900 + rank)
    losses = []
    for step in range(64):
        if step == 24:
            saved = snapshot(model, optimizer)
        if step == 32:
            resume(model, optimizer, saved, rank)
        x, y = sample(gen)
        loss = nn.functional.cross_entropy(model(x), y)
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
