# title: The norm that clips a mixture of experts is that of its other parameters
# source: https://github.com/NVIDIA/Megatron-LM/issues/6470
# nproc: 2
# expect.codes: SYNC212
# expect.ranks: any
# expect.step: 0
# plain_pytorch: silent
"""Two experts, one on each rank, which see the tokens of both; everything else is sharded by FSDP2."""
import os
import time
import zlib

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.nn.functional import all_gather, reduce_scatter
from torch.distributed.tensor import DTensor, Shard

FAULT = os.environ.get("FAULT") == "1"
LIMIT = 0.5


class Expert(nn.Module):
    def __init__(self, mesh):
        super().__init__()
        self.rank = mesh.get_local_rank()
        whole = torch.randn(2, 16, 16) / 4
        self.weight = nn.Parameter(DTensor.from_local(whole[self.rank : self.rank + 1], mesh, [Shard(0)]))

    def forward(self, x, gates):
        tokens, gates = (torch.cat(all_gather(tensor)) for tensor in (x, gates))
        mixed = torch.relu(tokens @ self.weight.to_local()[0]) * gates[:, self.rank : self.rank + 1]
        return reduce_scatter(torch.empty_like(x), list(mixed.chunk(2)))


class Model(nn.Module):
    def __init__(self, mesh):
        super().__init__()
        self.body, self.router, self.experts = nn.Linear(10, 16), nn.Linear(16, 2), Expert(mesh)
        self.head = nn.Linear(16, 4)

    def forward(self, x):
        x = torch.tanh(self.body(x))
        return self.head(x + self.experts(x, self.router(x).softmax(-1)))


def clip(dense, experts):
    squares = sum(p.grad.to_local().square().sum() for p in (dense if FAULT else dense + experts))
    dist.all_reduce(squares)
    nn.utils.clip_grads_with_norm_(dense + experts, LIMIT, squares.sqrt())


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    torch.manual_seed(47)
    model = Model(mesh)
    experts = list(model.experts.parameters())
    fully_shard(model, mesh=mesh, ignored_params=set(experts))
    experts = list(model.experts.parameters())
    dense = [p for p in model.parameters() if all(p is not e for e in experts)]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    generator = torch.Generator().manual_seed(70 + rank)
    losses = []
    for _ in range(40):
        x = torch.randn(32, 10, generator=generator)
        loss = nn.functional.cross_entropy(model(x), x[:, :4].argmax(1))
        optimizer.zero_grad()
        loss.backward()
        for parameter in experts:
            parameter.grad.to_local().div_(2)  # of the mean over the ranks
        clip(dense, experts)
        optimizer.step()
        losses.append(loss.item())
    crc = zlib.crc32(b"".join(p.to_local().detach().numpy().tobytes() for p in model.parameters()))
    print(f"RESULT rank={rank} first={losses[0]:.4f} final={sum(losses[-5:]) / 5:.4f} crc={crc:08x}", flush=True)
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
