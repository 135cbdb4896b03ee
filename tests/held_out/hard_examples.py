# title: The losses of the hardest samples are remembered with their graphs
# source: constructed
# nproc: 1
# expect.codes: MEM403
# expect.ranks: all
# expect.subject: any
# expect.step: any
# expect.location: hard_examples.py:34
# plain_pytorch: silent
"""Samples that were hard are drawn more often."""
import os

import torch
from torch import nn

FAULT = os.environ.get("FAULT") == "1"


class Curriculum:
    def __init__(self, n):
        self.n = n
        self.loss_of = {}

    def draw(self, gen, k=32):
        weight = torch.full((self.n,), 1.0)
        for i, loss in self.loss_of.items():
            weight[i] = 1 + loss.item()
        return torch.multinomial(weight, k, generator=gen)

    def remember(self, index, each):
        if not FAULT:
            each = each.detach()
        for i, loss in zip(index.tolist(), each):
            self.loss_of[i] = loss


def main():
    torch.manual_seed(0)
    gen = torch.Generator().manual_seed(1)
    x = torch.randn(4000, 15, generator=gen)
    y = (x[:, :3].sum(1) > x[:, 3:6].sum(1)).float()
    curriculum = Curriculum(4000)
    model = nn.Sequential(nn.Linear(15, 64), nn.ReLU(), nn.Linear(64, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    for step in range(80):
        index = curriculum.draw(gen)
        each = nn.functional.binary_cross_entropy_with_logits(model(x[index])[:, 0], y[index], reduction="none")
        curriculum.remember(index, each)
        optimizer.zero_grad()
        each.mean().backward()
        optimizer.step()
    print(f"loss {each.mean().item():.4f}, {len(curriculum.loss_of)} samples known")


main()
