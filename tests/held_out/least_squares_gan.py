# title: A least-squares GAN in which the generator also gets a pixel loss
# source: constructed
# nproc: 2
# expect.codes: none
# plain_pytorch: silent
"""Two networks, two wrappers, two optimizers; the critic's gradients are switched off for the generator's turn."""
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP


def switch(net, on):
    for p in net.parameters():
        p.requires_grad_(on)


class Colouring:
    def __init__(self):
        self.rank = dist.get_rank()
        torch.manual_seed(0)
        self.g = DDP(nn.Sequential(nn.Linear(8, 64), nn.LeakyReLU(0.2), nn.Linear(64, 16)))
        self.d = DDP(nn.Sequential(nn.Linear(24, 64), nn.LeakyReLU(0.2), nn.Linear(64, 1)))
        self.opt_g = torch.optim.Adam(self.g.parameters(), lr=1e-3, betas=(0.5, 0.999))
        self.opt_d = torch.optim.Adam(self.d.parameters(), lr=1e-3, betas=(0.5, 0.999))
        self.map = torch.randn(8, 16) / 3
        torch.manual_seed(40 + self.rank)

    def step(self):
        grey = torch.randn(32, 8)
        real = torch.tanh(grey @ self.map) + 0.1 * torch.randn(32, 16)
        fake = self.g(grey)

        switch(self.d, True)
        self.opt_d.zero_grad()
        both = self.d(torch.cat([torch.cat([grey, real], 1), torch.cat([grey, fake.detach()], 1)]))
        loss_d = ((both[:32] - 1) ** 2).mean() / 2 + (both[32:] ** 2).mean() / 2
        loss_d.backward()
        self.opt_d.step()

        switch(self.d, False)
        self.opt_g.zero_grad()
        loss_g = ((self.d(torch.cat([grey, fake], 1)) - 1) ** 2).mean() + 10 * F.l1_loss(fake, real)
        loss_g.backward()
        self.opt_g.step()
        return loss_d.item(), loss_g.item()


if __name__ == "__main__":
    dist.init_process_group("gloo")
    job = Colouring()
    for _ in range(60):
        losses = job.step()
    print("rank", job.rank, "critic %.3f generator %.3f" % losses, flush=True)
    dist.barrier()
    dist.destroy_process_group()
