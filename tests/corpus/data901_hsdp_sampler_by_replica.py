# title: Under HSDP the sampler divides by the replicas alone: the ranks of one shard group read the same batches
# source: https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html
# nproc: 4
# expect.codes: DATA901
# expect.ranks: all
# expect.subject: model input
# expect.step: 1
# expect.step_slack: 2
# plain_pytorch: silent
"""Two replicas of two shards each; every one of the four ranks must have data of its own."""
import os
import time
import zlib

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

FAULT = os.environ.get("FAULT", "0") == "1"
torch.set_num_threads(1)
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))

torch.manual_seed(3)
model = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 4))
for layer in (model[0], model[2]):
    fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)
opt = torch.optim.AdamW(model.parameters(), lr=3e-3)
gen = torch.Generator().manual_seed(8)
x = torch.randn(768, 12, generator=gen)
table = TensorDataset(x, (x @ torch.randn(12, 4, generator=gen)).argmax(1))
parts, part = (mesh["replicate"].size(), mesh["replicate"].get_local_rank()) if FAULT else (world, rank)
sampler = DistributedSampler(table, parts, part)
losses = []
for epoch in range(3):
    sampler.set_epoch(epoch)
    for rows, kinds in DataLoader(table, 16, sampler=sampler):
        loss = nn.functional.cross_entropy(model(rows), kinds)
        opt.zero_grad()
        loss.backward()
        opt.step()
        losses.append(loss.item())
        time.sleep(0.002)
crc = zlib.crc32(b"".join(p.to_local().detach().numpy().tobytes() for p in model.parameters()))
print(f"RESULT rank={rank} loss={sum(losses[-5:]) / 5:.4f} crc={crc:08x}", flush=True)
dist.destroy_process_group()
