"""A ScriptModule and a traced one, alone and inside a module."""

import warnings

import torch
from _report import batches, ddp, report, start, train
from torch import nn

warnings.filterwarnings("ignore", category=DeprecationWarning)
start()
scripted = torch.jit.script(nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 4)))
traced = torch.jit.trace(nn.Linear(16, 4), torch.ones(2, 16))
inside = ddp(nn.Sequential(torch.jit.script(nn.Linear(16, 16)), nn.Linear(16, 4)))
losses, optimizers = [], []
for model in (scripted, traced, inside):
    optimizers.append(torch.optim.Adam(model.parameters()))
    losses += train(model, optimizers[-1], batches(4))
report([], optimizers, losses, weights=[p.sum().item() for m in (scripted, traced, inside) for p in m.parameters()])
