"""Loads that fit in part, fail, or meet hooks and swaps.

parts: all
"""

import inspect

import torch
from _report import batches, report, start, train
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(16, 8)
        self.head = nn.Linear(8, 4)
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x):
        return self.head(torch.relu(self.body(x)))

    def named_parameters(self, *args, **kwargs):
        listed.append(len(args))
        return super().named_parameters(*args, **kwargs)


def forgive(_, incompatible):
    answered.append((list(incompatible.missing_keys), list(incompatible.unexpected_keys)))
    incompatible.missing_keys.clear()


start()
listed, answered, said, norms = [], [], [], []
print(inspect.signature(nn.Module.load_state_dict), inspect.signature(nn.utils.clip_grad_norm_))
model = Net()
own = {name: value + 0.5 for name, value in model.state_dict().items()}
for state in ({f"module.{name}": value for name, value in own.items()}, {}, {"body.weight": own["body.weight"]}):
    result = model.load_state_dict(state, strict=False)
    said.append((type(result).__name__, *result, repr(result)))
for state in ({"body.weight": own["head.weight"]}, {"body": own["body.weight"]}, None):
    try:
        model.load_state_dict(state)
    except Exception as error:
        said.append((type(error).__name__, str(error)))
handle = model.register_load_state_dict_post_hook(forgive)
said.append(repr(model.load_state_dict({"head.bias": own["head.bias"]})))
handle.remove()
said.append(repr(model.load_state_dict(own, assign=True)))
model.load_state_dict({name: value.clone() for name, value in own.items()})
nn.init.normal_(model.body.weight)
torch.utils.swap_tensors(model.head.weight, nn.Parameter(torch.full((4, 8), 0.25)))
losses = []
for _ in range(3):  # each with moments of its own
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 10)
    schedule.load_state_dict({**schedule.state_dict(), "last_epoch": 25})
    losses += train(model, optimizer)
    torch.utils.swap_tensors(model.head.bias, nn.Parameter(torch.zeros(4)))
for x in batches(8):
    optimizer.zero_grad()
    out = model(x)
    loss, other = out.square().mean(), out[:, 0].mean()
    loss.backward(retain_graph=True)
    ((loss + other) / 3).backward()
    optimizer.step()
    norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.5))
    norms += [nn.utils.clip_grad_norm_([], 0.5), nn.utils.clip_grad_value_(model.parameters(), 0.1)]
    schedule.step()
    losses.append(loss.detach())
try:
    nn.utils.clip_grad_norm_([torch.full((2,), float("nan"))], 0.5, error_if_nonfinite=True)
    p = nn.Parameter(torch.zeros(2))
    p.grad = torch.full((2,), float("nan"))
    nn.utils.clip_grad_norm_([p], 0.5, error_if_nonfinite=True)
except RuntimeError as error:
    said.append(str(error))
print(*said, answered, listed, norms, sep="\n")
report([model], [optimizer], losses)
