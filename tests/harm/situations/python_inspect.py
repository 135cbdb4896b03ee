"""Introspection of wrapped functions: names, signatures, identity, pickles."""

import inspect
import pickle

import torch
from _report import ddp, report, start, train
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader


class Own(DistributedDataParallel):
    def forward(self, *args, **kwargs):
        return super().forward(*args, **kwargs)


start()
ddp(nn.Linear(2, 2))
model = Own(nn.Linear(16, 4))
optimizer = torch.optim.SGD(model.parameters(), 0.05)
losses = train(model, optimizer)
seen = []
for function in (
    DistributedDataParallel.__init__,
    DistributedDataParallel.forward,
    DistributedDataParallel.no_sync,
    torch.autograd.backward,
    torch.Tensor.backward,
    nn.utils.clip_grad_norm_,
    nn.Module.load_state_dict,
    nn.Module.__call__,
    torch.optim.Optimizer.load_state_dict,
    torch.optim.SGD.step,
    torch.distributed.all_gather,
    torch.distributed.init_process_group,
    DataLoader.__iter__,
    torch.amp.GradScaler.step,
):
    seen.append((function.__name__, function.__qualname__, function.__module__, str(inspect.signature(function))))
    seen.append(bool(function.__doc__))
pickled = []
for function in (torch.autograd.backward, nn.utils.clip_grad_norm_, torch.distributed.all_gather):
    try:
        pickled.append(pickle.loads(pickle.dumps(function)) is function)
    except pickle.PicklingError as error:
        pickled.append(error)
kinds = type(model).__mro__[1] is DistributedDataParallel, isinstance(model, DistributedDataParallel)
report([model], [optimizer], losses, pickled=pickled, kinds=kinds, state=type(optimizer.state).__name__)
for line in seen:
    print(line)
