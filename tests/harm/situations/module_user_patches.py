"""The script patches torch while training: backward, step, Module.__call__; and undoes it."""

import torch
from _report import batches, ddp, report, start, train
from torch import nn

calls = {"backward": 0, "call": 0, "step": 0, "clip": 0}


def counted(name, original):
    def run(*args, **kwargs):
        calls[name] += 1
        return original(*args, **kwargs)

    return run


start()
model = ddp(nn.Sequential(nn.Linear(16, 8), nn.Linear(8, 4)))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
losses = train(model, optimizer)
kept = torch.autograd.backward, nn.Module.__call__, torch.optim.SGD.step, nn.utils.clip_grad_norm_
torch.autograd.backward = counted("backward", kept[0])
nn.Module.__call__ = counted("call", kept[1])
torch.optim.SGD.step = counted("step", kept[2])
nn.utils.clip_grad_norm_ = counted("clip", kept[3])
for x in batches():
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    losses.append(loss.detach())
torch.autograd.backward, nn.Module.__call__, torch.optim.SGD.step, nn.utils.clip_grad_norm_ = kept
losses += train(model, optimizer)
report([model], [optimizer], losses, calls=calls)
