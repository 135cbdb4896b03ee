# title: Shards are stepped by an Adam of the script's own, without an optimizer of torch
# source: constructed
# nproc: 2
# expect.codes: none
# plain_pytorch: silent
"""A sharded autoencoder of short curves, whose two moments are plain tensors beside the parts of the parameters."""
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
    phase = torch.rand(24, 1, generator=generator) * 6.283
    return (torch.linspace(0, 6, 16) + phase).sin()


@torch.no_grad()
def step_by_hand(model, moments, number, rate=4e-3):
    for p, (mean, square) in zip(model.parameters(), moments):
        grad = p.grad.to_local()
        mean.lerp_(grad, 0.1)
        square.lerp_(grad * grad, 0.01)
        size = (square / (1 - 0.99**number)).sqrt() + 1e-8
        p.to_local().addcdiv_(mean / (1 - 0.9**number), size, value=-rate)
        p.grad = None


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(4)
    model = nn.Sequential(nn.Linear(16, 20), nn.Tanh(), nn.Linear(20, 4), nn.Linear(4, 20), nn.Tanh(), nn.Linear(20, 16))
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=init_device_mesh("cpu", (2,)))
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    moments = [(torch.zeros_like(p.to_local()), torch.zeros_like(p.to_local())) for p in model.parameters()]
    generator = torch.Generator().manual_seed(40 + rank)
    losses = []
    for number in range(1, 61):
        curves = batch(generator)
        loss = nn.functional.mse_loss(model(curves), curves)
        loss.backward()
        step_by_hand(model, moments, number)
        losses.append(loss.item())
    crc = zlib.crc32(b"".join(p.to_local().detach().numpy().tobytes() for p in model.parameters()))
    print(f"RESULT rank={rank} first={losses[0]:.4f} final={sum(losses[-5:]) / 5:.4f} crc={crc:08x}", flush=True)
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
