# title: Rank 0 saves, all ranks load the same file, weights and optimizer jump back together
# source: constructed
# nproc: 2
# expect.codes: none
# plain_pytorch: silent
"""All parameters change between two steps, alike on every rank."""
import os
import tempfile
import time
import zlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def save(path, model, opt, rank):
    if rank == 0:
        torch.save({"net": model.module.state_dict(), "opt": opt.state_dict()}, path)
    dist.barrier()


def load(path, model, opt):
    state = torch.load(path, map_location="cpu")
    model.module.load_state_dict(state["net"])
    opt.load_state_dict(state["opt"])
    dist.barrier()


def shared_path(rank):
    """One temporary file name, chosen by rank 0."""
    box = [tempfile.mkstemp(suffix=".pt")[1] if rank == 0 else None]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    path = shared_path(rank)
    torch.manual_seed(8)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 40), nn.ReLU(), nn.Linear(40, 3)))
    opt = torch.optim.AdamW(model.parameters(), lr=4e-3)
    gen = torch.Generator().manual_seed(rank)
    losses = []
    for step in range(60):
        if step == 25:
            save(path, model, opt, rank)
        if step == 35:
            load(path, model, opt)
        x = torch.randn(40, 8, generator=gen)
        y = (x[:, 0] > 0).long() + (x[:, 1] > x[:, 2]).long()
        loss = nn.functional.cross_entropy(model(x), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        losses.append(loss.item())
    if rank == 0:
        os.unlink(path)
    crc = zlib.crc32(b"".join(p.detach().numpy().tobytes() for p in model.parameters()))
    print(f"RESULT rank={rank} first={losses[0]:.4f} final={sum(losses[-5:]) / 5:.4f} crc={crc:08x}", flush=True)
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
