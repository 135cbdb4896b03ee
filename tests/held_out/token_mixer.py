# title: Scores of attention are multiplied by the square root of the width instead of divided
# source: constructed
# nproc: 1
# expect.codes: HLTH704
# expect.ranks: all
# expect.subject: attend
# expect.step: any
# plain_pytorch: silent
"""Attention over the tokens of a sum, written by hand."""
import os

import torch
from torch import nn

FAULT = os.environ.get("FAULT") == "1"


class Mixer(nn.Module):
    def __init__(self, d=64):
        super().__init__()
        self.scale = d**0.5 if FAULT else d**-0.5
        self.embed = nn.Embedding(16, d)
        self.place = nn.Parameter(torch.randn(12, d))
        self.norm = nn.LayerNorm(d)
        self.qkv = nn.Linear(d, 3 * d, bias=False)
        self.attend = nn.Softmax(dim=-1)
        self.out = nn.Linear(d, 2)

    def forward(self, tokens):
        x = self.norm(self.embed(tokens) + self.place)
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        mixed = self.attend(q @ k.transpose(-1, -2) * self.scale) @ v
        return self.out((x + mixed).mean(1))


def main():
    torch.manual_seed(10)
    model = Mixer()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    criterion = nn.CrossEntropyLoss()
    for step in range(80):
        tokens = torch.randint(0, 16, (32, 12))
        loss = criterion(model(tokens), (tokens.sum(1) > 90).long())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"final loss {loss.item():.4f}")


main()
