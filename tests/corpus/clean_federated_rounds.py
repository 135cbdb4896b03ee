# title: Federated averaging: each rank takes as many steps in a round as it has samples for, then weights are averaged
# source: https://arxiv.org/abs/1602.05629
# nproc: 2
# expect.codes: none
# plain_pytorch: silent
"""Clients with data sets of different sizes and momentum on the server; a new optimizer for each round."""
import time
import zlib

import torch
import torch.distributed as dist
from torch import nn


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(101)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4))
    velocity = [torch.zeros_like(p) for p in model.parameters()]
    generator = torch.Generator().manual_seed(510 + rank)
    samples = 80 + 60 * rank
    points = torch.randn(samples, 8, generator=generator) + 0.3 * rank
    labels = (points[:, :4] * torch.tensor([1.0, 1.2, 1.4, 1.6])).argmax(1)
    total = torch.tensor(float(samples))
    dist.all_reduce(total)
    losses = []
    for _ in range(10):
        begun = [p.detach().clone() for p in model.parameters()]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            for chosen in torch.randperm(samples, generator=generator).split(20):
                loss = nn.functional.cross_entropy(model(points[chosen]), labels[chosen])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        with torch.no_grad():
            for weights, before, momentum in zip(model.parameters(), begun, velocity):
                change = (weights - before) * samples / total
                dist.all_reduce(change)
                momentum.mul_(0.5).add_(change)
                weights.copy_(before + momentum)
        losses.append(loss.item())
    crc = zlib.crc32(b"".join(p.detach().numpy().tobytes() for p in model.parameters()))
    print(f"RESULT rank={rank} first={losses[0]:.4f} final={sum(losses[-3:]) / 3:.4f} crc={crc:08x}", flush=True)
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
