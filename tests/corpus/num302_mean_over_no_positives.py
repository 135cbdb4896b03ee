# title: The box loss averages over the positive cells, and one rank's batch has none
# source: constructed
# nproc: 3
# expect.codes: NUM302
# expect.ranks: 2
# expect.subject: any
# expect.op: mean
# expect.location: num302_mean_over_no_positives.py:51
# expect.step: 11
# plain_pytorch: silent
"""A tiny detector on 12 x 12 images with at most one square each; outputs, and even the gradients, stay finite."""
import os
import time
import zlib

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

FAULT = os.environ.get("FAULT", "0") == "1"


class Detector(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(nn.Conv2d(1, 12, 3, 2, 1), nn.ReLU(), nn.Conv2d(12, 16, 3, 2, 1), nn.ReLU())
        self.present = nn.Conv2d(16, 1, 1)
        self.size = nn.Conv2d(16, 1, 1)

    def forward(self, image):
        h = self.backbone(image)
        return {"present": self.present(h)[:, 0], "size": self.size(h)[:, 0]}


def captures(gen, empty=False, n=8):
    image = 0.2 * torch.randn(n, 1, 12, 12, generator=gen)
    present, size = torch.zeros(n, 3, 3), torch.zeros(n, 3, 3)
    for i in range(n):
        row, column, width = torch.randint(0, 3, (3,), generator=gen).tolist()
        if not empty:
            image[i, 0, 4 * row:4 * row + width + 2, 4 * column:4 * column + width + 2] += 1.0
            present[i, row, column], size[i, row, column] = 1.0, float(width)
    return image, present, size


def detection_loss(out, present, size):
    error = F.smooth_l1_loss(out["size"], size, reduction="none")[present > 0]
    if FAULT:
        box = error.mean()
    else:
        box = error.sum() / max(len(error), 1)
    return F.binary_cross_entropy_with_logits(out["present"], present) + box


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(8)
    model = DDP(Detector())
    opt = torch.optim.Adam(model.parameters(), lr=1e-2)
    gen = torch.Generator().manual_seed(60 + rank)
    losses = []
    for step in range(40):
        image, present, size = captures(gen, empty=(step == 11 and rank == 2))
        opt.zero_grad()
        loss = detection_loss(model(image), present, size)
        loss.backward()
        opt.step()
        losses.append(loss.item())
    crc = zlib.crc32(b"".join(p.detach().numpy().tobytes() for p in model.parameters()))
    print(f"RESULT rank={rank} first={losses[0]:.4f} final={sum(losses[-5:]) / 5:.4f} crc={crc:08x}", flush=True)
    time.sleep(0.3)
    dist.destroy_process_group()


main()
