"""One rank that uses everything at which ddpdebug looks: for the walk over its entries with a fault in each."""

import contextlib
import gc
import io
import sys
import warnings

import torch
from common import batches, finish, report, setup
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.checkpoint import checkpoint

warnings.filterwarnings("ignore")
ddp_too = "alone" not in sys.argv


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.second, self.head = (
            nn.Linear(8, 16),
            nn.BatchNorm1d(16),
            nn.Linear(16, 16),
            nn.Linear(16, 4),
        )
        self.unused = nn.Linear(2, 2)

    def forward(self, x):
        x = functional.dropout(self.norm(self.first(x)).relu(), 0.1, self.training)
        return self.head(checkpoint(self.second, x, use_reentrant=False))


rank = setup()
net = Net()
model = DDP(net, find_unused_parameters=True) if ddp_too else net
if ddp_too:
    model.register_comm_hook(None, default_hooks.allreduce_hook)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1))
scaler = torch.amp.GradScaler("cpu", init_scale=4.0, enabled=True)
data = torch.utils.data.TensorDataset(*next(batches(rank, 1, 12, 8, classes=4)))
losses = []
for epoch in range(3):
    for number, (x, y) in enumerate(torch.utils.data.DataLoader(data, batch_size=4)):
        optimizer.zero_grad()
        with model.no_sync() if ddp_too and number == 1 else contextlib.nullcontext():
            scaler.scale(functional.cross_entropy(model(x), y) / 2).backward()
        loss = functional.cross_entropy(model(x), y)
        scaler.scale(loss / 2).backward()
        if number == 2:
            next(model.parameters()).grad[0, 0] = torch.inf
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        nn.utils.clip_grad_value_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.detach())
    schedule.step()
    model.eval()
    with torch.no_grad():
        plateau.step(sum(functional.cross_entropy(model(x), y) for x, y in torch.utils.data.DataLoader(data)))
    model.train()
    with contextlib.suppress(ZeroDivisionError):  # a forward and a backward that raise

        class Fails(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                return x.clone()

            @staticmethod
            def backward(ctx, gradient):
                raise ZeroDivisionError

        Fails.apply(model(x)).sum().backward()
    with contextlib.suppress(RuntimeError):
        model(torch.ones(3, 5))
    file = io.BytesIO()
    torch.save((net.state_dict(), optimizer.state_dict()), file)
    file.seek(0)
    state = torch.load(file)
    net.load_state_dict(state[0])
    optimizer.load_state_dict(state[1])
out = [torch.zeros(2)]
torch.distributed.all_gather(out, torch.ones(2, requires_grad=True) * 2)
report([net], [optimizer], losses, out=out)
del model, net
gc.collect()
finish()
