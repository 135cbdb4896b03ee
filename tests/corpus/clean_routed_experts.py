# title: Mixture of experts: some experts see no sample on some ranks, and DDP looks for unused parameters
# source: https://pytorch.org/docs/stable/generated/torch.nn.parallel.DistributedDataParallel.html
# nproc: 2
# expect.codes: none
# plain_pytorch: silent
"""A rank without samples for an expert has no gradient of its own for it, and receives half of the other rank's."""

import time
import zlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class Routed(nn.Module):
    def __init__(self, width=8, experts=4):
        super().__init__()
        self.gate = nn.Linear(width, experts)
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(experts))
        self.out = nn.Linear(width, 2)

    def forward(self, x):
        weight, chosen = self.gate(x).softmax(1).max(1)
        mixed = torch.zeros_like(x)
        for number in chosen.unique().tolist():
            rows = (chosen == number).nonzero().squeeze(1)
            mixed = mixed.index_put((rows,), self.experts[number](x[rows]) * weight[rows, None])
        return self.out(x + mixed)


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DDP(Routed(), find_unused_parameters=True)
    opt = torch.optim.SGD(model.parameters(), lr=0.05)
    gen = torch.Generator().manual_seed(rank)
    losses = []
    for _ in range(60):
        x = torch.randn(3, 8, generator=gen)
        loss = nn.functional.cross_entropy(model(x), (x[:, 0] > 0).long())
        opt.zero_grad()
        loss.backward()
        opt.step()
        losses.append(loss.item())
    crc = zlib.crc32(b"".join(p.detach().numpy().tobytes() for p in model.parameters()))
    print(f"RESULT rank={rank} first={losses[0]:.4f} final={sum(losses[-5:]) / 5:.4f} crc={crc:08x}", flush=True)
    time.sleep(0.3)
    dist.destroy_process_group()


main()
