# title: A scheduler is made and handed back, and the loop never steps it
# source: constructed
# nproc: 2
# expect.codes: RCP806
# expect.ranks: all
# expect.subject: CosineAnnealingLR
# expect.step: 0
# plain_pytorch: silent
"""River levels from rainfall over a DataLoader; the loop of the fault lost the line that steps the schedule by epoch."""
import os
import time
import zlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

FAULT = os.environ.get("FAULT", "0") == "1"
EPOCHS = 6


def rivers():
    gen = torch.Generator().manual_seed(77)
    rain = torch.rand(640, 14, generator=gen)
    decay = 0.8 ** torch.arange(14.0)
    return TensorDataset(rain, rain @ decay.flip(0)[:, None] + 0.05 * torch.randn(640, 1, generator=gen))


def configure(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    return optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=EPOCHS)


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(5)
    model = DDP(nn.Sequential(nn.Linear(14, 32), nn.Tanh(), nn.Linear(32, 1)))
    optimizer, schedule = configure(model)
    sampler = DistributedSampler(rivers(), seed=3)
    loader = DataLoader(rivers(), batch_size=32, sampler=sampler)
    losses = []
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        for rain, level in loader:
            loss = nn.functional.mse_loss(model(rain), level)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        if not FAULT:
            schedule.step()
    crc = zlib.crc32(b"".join(p.detach().numpy().tobytes() for p in model.parameters()))
    print(f"RESULT rank={rank} first={losses[0]:.4f} final={sum(losses[-5:]) / 5:.4f} crc={crc:08x}", flush=True)
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
