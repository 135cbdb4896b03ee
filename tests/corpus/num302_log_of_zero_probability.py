# title: The loss takes the log of a softmax that has underflowed to zero
# source: constructed
# nproc: 3
# expect.codes: NUM302
# expect.ranks: 2
# expect.subject: any
# expect.op: log
# expect.location: num302_log_of_zero_probability.py:38
# expect.step: 17
# plain_pytorch: silent
"""The network ends in a softmax; one batch of rank 2 was recorded with another gain and saturates it."""
import os
import time
import zlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

FAULT = os.environ.get("FAULT", "0") == "1"


class Spectrometer(nn.Module):
    def __init__(self, channels=20, classes=5):
        super().__init__()
        self.features = nn.Sequential(nn.Linear(channels, 48), nn.ReLU())
        self.classify = nn.Linear(48, classes)

    def forward(self, spectrum):
        return self.classify(self.features(spectrum)).softmax(-1)


def negative_log_likelihood(probabilities, target):
    picked = probabilities.gather(1, target[:, None]).squeeze(1)
    if not FAULT:
        picked = picked.clamp_min(1e-12)
    return -torch.log(picked).mean()


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(301)
    peaks = torch.randn(5, 20)
    model = DDP(Spectrometer())
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    gen = torch.Generator().manual_seed(40 + rank)
    losses = []
    for step in range(45):
        y = torch.randint(0, 5, (32,), generator=gen)
        x = peaks[y] + 1.5 * torch.randn(32, 20, generator=gen)
        if step == 17 and rank == 2:
            x = 300.0 * x
        loss = negative_log_likelihood(model(x), y)
        opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        losses.append(loss.item())
    crc = zlib.crc32(b"".join(p.detach().numpy().tobytes() for p in model.parameters()))
    print(f"RESULT rank={rank} first={losses[0]:.4f} final={sum(losses[-5:]) / 5:.4f} crc={crc:08x}", flush=True)
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
