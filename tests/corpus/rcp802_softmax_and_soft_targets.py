# title: The model returns probabilities, and cross entropy with soft targets takes them for logits
# source: constructed
# nproc: 2
# expect.codes: RCP802
# expect.ranks: all
# expect.subject: any
# expect.step: 0
# expect.step_slack: 1
# plain_pytorch: silent
"""Each sample has the shares of annotators' votes instead of one label."""

import os
import time
import zlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

FAULT = os.environ.get("FAULT", "0") == "1"


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 5))

    def forward(self, x):
        x = self.body(x)
        return x.softmax(-1) if FAULT else x


def main():
    torch.set_num_threads(1)
    rank = 0
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(3)
    model = DDP(Net())
    opt = torch.optim.Adam(model.parameters(), lr=3e-3)
    gen = torch.Generator().manual_seed(10 + rank)
    losses = []
    for step in range(50):
        x = torch.randn(32, 8, generator=gen)
        soft = 0.8 * F.one_hot(x[:, :5].argmax(1), 5).float() + 0.04
        loss = F.cross_entropy(model(x), soft)
        opt.zero_grad()
        loss.backward()
        opt.step()
        losses.append(loss.item())

    crc = zlib.crc32(b"".join(p.detach().float().numpy().tobytes() for p in model.parameters()))
    print(f"RESULT rank={rank} first={losses[0]:.4f} final={losses[-1]:.4f} crc={crc:08x}", flush=True)
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
