# title: Each batch of a plain network is one sample
# source: constructed
# nproc: 2
# expect.codes: none
# plain_pytorch: silent
"""There is no difference between inputs within such a batch, in the first layer as in the last."""

import time
import zlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(12)
    layers = [nn.Linear(6, 24)]
    for _ in range(5):
        layers += [nn.Tanh(), nn.Linear(24, 24)]
    model = DDP(nn.Sequential(*layers, nn.Tanh(), nn.Linear(24, 3)))
    opt = torch.optim.Adam(model.parameters(), lr=1e-3)
    gen = torch.Generator().manual_seed(rank)
    losses = []
    for _ in range(80):
        x = torch.randn(1, 6, generator=gen)
        loss = F.cross_entropy(model(x), x[:, :3].argmax(-1))
        opt.zero_grad()
        loss.backward()
        opt.step()
        losses.append(loss.item())
    crc = zlib.crc32(b"".join(p.detach().numpy().tobytes() for p in model.parameters()))
    print(f"RESULT rank={rank} first={losses[0]:.4f} final={sum(losses[-5:]) / 5:.4f} crc={crc:08x}", flush=True)
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
