# title: An outer optimizer steps plain copies of the shards, by what two islands have moved on the average
# source: https://arxiv.org/abs/2311.08105
# nproc: 4
# expect.codes: none
# plain_pytorch: silent
"""DiLoCo over two islands that shard a small classifier of parities over two ranks each."""
import os
import time
import zlib

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

FAULT = os.environ.get("FAULT") == "1"


def batch(generator):
    bits = torch.randint(0, 2, (40, 6), generator=generator)
    return bits.float() * 2 - 1, bits[:, :2].sum(1) % 2


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("island", "shard"))
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 2))
    fully_shard(model, mesh=mesh["shard"])
    inner = torch.optim.AdamW(model.parameters(), lr=3e-3)
    anchors = [nn.Parameter(p.to_local().detach().clone()) for p in model.parameters()]
    outer = torch.optim.SGD(anchors, lr=0.7, momentum=0.6, nesterov=True)
    generator = torch.Generator().manual_seed(60 + rank)
    losses = []
    for step in range(72):
        x, y = batch(generator)
        loss = nn.functional.cross_entropy(model(x), y)
        inner.zero_grad()
        loss.backward()
        inner.step()
        losses.append(loss.item())
        if step % 8 == 7:
            with torch.no_grad():
                for anchor, p in zip(anchors, model.parameters()):
                    anchor.grad = anchor - p.to_local()
                    dist.all_reduce(anchor.grad, group=mesh.get_group("island"))
                    anchor.grad /= 2
                outer.step()
                for anchor, p in zip(anchors, model.parameters()):
                    p.to_local().copy_(anchor)
    crc = zlib.crc32(b"".join(p.to_local().detach().numpy().tobytes() for p in model.parameters()))
    print(f"RESULT rank={rank} first={losses[0]:.4f} final={sum(losses[-5:]) / 5:.4f} crc={crc:08x}", flush=True)
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
