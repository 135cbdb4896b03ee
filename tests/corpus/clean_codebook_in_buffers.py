# title: A vector-quantised autoencoder whose codebook is a buffer, updated by averages over all ranks
# source: constructed
# nproc: 3
# expect.codes: none
# plain_pytorch: silent
"""Forward writes the buffers, after summing counts and vectors over the ranks, so they stay equal."""
import time
import zlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class Codebook(nn.Module):
    def __init__(self, codes=8, dim=4, keep=0.9):
        super().__init__()
        self.keep = keep
        self.register_buffer("code", torch.randn(codes, dim))
        self.register_buffer("count", torch.ones(codes))
        self.register_buffer("total", self.code.clone())

    @torch.no_grad()
    def learn(self, z, pick):
        hot = nn.functional.one_hot(pick, len(self.code)).float()
        seen, summed = hot.sum(0), hot.T @ z
        dist.all_reduce(seen)
        dist.all_reduce(summed)
        self.count.mul_(self.keep).add_(seen, alpha=1 - self.keep)
        self.total.mul_(self.keep).add_(summed, alpha=1 - self.keep)
        self.code.copy_(self.total / self.count.clamp(min=1e-3)[:, None])

    def forward(self, z):
        pick = torch.cdist(z.detach(), self.code).argmin(1)
        chosen = self.code[pick]
        if self.training:
            self.learn(z.detach(), pick)
        return z + (chosen - z).detach(), (z - chosen.detach()).square().mean()


class Quantised(nn.Module):
    def __init__(self):
        super().__init__()
        self.enc, self.book, self.dec = nn.Linear(12, 4), Codebook(), nn.Linear(4, 12)

    def forward(self, x):
        z, commitment = self.book(self.enc(x))
        return self.dec(z), commitment


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(84)
    prototypes = torch.randn(6, 12)
    model = DistributedDataParallel(Quantised())
    opt = torch.optim.Adam(model.parameters(), lr=1e-2)
    gen = torch.Generator().manual_seed(rank)
    losses = []
    for _ in range(70):
        x = prototypes[torch.randint(0, 6, (48,), generator=gen)] + 0.2 * torch.randn(48, 12, generator=gen)
        y, commitment = model(x)
        loss = nn.functional.mse_loss(y, x) + 0.25 * commitment
        opt.zero_grad()
        loss.backward()
        opt.step()
        losses.append(loss.item())
    crc = zlib.crc32(b"".join(t.detach().numpy().tobytes() for t in (*model.parameters(), *model.buffers())))
    print(f"RESULT rank={rank} first={losses[0]:.4f} final={sum(losses[-5:]) / 5:.4f} crc={crc:08x}", flush=True)
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
