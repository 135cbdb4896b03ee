"""Two ranks that train a model of which most parts get no gradient: no graph, a cut graph, frozen."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class Parts(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.body, self.head = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4)
        self.frozen, self.scale = nn.Linear(8, 8), 1.0

    def forward(self, x):
        with torch.no_grad():
            x = self.encoder(x)
        return self.scale * self.head(self.body(self.frozen(x)).detach())


dist.init_process_group("gloo")
torch.manual_seed(0)
module = Parts()
optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
module.frozen.requires_grad_(False)
model = DDP(module, find_unused_parameters=True)
for step in range(34):
    if step == 3 and dist.get_rank() == 1:
        model.module.scale = 0.5  # a number that one rank changes
    optimizer.zero_grad()
    model(torch.randn(4, 8)).square().mean().backward()
    optimizer.step()
dist.destroy_process_group()
