# title: The loader has one batch, of all samples, which is trained on in each step
# source: constructed
# nproc: 2
# expect.codes: none
# plain_pytorch: silent
"""x"""

import time
import zlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset


def main():
    torch.set_num_threads(1)
    rank = 0
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(3)
    g = torch.Generator().manual_seed(rank)
    x = torch.randn(128, 8, generator=g)
    loader = DataLoader(TensorDataset(x, x[:, 0] * x[:, 1]), batch_size=128)
    model = DDP(nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 1)))
    opt = torch.optim.Adam(model.parameters(), lr=2e-3)
    xb, yb = next(iter(loader))
    losses = []
    for _ in range(60):
        loss = F.mse_loss(model(xb)[:, 0], yb)
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
