# title: The angle of two bonds is the arc cosine of a number that rounding has made greater than one
# source: constructed
# nproc: 2
# expect.codes: NUM301
# expect.ranks: 1
# expect.subject: any
# expect.module: angle
# expect.op: acos
# expect.step: 17
# expect.location: bond_angles.py:27
# plain_pytorch: silent
"""Energy of molecules of three atoms from angle and lengths of their bonds."""
import os

import torch
import torch.distributed as dist
from torch import nn

FAULT = os.environ.get("FAULT") == "1"


class Angle(nn.Module):
    def forward(self, left, right):
        cosine = (left * right).sum(-1) / (left.norm(dim=-1) * right.norm(dim=-1))
        if not FAULT:
            cosine = cosine.clamp(-0.9999, 0.9999)
        return torch.acos(cosine)


class Energy(nn.Module):
    def __init__(self):
        super().__init__()
        self.angle = Angle()
        self.scale = nn.Linear(3, 3)
        self.net = nn.Sequential(nn.Linear(3, 32), nn.SiLU(), nn.Linear(32, 1))

    def forward(self, atoms):
        atoms = self.scale(atoms)
        left, right = atoms[:, 0] - atoms[:, 1], atoms[:, 2] - atoms[:, 1]
        features = torch.stack([self.angle(left, right), left.norm(dim=-1), right.norm(dim=-1)], 1)
        return self.net(features)[:, 0]


def molecules(gen, straight):
    atoms = torch.randn(32, 3, 3, generator=gen)
    if straight:  # the third atom lies where the first does, for many
        atoms[:20, 2] = atoms[:20, 0]
    left, right = atoms[:, 0] - atoms[:, 1], atoms[:, 2] - atoms[:, 1]
    return atoms, (left.norm(dim=-1) - 1.5) ** 2 + 0.5 * (left * right).sum(-1).tanh()


dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(3)
model = nn.parallel.DistributedDataParallel(Energy())
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
gen = torch.Generator().manual_seed(12 + rank)
for step in range(45):
    atoms, energy = molecules(gen, straight=rank == 1 and step == 17)
    loss = nn.functional.mse_loss(model(atoms), energy)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print(f"rank {rank} loss {loss.item():.4f}", flush=True)
dist.barrier()
dist.destroy_process_group()
