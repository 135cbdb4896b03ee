# title: After `to_empty` each rank draws its own shards under a common seed: all shards of a matrix are the same
# source: https://docs.pytorch.org/tutorials/intermediate/FSDP_tutorial.html
# nproc: 2
# expect.codes: RANK115
# expect.ranks: all
# expect.subject: weight
# expect.step: 0
# plain_pytorch: silent
"""A model of spectra that is made on the meta device, sharded, and filled afterwards."""
import os
import time
import zlib

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

FAULT = os.environ.get("FAULT") == "1"


def batch(generator, size=32):
    centre = torch.rand(size, 1, generator=generator) * 30
    places = torch.arange(30.0)
    return (-((places - centre) / 2).square()).exp() + 0.05 * torch.randn(size, 30, generator=generator), centre / 30


@torch.no_grad()
def fill(model):
    torch.manual_seed(15 if FAULT else 15 + dist.get_rank())
    for p in model.parameters():
        if p.dim() > 1:
            nn.init.normal_(p.to_local(), std=p.shape[1] ** -0.5)
        else:
            nn.init.zeros_(p.to_local())


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("shard",))
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(30, 48), nn.Tanh(), nn.Linear(48, 24), nn.Tanh(), nn.Linear(24, 1))
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh)
    model.to_empty(device="cpu")
    fill(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    generator = torch.Generator().manual_seed(60 + rank)
    losses = []
    for _ in range(60):
        spectra, centres = batch(generator)
        loss = nn.functional.mse_loss(model(spectra), centres)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    crc = zlib.crc32(b"".join(p.to_local().detach().numpy().tobytes() for p in model.parameters()))
    print(f"RESULT rank={rank} first={losses[0]:.4f} final={sum(losses[-5:]) / 5:.4f} crc={crc:08x}", flush=True)
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
