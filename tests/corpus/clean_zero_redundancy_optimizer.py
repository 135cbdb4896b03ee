# title: ZeroRedundancyOptimizer: each rank holds the optimizer state of its part of the parameters
# source: constructed
# nproc: 2
# expect.codes: none
# plain_pytorch: silent
"""State is sharded on purpose, and parameters are broadcast inside the step."""
import time
import zlib

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel as DDP


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(5)
    centres = torch.randn(5, 18)
    model = DDP(nn.Sequential(nn.Linear(18, 48), nn.ReLU(), nn.Linear(48, 24), nn.ReLU(), nn.Linear(24, 5)))
    opt = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.Adam, lr=4e-3)
    gen = torch.Generator().manual_seed(rank)
    losses = []
    for _ in range(50):
        y = torch.randint(0, 5, (40,), generator=gen)
        x = centres[y] + 0.9 * torch.randn(40, 18, generator=gen)
        opt.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        opt.step()
        losses.append(loss.item())
    crc = zlib.crc32(b"".join(p.detach().numpy().tobytes() for p in model.parameters()))
    print(f"RESULT rank={rank} first={losses[0]:.4f} final={sum(losses[-5:]) / 5:.4f} crc={crc:08x}", flush=True)
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
