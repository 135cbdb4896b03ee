# title: The last bias is set to the numbers of samples of the classes and not to their logarithms
# source: constructed
# nproc: 1
# expect.codes: RCP801
# expect.ranks: all
# expect.subject: any
# expect.step: 0
# plain_pytorch: silent
"""Kinds of defects on a line of production, most of which are of the first kind."""
import os

import torch
import torch.nn as nn
import torch.nn.functional as F

FAULT = os.environ.get("FAULT") == "1"
COUNTS = torch.tensor([58.0, 22.0, 12.0, 8.0])


def defects(gen, n=40):
    kind = torch.multinomial(COUNTS, n, replacement=True, generator=gen)
    return F.one_hot(kind, 4).repeat(1, 3) + 0.7 * torch.randn(n, 12, generator=gen), kind


def main():
    torch.manual_seed(13)
    gen = torch.Generator().manual_seed(0)
    head = nn.Linear(32, 4)
    with torch.no_grad():
        head.bias.copy_(COUNTS if FAULT else (COUNTS / COUNTS.sum()).log())
    model = nn.Sequential(nn.Linear(12, 32), nn.Mish(), head)
    optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3)
    for step in range(60):
        measured, kind = defects(gen)
        loss = F.cross_entropy(model(measured), kind)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step == 0:
            print(f"starts at {loss.item():.3f}")
    print(f"ends at {loss.item():.3f}")


main()
