# title: A variational autoencoder whose divergence term is annealed from 0 to 1
# source: constructed
# nproc: 2
# expect.codes: none
# plain_pytorch: silent
"""The loss rises while the weight of the second term does, and the decoder ends in a sigmoid."""
import time
import zlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP


class Autoencoder(nn.Module):
    def __init__(self, width=36, latent=4):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(width, 48), nn.ReLU())
        self.mean, self.log_var = nn.Linear(48, latent), nn.Linear(48, latent)
        self.decoder = nn.Sequential(nn.Linear(latent, 48), nn.ReLU(), nn.Linear(48, width), nn.Sigmoid())

    def forward(self, x):
        hidden = self.encoder(x)
        mean, log_var = self.mean(hidden), self.log_var(hidden)
        z = mean + torch.randn_like(mean) * (0.5 * log_var).exp()
        return self.decoder(z), mean, log_var


def squares(gen, n=48):
    picture = torch.zeros(n, 6, 6)
    at = torch.randint(0, 4, (n, 2), generator=gen)
    for i, (row, column) in enumerate(at.tolist()):
        picture[i, row : row + 3, column : column + 3] = 1
    return picture.flatten(1)


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(1)
    model = DDP(Autoencoder())
    optimizer = torch.optim.Adam(model.parameters(), lr=4e-3)
    gen = torch.Generator().manual_seed(rank)
    losses = []
    for step in range(80):
        x = squares(gen)
        again, mean, log_var = model(x)
        distortion = F.binary_cross_entropy(again, x, reduction="none").sum(1).mean()
        rate = -0.5 * (1 + log_var - mean**2 - log_var.exp()).sum(1).mean()
        loss = distortion + min(1.0, step / 40) * rate
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
