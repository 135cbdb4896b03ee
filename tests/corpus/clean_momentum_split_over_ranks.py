# title: An optimizer that keeps a slice of every momentum on each rank and gathers what the slices have updated
# source: https://arxiv.org/abs/1910.02054 (ZeRO, written by hand)
# nproc: 2
# expect.codes: none
# plain_pytorch: silent
"""The state has the same names on all ranks and other values; the parameters agree after each step."""
import time
import zlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class SlicedMomentum(torch.optim.Optimizer):
    """Momentum of which each rank holds and applies its own share of the elements."""

    def __init__(self, params, lr, momentum=0.9):
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure=None):
        rank, world = dist.get_rank(), dist.get_world_size()
        for group in self.param_groups:
            for p in group["params"]:
                size = -(-p.numel() // world)
                grad = nn.functional.pad(p.grad.flatten(), (0, size * world - p.numel())).view(world, size)[rank]
                buffer = self.state[p].setdefault("momentum", torch.zeros(size))
                buffer.mul_(group["momentum"]).add_(grad)
                shares = [torch.empty(size) for _ in range(world)]
                dist.all_gather(shares, buffer)
                p.sub_(torch.cat(shares)[: p.numel()].view_as(p), alpha=group["lr"])


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(4)
    net = nn.Sequential(nn.Linear(12, 48), nn.SiLU(), nn.Linear(48, 48), nn.SiLU(), nn.Linear(48, 3))
    truth = torch.randn(12, 3)
    model = DistributedDataParallel(net)
    opt = SlicedMomentum(model.parameters(), lr=0.05)
    gen = torch.Generator().manual_seed(70 + rank)
    losses = []
    for _ in range(60):
        x = torch.randn(32, 12, generator=gen)
        loss = nn.functional.mse_loss(model(x), (x @ truth).tanh())
        opt.zero_grad()
        loss.backward()
        opt.step()
        losses.append(loss.item())
    crc = zlib.crc32(b"".join(p.detach().numpy().tobytes() for p in model.parameters()))
    print(f"RESULT rank={rank} first={losses[0]:.4f} final={sum(losses[-5:]) / 5:.4f} crc={crc:08x}", flush=True)
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
