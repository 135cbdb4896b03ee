"""Models built, copied, saved and loaded, with registration hooks, while others train."""

import copy
import io
import weakref

import torch
from _report import digest, start, train
from torch import nn
from torch.nn.modules import module as modules


class Equal(nn.Module):
    """Cannot be hashed."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))

    def __eq__(self, other):
        raise RuntimeError("compared")


class Odd(nn.Module):
    """Keeps its parameters elsewhere, and has its own ways of being copied."""

    def __init__(self):
        super().__init__()
        object.__setattr__(self, "hidden", nn.Linear(2, 2))
        self.register_buffer("count", torch.zeros(()))
        self.register_parameter("absent", None)

    def __getattr__(self, name):
        if name.startswith("magic_"):
            return 3
        return super().__getattr__(name)

    def __deepcopy__(self, memo):
        other = type(self)()
        other.copied = True
        return other

    def __getstate__(self):
        return {"state": self.__dict__}

    def __setstate__(self, state):
        super().__setstate__(state["state"])


start()
seen = []
handles = [
    modules.register_module_parameter_registration_hook(lambda m, n, p: seen.append((type(m).__name__, n, "p"))),
    modules.register_module_buffer_registration_hook(lambda m, n, b: seen.append((type(m).__name__, n, "b"))),
    modules.register_module_module_registration_hook(lambda m, n, c: seen.append((type(m).__name__, n, "m"))),
]
model = nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.LazyLinear(4))
model(torch.ones(4, 16))
with torch.device("meta"):
    seen.append(str(nn.Linear(3, 3).weight.device))
equal, odd, twin = Equal(), Odd(), copy.deepcopy(model)
other = copy.deepcopy(odd)
file = io.BytesIO()
torch.save([model, equal, odd], file)
file.seek(0)
loaded = torch.load(file, weights_only=False)
scripted = torch.jit.script(nn.Linear(2, 2))
optimizer = torch.optim.Adam(model.parameters(), 1e-2)
second = copy.deepcopy(optimizer)
ghost = weakref.ref(nn.Linear(2, 2))
for _ in range(3):
    throwaway = [nn.Linear(2, 2) for _ in range(200)]
gone = weakref.ref(throwaway[7])
del throwaway
train(model, optimizer)
average = torch.optim.swa_utils.AveragedModel(model)
average.update_parameters(model)
print(len(seen), seen[:3], seen[-3:], ghost() is None, gone() is None, other.copied, odd.magic_spell)
print(digest([model.state_dict(), twin.state_dict(), average.state_dict(), loaded[0].state_dict(), scripted(torch.ones(1, 2)).detach(), len(second.param_groups)]))
for handle in handles:
    handle.remove()
