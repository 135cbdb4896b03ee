# title: A GAN with two wrapped models, two optimizers and alternating updates
# source: constructed
# nproc: 2
# expect.codes: none
# plain_pytorch: silent
"""In each half of the iteration one of the two models gets gradients that its optimizer does not use."""
import time
import zlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP


def ring(gen, n=64):
    angle = 6.2832 * torch.rand(n, generator=gen)
    return torch.stack([angle.cos(), angle.sin()], 1) + 0.05 * torch.randn(n, 2, generator=gen)


def real_or_fake(logits, real):
    return F.binary_cross_entropy_with_logits(logits, torch.full_like(logits, float(real)))


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(1)
    generator = DDP(nn.Sequential(nn.Linear(4, 32), nn.LeakyReLU(0.2), nn.Linear(32, 2)))
    critic = DDP(nn.Sequential(nn.Linear(2, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1)), forward_sync_buffers=False)
    opt_g = torch.optim.Adam(generator.parameters(), lr=2e-3, betas=(0.5, 0.99))
    opt_c = torch.optim.Adam(critic.parameters(), lr=4e-3, betas=(0.5, 0.99))
    gen = torch.Generator().manual_seed(rank)
    losses = []
    for _ in range(40):
        fake = generator(torch.randn(64, 4, generator=gen))
        both = critic(torch.cat([ring(gen), fake.detach()]))
        loss_c = real_or_fake(both[:64], True) + real_or_fake(both[64:], False)
        opt_c.zero_grad()
        loss_c.backward()
        opt_c.step()

        loss_g = real_or_fake(critic(fake), True)
        opt_g.zero_grad()
        loss_g.backward()
        opt_g.step()
        losses.append(loss_c.item())
    blob = b"".join(p.detach().numpy().tobytes() for m in (generator, critic) for p in m.parameters())
    print(f"RESULT rank={rank} first={losses[0]:.4f} final={sum(losses[-5:]) / 5:.4f} crc={zlib.crc32(blob):08x}",
          flush=True)
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
