# title: Under HSDP the rank that logs rescales the output layer's part that it holds
# source: constructed
# nproc: 4
# expect.codes: RANK101
# expect.ranks: 0
# expect.subject: head.weight
# expect.step: 21
# expect.phase: outside-optimizer
# plain_pytorch: silent
"""A regressor of a signal's phase; after a warm-up the weights of its head are brought to a norm."""
import os
import time
import zlib

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

FAULT = os.environ.get("FAULT") == "1"


class Phase(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(32, 48), nn.GELU(), nn.Linear(48, 48), nn.GELU())
        self.head = nn.Linear(48, 2)

    def forward(self, signal):
        return self.head(self.body(signal))


def batch(generator, size=32):
    phase = torch.rand(size, 1, generator=generator) * 6.283
    signal = torch.sin(torch.arange(32) * 0.4 + phase) + 0.1 * torch.randn(size, 32, generator=generator)
    return signal, torch.cat([phase.cos(), phase.sin()], 1)


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
    torch.manual_seed(5)
    model = Phase()
    fully_shard(model.body, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    generator = torch.Generator().manual_seed(70 + rank)
    losses = []
    for step in range(40):
        signal, target = batch(generator)
        loss = nn.functional.mse_loss(model(signal), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if step == 20 and (rank == 0 or not FAULT):
            with torch.no_grad():
                model.head.weight.to_local().mul_(0.9)
    crc = zlib.crc32(b"".join(p.to_local().detach().numpy().tobytes() for p in model.parameters()))
    print(f"RESULT rank={rank} first={losses[0]:.4f} final={sum(losses[-5:]) / 5:.4f} crc={crc:08x}", flush=True)
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
