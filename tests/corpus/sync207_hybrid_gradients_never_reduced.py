# title: Under HSDP the all-reduce over the replicas is switched off for accumulation and not on again
# source: constructed
# nproc: 4
# expect.codes: SYNC205, SYNC207
# expect.ranks: all
# expect.subject: any
# expect.step: 0
# expect.step_slack: 8
# plain_pytorch: silent
"""A model of a chaotic map. Two micro-batches a step; the second should be reduced over the replicas as well."""
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
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    torch.manual_seed(43)
    model = nn.Sequential(nn.Linear(2, 40), nn.Tanh(), nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 2))
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    generator = torch.Generator().manual_seed(47 + rank)
    losses = []
    for _ in range(40):
        optimizer.zero_grad()
        for micro in range(2):
            model.set_requires_all_reduce(micro == 1 and not FAULT)
            x = torch.rand(16, 2, generator=generator)
            loss = nn.functional.mse_loss(model(x), torch.stack([1 - 1.4 * x[:, 0] ** 2 + x[:, 1], 0.3 * x[:, 0]], 1))
            (loss / 2).backward()
        optimizer.step()
        losses.append(loss.item())
    crc = zlib.crc32(b"".join(p.to_local().detach().numpy().tobytes() for p in model.parameters()))
    print(f"RESULT rank={rank} first={losses[0]:.4f} final={sum(losses[-5:]) / 5:.4f} crc={crc:08x}", flush=True)
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
