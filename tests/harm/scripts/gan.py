import torch
from common import batches, finish, report, setup
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP


def main():
    rank = setup(3)
    generator = DDP(nn.Sequential(nn.Linear(4, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 2)))
    critic = DDP(nn.Sequential(nn.Linear(2, 32), nn.LeakyReLU(0.2), nn.Dropout(0.1), nn.Linear(32, 1)))
    opt_g = torch.optim.Adam(generator.parameters(), lr=2e-3, betas=(0.5, 0.99))
    opt_c = torch.optim.RMSprop(critic.parameters(), lr=1e-3)
    losses = []
    for real in batches(rank, 16, 16, 2):
        fake = generator(torch.randn(16, 4))
        scores = critic(torch.cat([real, fake.detach()]))
        inputs = real.clone().requires_grad_()
        (slope,) = torch.autograd.grad(critic.module(inputs).sum(), inputs, create_graph=True)
        loss_c = F.softplus(-scores[:16]).mean() + F.softplus(scores[16:]).mean() + slope.square().mean()
        opt_c.zero_grad()
        loss_c.backward()
        opt_c.step()
        for p in critic.parameters():
            p.requires_grad_(False)
        loss_g = F.softplus(-critic.module(fake)).mean()
        opt_g.zero_grad()
        loss_g.backward()
        opt_g.step()
        for p in critic.parameters():
            p.requires_grad_(True)
        losses += [loss_c.detach(), loss_g.detach()]
    report([generator.module, critic.module], [opt_g, opt_c], losses)


main()
finish()
