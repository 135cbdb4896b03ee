"""The script's hooks: forward, pre-forward with keywords, full backward, tensor, global."""

import collections

import torch
from _report import batches, ddp, report, start
from torch import nn

calls = collections.Counter()


def count(name, result=None):
    def hook(*args, **kwargs):
        calls[name] += 1
        return result

    return hook


start()
inner = nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 4))
inner[0].register_forward_pre_hook(count("pre with keywords"), with_kwargs=True)
inner[0].register_forward_hook(lambda module, args, out: calls.update(["forward"]) or out * 2)
inner[2].register_full_backward_hook(count("backward"))
inner[2].register_full_backward_pre_hook(count("backward pre"))
inner[2].weight.register_hook(lambda g: calls.update(["tensor"]) or g * 0.5)
inner[2].weight.register_post_accumulate_grad_hook(count("accumulated"))
nn.modules.module.register_module_forward_pre_hook(count("global pre"))
nn.modules.module.register_module_forward_hook(count("global"))
nn.modules.module.register_module_parameter_registration_hook(count("registered"))
model = ddp(inner)
optimizer = torch.optim.Adam(model.parameters())
optimizer.register_step_pre_hook(count("step pre"))
optimizer.register_step_post_hook(count("step post"))
losses = []
for x in batches():
    out = model(x)
    out.register_hook(count("output"))
    loss = out.square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.detach())
order = list(inner[0]._forward_hooks), list(inner[0]._forward_pre_hooks)
report([model], [optimizer], losses, calls=sorted(calls.items()), order=[len(o) for o in order])
