# title: A small net learns from the softened outputs of a large one and from labels
# source: constructed
# nproc: 2
# expect.codes: none
# plain_pytorch: silent
"""The large net is trained a little beforehand on every rank alike, then stays in eval mode with its softmax."""
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

T = 3.0


def net(width):
    return nn.Sequential(nn.Linear(16, width), nn.ReLU(), nn.Dropout(0.1), nn.Linear(width, 5))


def batch(gen, rule, n=48):
    x = torch.randn(n, 16, generator=gen)
    return x, (x @ rule + 0.5 * torch.randn(n, 5, generator=gen)).argmax(1)


def fit(model, objective, gen, rule, steps, lr):
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    for _ in range(steps):
        x, y = batch(gen, rule)
        optimizer.zero_grad()
        loss = objective(x, y)
        loss.backward()
        optimizer.step()
    return loss.item()


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(3)
    rule = torch.randn(16, 5)
    gen = torch.Generator().manual_seed(60 + rank)
    teacher, student = DDP(net(128)), DDP(net(24))
    torch.manual_seed(9 + rank)
    fit(teacher, lambda x, y: F.cross_entropy(teacher(x), y), gen, rule, 40, 3e-3)
    big = teacher.module.eval().requires_grad_(False)

    def distil(x, y):
        logits = student(x)
        with torch.no_grad():
            soft = F.softmax(big(x) / T, dim=1)
        kl = F.kl_div(F.log_softmax(logits / T, dim=1), soft, reduction="batchmean") * T * T
        return 0.7 * kl + 0.3 * F.cross_entropy(logits, y)

    print(f"rank {rank} {fit(student, distil, gen, rule, 60, 3e-3):.4f}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


main()
