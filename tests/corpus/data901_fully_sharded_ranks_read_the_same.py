# title: A model is moved from DDP to FSDP2, and the sampler that gave each rank its part is left out
# source: constructed
# nproc: 2
# expect.codes: DATA901
# expect.ranks: any
# expect.step: 1
# expect.step_slack: 1
# plain_pytorch: silent
"""A classifier on a table of samples: both ranks shuffle all of it by one seed."""
import os
import time
import zlib

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

FAULT = os.environ.get("FAULT") == "1"


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("fsdp",))
    torch.manual_seed(17)
    model = nn.Sequential(nn.Linear(10, 24), nn.LayerNorm(24), nn.SiLU(), nn.Linear(24, 3))
    fully_shard(model[0], mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    x = torch.randn(384, 10, generator=torch.Generator().manual_seed(5))
    data = TensorDataset(x, x[:, :3].argmax(1))
    sampler = None if FAULT else DistributedSampler(data, seed=2)
    order = torch.Generator().manual_seed(2)
    loader = DataLoader(data, batch_size=16, sampler=sampler, shuffle=sampler is None, generator=order)
    losses = []
    for epoch in range(2):
        if sampler is not None:
            sampler.set_epoch(epoch)
        for features, labels in loader:
            loss = nn.functional.cross_entropy(model(features), labels)
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
