# title: Pixels from 0 to 255 go into a tanh layer, which sits at its limits for every picture
# source: constructed
# nproc: 2
# expect.codes: HLTH704
# expect.ranks: all
# expect.subject: any
# expect.step: 0
# expect.step_slack: 12
# plain_pytorch: silent
"""Brightness patterns in 8 by 8 pixels; the division by 255 is missing."""
import os
import time
import zlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

FAULT = os.environ.get("FAULT", "0") == "1"


def pictures(gen, n=64):
    left = torch.randint(0, 2, (n,), generator=gen)
    image = torch.randint(0, 120, (n, 8, 8), generator=gen).float()
    image[left == 1, :, :4] += 100
    image[left == 0, :, 4:] += 100
    return image.flatten(1), left


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.hidden = nn.Linear(64, 32)
        self.mix = nn.Linear(32, 16)
        self.out = nn.Linear(16, 2)

    def forward(self, image):
        if not FAULT:
            image = image / 255
        return self.out(torch.tanh(self.mix(torch.tanh(self.hidden(image)))))


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(1)
    model = DDP(Net())
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    gen = torch.Generator().manual_seed(5 + rank)
    losses = []
    for _ in range(50):
        image, left = pictures(gen)
        loss = F.cross_entropy(model(image), left)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    crc = zlib.crc32(b"".join(p.detach().float().numpy().tobytes() for p in model.parameters()))
    print(f"RESULT rank={rank} first={losses[0]:.4f} final={sum(losses[-5:]) / 5:.4f} crc={crc:08x}", flush=True)
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
