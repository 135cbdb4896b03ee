# title: Under FSDP2 a rank that dislikes its loss leaves out the optimizer's step on its own
# source: constructed after https://github.com/NVIDIA-NeMo/Automodel/pull/2468
# nproc: 2
# expect.codes: RANK112
# expect.ranks: 1
# expect.subject: any
# expect.step: 12
# expect.step_slack: 1
# plain_pytorch: silent
"""A classifier of noisy prototypes; at iteration 12 the batch of rank 1 is in other units."""
import os
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

FAULT = os.environ.get("FAULT", "0") == "1"


def any_rank(flag):
    vote = torch.tensor(float(flag))
    dist.all_reduce(vote, op=dist.ReduceOp.MAX)
    return vote.item() > 0


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(11)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    model = nn.Sequential(nn.Linear(16, 40), nn.ReLU(), nn.Linear(40, 5))
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    opt = torch.optim.AdamW(model.parameters(), 5e-3)
    gen = torch.Generator().manual_seed(80 + rank)
    prototypes = torch.randn(5, 16, generator=torch.Generator().manual_seed(2))
    losses = []
    for it in range(40):
        y = torch.randint(5, (32,), generator=gen)
        x = prototypes[y] + 0.7 * torch.randn(32, 16, generator=gen)
        if it == 12 and rank == 1:
            x = 100 * x.roll(1, 0)
        loss = nn.functional.cross_entropy(model(x), y)
        opt.zero_grad()
        loss.backward()
        spike = loss.item() > 10
        if not (spike if FAULT else any_rank(spike)):
            opt.step()
            losses.append(loss.item())
    print(f"RESULT rank={rank} first={losses[0]:.4f} final={sum(losses[-5:]) / 5:.4f} steps={len(losses)}", flush=True)
    time.sleep(0.3)
    dist.destroy_process_group()


main()
