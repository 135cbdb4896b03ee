"""A NaN batch while a thread runs a model under global hooks.

ranks: 2
"""

import collections
import threading

import torch
from _report import batches, ddp, report, start, train
from torch import nn

calls = collections.Counter()
other = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
bad, done = threading.Event(), threading.Event()


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(16, 16) for _ in range(40)])
        self.norm, self.last = nn.BatchNorm1d(16), nn.Linear(16, 4)

    def forward(self, x):
        if not x.isfinite().all():
            bad.set()
        for layer in self.layers:
            x = layer(x).relu()
        return self.last(self.norm(x))


def beside():
    x = torch.ones(2, 4)
    while not done.is_set():
        with torch.no_grad():
            other(x)
        calls["thread"] += 1


start()
other[0].register_forward_hook(lambda module, *_: calls.update(["own"]))
model = ddp(Model())
optimizer = torch.optim.SGD(model.parameters(), 0.01)


def seen(module, args, output):
    if module is other:
        calls["global, of the thread"] += 1
    elif module is model.module:  # a key of its own for each thread: adding to a counter's entry is not atomic
        calls["global, of the model"] += 1


nn.modules.module.register_module_forward_hook(seen)
thread = threading.Thread(target=beside)
thread.start()
data = [x / 0 * 0 if number == 4 else x for number, x in enumerate(batches(7))]
losses = train(model, optimizer, data)
done.set()
thread.join()
kept = calls["thread"] == calls["own"] == calls["global, of the thread"]
report([model], [optimizer], losses, kept=kept, model=calls["global, of the model"], bad=bad.is_set())
