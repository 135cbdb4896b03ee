# title: An optimizer in which each matrix has an owner leaves the last, incomplete round of owners without a broadcast
# source: https://github.com/KellerJordan/Muon/issues/46
# nproc: 2
# expect.codes: RANK101
# expect.rank: 0,1
# expect.name: 4.weight
# expect.step: 0
# plain_pytorch: silent
"""Three matrices over two ranks: the third is updated by rank 0 alone. Each momentum is on its owner only, by design."""
import os
import time
import zlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

FAULT = os.environ.get("FAULT", "1") == "1"


class Owned(torch.optim.Optimizer):
    """Momentum with orthogonal updates; parameter i is updated by rank i modulo the number of ranks."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        rank, world = dist.get_rank(), dist.get_world_size()
        for group in self.param_groups:
            params = group["params"]
            whole = len(params) // world * world
            for number, p in enumerate(params):
                if number % world == rank:
                    buffer = self.state[p].setdefault("momentum", torch.zeros_like(p))
                    buffer.mul_(0.9).add_(p.grad)
                    left, _, right = torch.linalg.svd(buffer, full_matrices=False)
                    p.sub_(left @ right, alpha=group["lr"])
            for number, p in enumerate(params[:whole] if FAULT else params):
                dist.broadcast(p, number % world)


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(8)
    net = nn.Sequential(nn.Linear(16, 24), nn.GELU(), nn.Linear(24, 24), nn.GELU(), nn.Linear(24, 5))
    truth = torch.randn(16, 5)
    model = DistributedDataParallel(net)
    matrices = Owned([p for p in model.parameters() if p.dim() == 2], lr=0.01)
    others = torch.optim.AdamW([p for p in model.parameters() if p.dim() == 1], lr=3e-3)
    gen = torch.Generator().manual_seed(40 + rank)
    losses = []
    for _ in range(60):
        x = torch.randn(32, 16, generator=gen)
        loss = nn.functional.cross_entropy(model(x), (x @ truth).argmax(1))
        model.zero_grad()
        loss.backward()
        matrices.step()
        others.step()
        losses.append(loss.item())
    crc = zlib.crc32(b"".join(p.detach().numpy().tobytes() for p in model.parameters()))
    print(f"RESULT rank={rank} first={losses[0]:.4f} final={sum(losses[-5:]) / 5:.4f} crc={crc:08x}", flush=True)
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
