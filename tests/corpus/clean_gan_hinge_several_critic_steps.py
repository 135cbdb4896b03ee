# title: A GAN with hinge loss that steps its critic twice for each step of the generator
# source: constructed
# nproc: 2
# expect.codes: none
# plain_pytorch: silent
"""The generator's loss rises for as long as the critic learns faster, and may be negative."""
import time
import zlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP


def spiral(gen, n=64):
    t = 6 * torch.rand(n, 1, generator=gen)
    return torch.cat([t * t.cos(), t * t.sin()], 1) / 4 + 0.03 * torch.randn(n, 2, generator=gen)


def mlp(into, out):
    return nn.Sequential(nn.Linear(into, 48), nn.LeakyReLU(0.2), nn.Linear(48, 48), nn.LeakyReLU(0.2), nn.Linear(48, out))


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(1)
    model = DDP(mlp(6, 2))
    critic = DDP(mlp(2, 1), forward_sync_buffers=False)
    opt_g = torch.optim.Adam(model.parameters(), lr=1e-3, betas=(0.0, 0.9))
    opt_c = torch.optim.Adam(critic.parameters(), lr=4e-3, betas=(0.0, 0.9))
    gen = torch.Generator().manual_seed(rank)
    losses = []
    for _ in range(40):
        for _ in range(2):
            with torch.no_grad():
                fake = model.module(torch.randn(64, 6, generator=gen))
            scores = critic(torch.cat([spiral(gen), fake]))
            loss_c = F.relu(1 - scores[:64]).mean() + F.relu(1 + scores[64:]).mean()
            opt_c.zero_grad()
            loss_c.backward()
            opt_c.step()
        loss_g = -critic(model(torch.randn(64, 6, generator=gen))).mean()
        opt_g.zero_grad()
        loss_g.backward()
        opt_g.step()
        losses.append(loss_g.item())
    crc = zlib.crc32(b"".join(p.detach().float().numpy().tobytes() for p in model.parameters()))
    print(f"RESULT rank={rank} first={losses[0]:.4f} final={sum(losses[-5:]) / 5:.4f} crc={crc:08x}", flush=True)
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
