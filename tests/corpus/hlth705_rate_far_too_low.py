# title: The learning rate is that of a fine-tuning recipe, far too low for SGD from scratch
# source: constructed
# nproc: 2
# expect.codes: HLTH705, HLTH709
# expect.ranks: all
# expect.subject: any
# expect.step: 0
# expect.step_slack: 12
# plain_pytorch: silent
"""Classification of flowers by four lengths."""
import os
import time
import zlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

FAULT = os.environ.get("FAULT", "0") == "1"


def flowers(gen, n=48):
    kind = torch.randint(0, 3, (n,), generator=gen)
    centre = torch.tensor([[5.0, 3.4, 1.5, 0.2], [5.9, 2.8, 4.3, 1.3], [6.6, 3.0, 5.5, 2.0]])
    return (centre[kind] + 0.3 * torch.randn(n, 4, generator=gen) - 3.5) / 2, kind


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(1)
    model = DDP(nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 3)))
    optimizer = torch.optim.SGD(model.parameters(), lr=2e-6 if FAULT else 0.1)
    gen = torch.Generator().manual_seed(rank)
    losses = []
    for _ in range(60):
        lengths, kind = flowers(gen)
        loss = F.cross_entropy(model(lengths), kind)
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
