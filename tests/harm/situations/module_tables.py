"""torch's tables of hooks, classes and models, whenever a script may look."""

import torch
from _report import batches, report, start, train
from torch import nn
from torch.nn.modules import module as tables

before = {name: getattr(nn.Module, name) for name in ("__call__", "_call_impl", "_wrapped_call_impl", "load_state_dict")}
seen = []


def look(where):
    hooks = [len(getattr(tables, name)) for name in sorted(vars(tables)) if name.startswith(("_global_forward", "_global_b"))]
    own = [sorted(name for name, value in vars(m).items() if "hooks" in name and value) for m in model.modules()]
    kinds = [sorted(vars(kind)) for kind in (Net, nn.Linear, nn.Sequential)]
    same = [getattr(nn.Module, name) is value for name, value in before.items()]
    said = (where, hooks, own, kinds, same, Net.forward.__globals__ is globals(), "forward" in vars(model))
    if said not in seen:
        seen.append(said)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(16, 4)

    def forward(self, x):
        look("forward")
        return self.layer(x)


start()
model = Net()
model.layer.register_forward_hook(lambda *_: look("hook"))
optimizer = torch.optim.SGD(model.parameters(), 0.05)
losses = []
for _ in range(4):
    losses += train(model, optimizer, batches(count=6))
    look("between")
    model.eval()
    with torch.no_grad():
        nn.functional.mse_loss(model(torch.ones(2, 16)), torch.ones(2, 4))
    model.train()
    look("after an evaluation")
report([model], [optimizer], losses)
for line in seen:
    print(line)
