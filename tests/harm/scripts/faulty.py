"""Two ranks with a fault of each kind, for the walk over what is still found while one of our looks fails."""

import sys

import torch
from common import batches, finish, setup
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader

STEPS = 26


class Log(nn.Module):
    """The logarithm of what is not negative until the last step."""

    bad = False

    def forward(self, x):
        return (x - 2 * x.detach().amax() * self.bad + 1).log()


rank = setup()
log = Log()
model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), log, nn.Linear(32, 5))
model[3].weight.data.mul_(40)  # RCP801
ddp = DDP(model)
optimizer = torch.optim.Adam(ddp.parameters(), lr=1e-3)
schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1000)
data = DataLoader(list(batches(0, STEPS, 8, 16, classes=5)), batch_size=None)  # DATA901
for step, (x, y) in enumerate(data):
    if step == 20 and rank == 1:
        model[0].weight.data[0, 0] += 1  # RANK101
    log.bad = step == STEPS - 1  # NUM301
    optimizer.zero_grad()
    F.cross_entropy(ddp(x), y).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    schedule.step()
    schedule.step()  # RCP806
sys.stdout.flush()
del ddp, model, log
finish()
