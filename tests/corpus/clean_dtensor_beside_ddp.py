# title: A model whose weights are sharded over the ranks trains beside one in DDP
# source: constructed
# nproc: 2
# expect.codes: none
# plain_pytorch: silent
"""Each rank holds other rows of the sharded weight, and other state of its optimizer, on purpose."""
import time
import zlib

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(11)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    table = nn.Parameter(distribute_tensor(torch.randn(8, 6), mesh, [Shard(0)]))
    second = torch.optim.SGD([table], lr=0.05, momentum=0.9)
    generator = torch.Generator().manual_seed(100 + rank)
    losses = []
    for _ in range(40):
        x = torch.randn(32, 6, generator=generator)
        y = x.sum(1, keepdim=True).sin()
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        second.zero_grad()
        table.to_local().square().mean().backward()            # of this rank's rows only
        second.step()
    crc = zlib.crc32(b"".join(p.detach().numpy().tobytes() for p in model.parameters()))
    print(f"RESULT rank={rank} first={losses[0]:.4f} final={sum(losses[-5:]) / 5:.4f} crc={crc:08x}", flush=True)
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
