# title: A conditional variational autoencoder with free bits and a loss that is a sum over pixels
# source: constructed
# nproc: 2
# expect.codes: none
# plain_pytorch: silent
"""Some latent dimensions stay unused, the divergence does not fall below its free part."""
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import one_hot


class Conditional(nn.Module):
    def __init__(self, pixels=36, kinds=3, latent=6):
        super().__init__()
        self.kinds = kinds
        self.inference = nn.Sequential(nn.Linear(pixels + kinds, 64), nn.ELU(), nn.Linear(64, 2 * latent))
        self.generation = nn.Sequential(nn.Linear(latent + kinds, 64), nn.ELU(), nn.Linear(64, pixels))

    def forward(self, x, kind):
        c = one_hot(kind, self.kinds).float()
        mu, log_sigma = self.inference(torch.cat([x, c], 1)).chunk(2, 1)
        z = mu + log_sigma.exp() * torch.randn_like(mu)
        again = self.generation(torch.cat([z, c], 1))
        divergence = 0.5 * (mu**2 + (2 * log_sigma).exp() - 1) - log_sigma
        return again, divergence.mean(0).clamp(min=0.05).sum()


def strokes(n, gen):
    kind = torch.randint(3, (n,), generator=gen)
    where = torch.randint(6, (n,), generator=gen)
    x = torch.zeros(n, 6, 6)
    for i in range(n):
        if kind[i] == 0:
            x[i, where[i]] = 1
        elif kind[i] == 1:
            x[i, :, where[i]] = 1
        else:
            x[i] = torch.eye(6).roll(int(where[i]), 0)
    return x.flatten(1) * 2 - 1, kind


if __name__ == "__main__":
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(5)
    model = nn.parallel.DistributedDataParallel(Conditional())
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    gen = torch.Generator().manual_seed(rank)
    torch.manual_seed(100 + rank)
    for step in range(90):
        x, kind = strokes(32, gen)
        again, divergence = model(x, kind)
        loss = 0.5 * (again - x).square().sum(1).mean() + divergence
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"rank {rank} {loss.item():.3f}", flush=True)
    dist.barrier()
    dist.destroy_process_group()
