# title: The optimizer is built before `fully_shard` makes other parameters of the model's
# source: https://github.com/pytorch/pytorch/issues/149205
# nproc: 2
# expect.codes: SYNC207
# expect.ranks: all
# expect.subject: any
# expect.step: 0
# expect.step_slack: 8
# plain_pytorch: silent
"""A small autoencoder, whose loss stays where it was: what the optimizer steps no forward uses."""
import os
import time
import zlib

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

FAULT = os.environ.get("FAULT") == "1"


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    torch.manual_seed(37)
    model = nn.Sequential(nn.Linear(24, 8), nn.Tanh(), nn.Linear(8, 24))
    early = torch.optim.Adam(model.parameters(), lr=1e-2)
    fully_shard(model[0], mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = early if FAULT else torch.optim.Adam(model.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(41 + rank)
    basis = torch.randn(4, 24, generator=torch.Generator().manual_seed(5))
    losses = []
    for _ in range(60):
        x = torch.randn(32, 4, generator=generator) @ basis
        loss = nn.functional.mse_loss(model(x), x)
        optimizer.zero_grad()
        model.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    crc = zlib.crc32(b"".join(p.to_local().detach().numpy().tobytes() for p in model.parameters()))
    print(f"RESULT rank={rank} first={losses[0]:.4f} final={sum(losses[-5:]) / 5:.4f} crc={crc:08x}", flush=True)
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
