"""Runs out of memory in a model's forward: out_of_memory.py [DEVICE]. The CPU needs --memory-limit."""
import sys

import torch
from torch import nn

device = sys.argv[1] if len(sys.argv) > 1 else "cuda"


class Greedy(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(256, 256)
        self.step = 0

    def forward(self, x):
        self.step += 1
        x = self.layer(x)
        if self.step == 5:
            hoard = [x.new_zeros(16 << 20) for _ in range(1 << 20)]  # 64 MiB each
            return x + hoard[0][0]
        return x


torch.manual_seed(0)
model = Greedy().to(device)
if device.startswith("cuda"):
    torch.cuda.set_per_process_memory_fraction(min(1.0, (1 << 30) / torch.cuda.get_device_properties(0).total_memory))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for _ in range(8):
    optimizer.zero_grad()
    model(torch.ones(4, 256, device=device)).sum().backward()
    optimizer.step()
