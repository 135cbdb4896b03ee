# title: Replicas train apart for six steps and are averaged then, with an outer momentum
# source: constructed
# nproc: 2
# expect.codes: none
# plain_pytorch: silent
"""Local steps with an outer optimizer on rank-averaged differences, without any wrapper."""
import torch
import torch.distributed as dist
from torch import nn

INNER, OUTER = 6, 14


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(12, 48), nn.GELU(), nn.Linear(48, 3))
    rule = torch.randn(12, 3)
    inner = torch.optim.AdamW(net.parameters(), lr=3e-3)
    anchor = [p.detach().clone() for p in net.parameters()]
    outer = torch.optim.SGD([nn.Parameter(a) for a in anchor], lr=0.7, momentum=0.6, nesterov=True)
    gen = torch.Generator().manual_seed(rank)
    for _ in range(OUTER):
        for _ in range(INNER):
            x = torch.randn(32, 12, generator=gen)
            loss = nn.functional.cross_entropy(net(x), (x @ rule).argmax(1))
            inner.zero_grad()
            loss.backward()
            inner.step()
        for far, p in zip(outer.param_groups[0]["params"], net.parameters()):
            far.grad = far.detach() - p.detach()
            dist.all_reduce(far.grad)
            far.grad /= world
        outer.step()
        with torch.no_grad():
            for far, p in zip(outer.param_groups[0]["params"], net.parameters()):
                p.copy_(far)
    print(f"rank {rank} {loss.item():.4f}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


main()
