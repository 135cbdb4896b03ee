# title: The maps of every step are appended for a film that is made at the end
# source: constructed
# nproc: 1
# expect.codes: MEM406
# expect.ranks: all
# expect.subject: any
# expect.step: any
# plain_pytorch: silent
"""A small attention model whose maps are kept to be looked at."""
import collections
import os

import torch
from torch import nn

FAULT = os.environ.get("FAULT") == "1"
LENGTH, BATCH = 96, 48


class Attend(nn.Module):
    def __init__(self, d=16):
        super().__init__()
        self.embed = nn.Linear(2, d)
        self.query, self.key = nn.Linear(d, d), nn.Linear(d, d)
        self.out = nn.Linear(d, 1)

    def forward(self, x):
        h = self.embed(x)
        maps = (self.query(h) @ self.key(h).mT / 4).softmax(-1)
        return self.out(maps @ h)[..., 0], maps


torch.manual_seed(0)
model = Attend()
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
film = [] if FAULT else collections.deque(maxlen=4)
for step in range(120):
    x = torch.randn(BATCH, LENGTH, 2)
    y = x[..., 0] - x[..., 1].mean(1, keepdim=True)
    guess, maps = model(x)
    loss = nn.functional.mse_loss(guess, y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    film.append(maps.detach().numpy().copy())
print(f"loss {loss.item():.4f}, {len(film)} pictures")
