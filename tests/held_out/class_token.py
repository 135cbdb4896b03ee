# title: Parameters are sorted into groups by the ends of their names, and two have neither end
# source: constructed
# nproc: 1
# expect.codes: RCP803
# expect.ranks: all
# expect.subject: token
# expect.step: any
# plain_pytorch: silent
"""A small vision transformer, one process."""
import os

import torch
import torch.nn as nn
import torch.nn.functional as F

FAULT = os.environ.get("FAULT") == "1"


class Vit(nn.Module):
    def __init__(self, d=32, patches=9, classes=4):
        super().__init__()
        self.token = nn.Parameter(torch.randn(1, 1, d) * 0.02)
        self.position = nn.Parameter(torch.randn(1, patches + 1, d) * 0.02)
        self.embed = nn.Linear(16, d)
        layer = nn.TransformerEncoderLayer(d, 4, 64, dropout=0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(d, classes)

    def forward(self, image):
        patches = F.unfold(image, 4, stride=4).transpose(1, 2)
        x = torch.cat([self.token.expand(len(image), -1, -1), self.embed(patches)], 1) + self.position
        return self.head(self.encoder(x)[:, 0])


def configure(model):
    decay, no_decay = [], []
    for name, p in model.named_parameters():
        if name.endswith("bias") or "norm" in name:
            no_decay.append(p)
        elif name.endswith("weight"):
            decay.append(p)
        elif not FAULT:
            no_decay.append(p)
    return torch.optim.AdamW([{"params": decay, "weight_decay": 0.1}, {"params": no_decay, "weight_decay": 0.0}], lr=1e-3)


torch.manual_seed(7)
model = Vit()
optimizer = configure(model)
for step in range(60):
    where = torch.randint(0, 4, (32,))
    image = torch.randn(32, 1, 12, 12) * 0.5
    for i, q in enumerate(where.tolist()):
        image[i, 0, 6 * (q // 2) : 6 * (q // 2) + 6, 6 * (q % 2) : 6 * (q % 2) + 6] += 1
    loss = F.cross_entropy(model(image), where)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print(f"loss {loss.item():.4f}")
