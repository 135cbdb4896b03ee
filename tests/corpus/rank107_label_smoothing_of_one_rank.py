# title: only the rank that reads the settings smooths the labels; the others keep the default of the loss
# source: https://pytorch.org/docs/stable/generated/torch.nn.functional.cross_entropy.html
# nproc: 2
# expect.codes: RANK107
# expect.ranks: any
# expect.subject: loss functions
# expect.step: 15
# plain_pytorch: silent
"""A classifier with smoothed labels, set in a file that one rank reads."""

import json
import os
import pathlib
import tempfile
import time
import zlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

FAULT = os.environ.get("FAULT", "0") == "1"


def settings(rank):
    found = [{"smoothing": 0.0}]
    if rank == 0:
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder, "train.json")
            path.write_text(json.dumps({"smoothing": 0.1}))
            found = [json.loads(path.read_text())]
    if not FAULT:
        dist.broadcast_object_list(found, src=0)
    return found[0]


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(3)
    smoothing = settings(rank)["smoothing"]
    teacher = torch.randn(16, 6)
    model = DDP(nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 6)))
    opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    gen = torch.Generator().manual_seed(100 + rank)
    losses = []
    for _step in range(80):
        inputs = torch.randn(64, 16, generator=gen)
        labels = (inputs @ teacher).argmax(1)
        loss = nn.functional.cross_entropy(model(inputs), labels, label_smoothing=smoothing)
        opt.zero_grad()
        loss.backward()
        opt.step()
        losses.append(loss.item())
    crc = zlib.crc32(b"".join(p.detach().numpy().tobytes() for p in model.parameters()))
    print(f"RESULT rank={rank} first={losses[0]:.4f} final={losses[-1]:.4f} crc={crc:08x}", flush=True)
    time.sleep(0.3)
    dist.destroy_process_group()


main()
