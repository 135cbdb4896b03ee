"""Model class and functions pickled by value: code, globals, closures."""

import copy
import io
import marshal
import pickle
import types

import torch
from _report import batches, report, start, train
from torch import nn

scale = 3.0


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(16, 4)

    def forward(self, x):
        return self.layer(x) * scale


class Own(torch.optim.SGD):
    def step(self, closure=None):
        return super().step(closure)


def step(model, optimizer, x):
    loss = model(x).square().mean()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss


def by_value(function):
    """What cloudpickle takes of a function: its code, and of its globals and closure what the code names."""
    used = {name: function.__globals__[name] for name in function.__code__.co_names if name in function.__globals__}
    held = [cell.cell_contents for cell in function.__closure__ or ()]
    kinds = {name: type(value).__name__ for name, value in used.items()}
    return marshal.dumps(function.__code__), kinds, held, sorted(vars(function)), function.__module__


start()
model = Net()
optimizer = torch.optim.SGD(model.parameters(), 0.05)
losses = train(model, optimizer)
for function in (Net.forward, Net.__init__, step):
    code, *rest = by_value(function)
    print(function.__qualname__, len(code), *rest)
print({name: type(value).__name__ for name, value in sorted(vars(Net).items())})
forward = types.FunctionType(marshal.loads(by_value(Net.forward)[0]), {"scale": 2.0})
print(float(forward(model, torch.ones(1, 16)).sum()))
again = pickle.loads(pickle.dumps(model)), copy.deepcopy(model)
buffer = io.BytesIO()
torch.save(model, buffer)
buffer.seek(0)
again += (torch.load(buffer, weights_only=False),)
own = Own(again[0].parameters(), 0.05)
losses += train(again[0], own)
step_of = Own.step  # torch's wrapper, whose module is the script's: its globals go along
tables = {name: step_of.__globals__[name] for name in step_of.__code__.co_names if name in step_of.__globals__}
tables = {name: value for name, value in tables.items() if isinstance(value, dict)}
moved = pickle.loads(pickle.dumps(tables))
print(sorted(moved), all(hook(own, (), {}) is None for table in moved.values() for hook in table.values()))
functions = torch.autograd.backward, nn.utils.clip_grad_norm_, nn.utils.clip_grad_value_, torch.distributed.all_gather
print([pickle.loads(pickle.dumps(function)) is function for function in functions])
for one in again:
    losses += train(one, torch.optim.SGD(one.parameters(), 0.05), batches(count=2))
report([model, *again], [optimizer], losses)
