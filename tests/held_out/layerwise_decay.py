# title: The rate that falls with depth is applied to itself in a loop, and the lower layers hardly move
# source: constructed
# nproc: 1
# expect.codes: HLTH705
# expect.ranks: all
# expect.subject: layers.0
# expect.step: any
# plain_pytorch: silent
"""Fine-tuning with a rate for each layer."""
import os

import torch
import torch.nn as nn
import torch.nn.functional as F

FAULT = os.environ.get("FAULT") == "1"


class Net(nn.Module):
    def __init__(self, depth=6, d=32):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(d, d) for _ in range(depth))
        self.head = nn.Linear(d, 5)

    def forward(self, x):
        for layer in self.layers:
            x = x + F.gelu(layer(x))
        return self.head(x)


def groups(net, rate, decay=0.6):
    yield {"params": net.head.parameters(), "lr": rate}
    factor = decay
    for above, layer in enumerate(reversed(net.layers), 1):
        factor = factor * decay**above if FAULT else decay**above
        yield {"params": layer.parameters(), "lr": rate * factor}


torch.manual_seed(2)
net = Net()
optimizer = torch.optim.AdamW(list(groups(net, 2e-3)), weight_decay=0.01)
rule = torch.randn(32, 5)
for step in range(90):
    x = torch.randn(48, 32)
    loss = F.cross_entropy(net(x), (x @ rule).argmax(1))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print(f"{loss.item():.4f}", [f"{g['lr']:.1e}" for g in optimizer.param_groups])
