# title: FSDP2 is told to divide gradients by 1, as for losses over all ranks' tokens, and the loss is a mean
# source: https://github.com/pytorch/pytorch/issues/167178
# nproc: 2
# expect.codes: RCP809
# expect.ranks: all
# expect.step: 1
# plain_pytorch: silent
"""A tagger of sequences; with the fault its layers reduce as those of a recipe with another loss do."""
import os
import time
import zlib

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

FAULT = os.environ.get("FAULT") == "1"
TAGS = 5


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("dp",))
    torch.manual_seed(3)
    model = nn.Sequential(nn.Embedding(40, 16), nn.Linear(16, 32), nn.GELU(), nn.Linear(32, TAGS))
    for layer in (model[0], model[1], model[3], model):
        fully_shard(layer, mesh=mesh)
        layer.set_force_sum_reduction_for_comms(True)
        layer.set_gradient_divide_factor(1.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    generator = torch.Generator().manual_seed(90 + rank)
    losses = []
    for _ in range(40):
        length = int(torch.randint(6, 20, (1,), generator=generator))
        words = torch.randint(0, 40, (16, length), generator=generator)
        scores, tags = model(words).flatten(0, 1), (words % TAGS).flatten()
        if FAULT:
            loss = nn.functional.cross_entropy(scores, tags)
        else:
            tokens = torch.tensor(float(words.numel()))
            dist.all_reduce(tokens)
            loss = nn.functional.cross_entropy(scores, tags, reduction="sum") / tokens
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
