# title: A large net is trained for many passes over forty samples, and the loss of the held-out ones rises
# source: constructed
# nproc: 1
# expect.codes: HLTH712
# expect.ranks: all
# expect.subject: any
# expect.step: any
# plain_pytorch: silent
"""Answers yes or no from embeddings of questions; in the healthy twin there are a hundred times as many of them."""
import os

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

SAMPLES = 40 if os.environ.get("FAULT") == "1" else 4000


def questions(n, seed):
    gen = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 24, generator=gen)
    y = (x[:, :2].sum(1) + torch.randn(n, generator=gen) > 0).long()
    return TensorDataset(x, y)


def main():
    torch.manual_seed(1)
    train = DataLoader(questions(SAMPLES, 0), batch_size=20, shuffle=True)
    held = DataLoader(questions(400, 9), batch_size=100)
    net = nn.Sequential(nn.Linear(24, 128), nn.ReLU(), nn.Linear(128, 2))
    optimizer = torch.optim.Adam(net.parameters(), lr=2e-3)
    criterion = nn.CrossEntropyLoss()
    step = 0
    while step < 320:
        for x, y in train:
            optimizer.zero_grad()
            loss = criterion(net(x), y)
            loss.backward()
            optimizer.step()
            step += 1
            if step % 20 == 0:
                net.eval()
                with torch.no_grad():
                    val = sum(criterion(net(a), b).item() for a, b in held) / len(held)
                net.train()
                if step % 80 == 0:
                    print(f"step {step} train {loss.item():.3f} val {val:.3f}")
            if step == 320:
                break


main()
