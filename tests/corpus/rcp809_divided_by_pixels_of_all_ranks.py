# title: The loss of a segmentation is divided by the labelled pixels of all ranks and not multiplied by their number
# source: https://github.com/huggingface/transformers/pull/34191
# nproc: 2
# expect.codes: RCP809
# expect.ranks: all
# expect.subject: any
# expect.step: 10
# expect.step_slack: 10
# plain_pytorch: silent
"""Fields in aerial images, with two micro-batches a step; pixels without a label are left out."""
import os
import time
import zlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

FAULT = os.environ.get("FAULT", "0") == "1"
NOTHING = 255


def images(gen, count=3):
    x = torch.randn(count, 2, 12, 12, generator=gen)
    y = (x.sum(1) > 0).long() + (x[:, 0] > 1).long()
    y[torch.rand(y.shape, generator=gen) < torch.rand(count, 1, 1, generator=gen)] = NOTHING
    return x, y


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(89)
    ddp = DistributedDataParallel(nn.Sequential(nn.Conv2d(2, 12, 3, padding=1), nn.ReLU(), nn.Conv2d(12, 3, 1)))
    opt = torch.optim.SGD(ddp.parameters(), lr=0.2, momentum=0.9)
    gen = torch.Generator().manual_seed(890 + rank)
    losses = []
    for _ in range(50):
        parts = [images(gen) for _ in range(2)]
        pixels = torch.tensor(float(sum((y != NOTHING).sum() for _, y in parts)))
        dist.all_reduce(pixels)
        opt.zero_grad()
        for number, (x, y) in enumerate(parts):
            ddp.require_backward_grad_sync = number == 1
            loss = nn.functional.cross_entropy(ddp(x), y, ignore_index=NOTHING, reduction="sum") / pixels
            if not FAULT:
                loss = loss * world
            loss.backward()
        opt.step()
        losses.append(loss.item())
    crc = zlib.crc32(b"".join(p.detach().numpy().tobytes() for p in ddp.parameters()))
    print(f"RESULT rank={rank} first={losses[0]:.4f} final={losses[-1]:.4f} crc={crc:08x}", flush=True)
    time.sleep(0.3)
    dist.destroy_process_group()


main()
