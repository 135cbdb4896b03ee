# title: Features are standardised by way of .data, which cuts the encoder off
# source: constructed
# nproc: 1
# expect.codes: RCP810
# expect.ranks: all
# expect.subject: encoder
# expect.step: any
# plain_pytorch: silent
"""A siamese comparison of signatures."""
import os

import torch
import torch.nn as nn

FAULT = os.environ.get("FAULT") == "1"


class Siamese(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Conv1d(2, 8, 5, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 14, 24))
        self.compare = nn.Sequential(nn.Linear(24, 24), nn.ReLU(), nn.Linear(24, 1))

    def describe(self, strokes):
        z = self.encoder(strokes)
        if FAULT:
            z = z.data
        return (z - z.mean(1, keepdim=True)) / (z.std(1, keepdim=True) + 1e-5)

    def forward(self, pair):
        a, b = self.describe(pair["first"]), self.describe(pair["second"])
        return self.compare((a - b).abs()).squeeze(1)


def pairs(people, n=32):
    who = torch.randint(len(people), (2, n))
    same = torch.rand(n) < 0.5
    who[1] = torch.where(same, who[0], who[1])
    strokes = people[who] + 0.4 * torch.randn(2, n, 2, 32)
    return {"first": strokes[0], "second": strokes[1]}, (who[0] == who[1]).float()


torch.manual_seed(5)
people = torch.randn(12, 2, 32)
net = Siamese()
optimizer = torch.optim.Adam(net.parameters(), lr=2e-3)
criterion = nn.BCEWithLogitsLoss()
for step in range(80):
    batch, same = pairs(people)
    optimizer.zero_grad()
    loss = criterion(net(batch), same)
    loss.backward()
    optimizer.step()
print(f"{loss.item():.4f}")
