# title: No DDP: each matrix has an owner, to which the optimizer's step reduces its gradient and which broadcasts it
# source: https://github.com/hiyouga/LlamaFactory/pull/7808
# nproc: 2
# expect.codes: none
# plain_pytorch: silent
"""The gradients that the step finds are each rank's own, by design: only the owner has the mean, inside of the step."""
import time
import zlib

import torch
import torch.distributed as dist
from torch import nn


class Owned(torch.optim.Optimizer):
    """Momentum with orthogonal updates; parameter i is reduced to rank i modulo the number of ranks."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        rank, world = dist.get_rank(), dist.get_world_size()
        for group in self.param_groups:
            for number, p in enumerate(group["params"]):
                owner, grad = number % world, p.grad / world
                dist.reduce(grad, owner)
                if rank == owner:
                    buffer = self.state[p].setdefault("momentum", torch.zeros_like(p))
                    buffer.mul_(0.9).add_(grad)
                    left, _, right = torch.linalg.svd(buffer, full_matrices=False)
                    p.sub_(left @ right, alpha=group["lr"])
                dist.broadcast(p, owner)


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(8)
    net = nn.Sequential(nn.Linear(16, 24), nn.GELU(), nn.Linear(24, 24), nn.GELU(), nn.Linear(24, 5))
    truth = torch.randn(16, 5)
    matrices = Owned([p for p in net.parameters() if p.dim() == 2], lr=0.01)
    biases = [p for p in net.parameters() if p.dim() == 1]
    others = torch.optim.AdamW(biases, lr=3e-3)
    gen = torch.Generator().manual_seed(40 + rank)
    losses = []
    for _ in range(60):
        x = torch.randn(32, 16, generator=gen)
        loss = nn.functional.cross_entropy(net(x), (x @ truth).argmax(1))
        net.zero_grad()
        loss.backward()
        for p in biases:
            dist.all_reduce(p.grad)
            p.grad /= dist.get_world_size()
        matrices.step()
        others.step()
        losses.append(loss.item())
    crc = zlib.crc32(b"".join(p.detach().numpy().tobytes() for p in net.parameters()))
    print(f"RESULT rank={rank} first={losses[0]:.4f} final={sum(losses[-5:]) / 5:.4f} crc={crc:08x}", flush=True)
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
