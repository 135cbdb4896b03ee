"""The loop, scheduler and optimizer pass only what inspect lists as parameters."""

import inspect

import torch
from _report import batches, report, start
from torch import nn
from torch.optim import lr_scheduler


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(16, 4)

    def forward(self, x, mask=None):
        return self.layer(x if mask is None else x * mask)


def of(function):
    spec, code = inspect.getfullargspec(function), function.__code__
    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    signature = inspect.signature(function, follow_wrapped=False)
    return spec, names, str(signature), function.__globals__["__name__"], hasattr(function, "__wrapped__")


start()
model = Net()
optimizer = torch.optim.SGD(model.parameters(), 0.05)
schedules = [lr_scheduler.StepLR(optimizer, 3), lr_scheduler.ReduceLROnPlateau(optimizer)]
losses = []
for x in batches(count=10):
    batch = {"x": x, "mask": (x > 0).float(), "extra": None}
    known = inspect.getfullargspec(model.forward).args
    optimizer.zero_grad()
    loss = model(**{name: value for name, value in batch.items() if name in known}).square().mean()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    for schedule in schedules:
        schedule.step(*[loss.detach()] * ("metrics" in inspect.getfullargspec(schedule.step).args))
    losses.append(loss.detach())
report([model], [optimizer], losses, known=known)
functions = [
    model.forward,
    Net.__call__,
    nn.Module.load_state_dict,
    nn.parallel.DistributedDataParallel.__init__,
    nn.parallel.DistributedDataParallel.forward,
    nn.parallel.DistributedDataParallel.no_sync,
    nn.parallel.DistributedDataParallel.register_comm_hook,
    torch.autograd.backward,
    nn.utils.clip_grad_norm_,
    nn.utils.clip_grad_value_,
    lr_scheduler.LRScheduler.step,
    lr_scheduler.ReduceLROnPlateau.step,
    torch.optim.Optimizer.__init__,
    torch.optim.Optimizer.load_state_dict,
    torch.amp.GradScaler.scale,
    torch.amp.GradScaler.step,
    torch.distributed.all_gather,
    torch.distributed.init_process_group,
    torch.utils.data.DataLoader.__iter__,
    torch.utils.data.Subset.__init__,
]
for function in functions:
    print(function.__qualname__, *of(function))
