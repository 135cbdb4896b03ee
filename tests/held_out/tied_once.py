# title: The output layer loads the weights of the embedding instead of sharing them
# source: constructed
# nproc: 1
# expect.codes: RCP818
# expect.ranks: all
# expect.subject: any
# expect.step: any
# plain_pytorch: silent
"""A character model with tied weights."""
import os

import torch
import torch.nn as nn
import torch.nn.functional as F

FAULT = os.environ.get("FAULT") == "1"


class Characters(nn.Module):
    def __init__(self, n=32, d=48):
        super().__init__()
        self.embedding = nn.Embedding(n, d)
        nn.init.normal_(self.embedding.weight, std=0.1)
        self.rnn = nn.GRU(d, d, batch_first=True)
        self.output = nn.Linear(d, n, bias=False)
        if FAULT:
            self.output.load_state_dict(self.embedding.state_dict())
        else:
            self.output.weight = self.embedding.weight

    def forward(self, text):
        return self.output(self.rnn(self.embedding(text))[0])


def text(gen, n=16, length=14):
    rows = [torch.randint(32, (n,), generator=gen)]
    for _ in range(length):
        rows.append((rows[-1] * 5 + torch.randint(3, (n,), generator=gen)) % 32)
    return torch.stack(rows, 1)


torch.manual_seed(6)
model = Characters()
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
gen = torch.Generator().manual_seed(0)
for step in range(90):
    batch = text(gen)
    logits = model(batch[:, :-1])
    loss = F.cross_entropy(logits.reshape(-1, 32), batch[:, 1:].reshape(-1))
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 5.0)
    optimizer.step()
print(f"{loss.item():.4f}")
