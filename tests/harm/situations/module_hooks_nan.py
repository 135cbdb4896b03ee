"""Hooks that count calls; addresses and version counters of tensors; a NaN batch.

ranks: 2
"""

import collections

import torch
from _report import batches, ddp, report, start, train
from torch import nn

calls = collections.Counter()


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.norm, self.lstm = nn.Linear(16, 8), nn.BatchNorm1d(8), nn.LSTM(8, 4)
        self.table = nn.Embedding(4, 8, max_norm=0.5)
        self.register_buffer("scale", torch.ones(8))

    def forward(self, x):
        self.scale.mul_(0.9)
        x.clamp_(-10, 10)
        return self.lstm(self.norm(self.linear(x)) * self.scale + self.table(torch.tensor([1, 2] * 4)))[0]


start()
model = ddp(Model())
inner = model.module
inner.linear.register_forward_pre_hook(lambda *_: calls.update(["before"]))
inner.linear.register_forward_hook(lambda *_: calls.update(["after"]))
inner.norm.register_full_backward_hook(lambda *_: calls.update(["backward"]))
inner.linear.weight.register_hook(lambda g: calls.update(["gradient"]))
inner.forward = inner.forward  # a bound method among the attributes, as wrappers leave it
nn.modules.module.register_module_forward_pre_hook(lambda *_: calls.update(["all before"]))
nn.modules.module.register_module_forward_hook(lambda *_: calls.update(["all after"]))
optimizer = torch.optim.SGD(model.parameters(), 0.01)
tensors = [*inner.parameters(), *inner.buffers()]
places = [t.data_ptr() for t in tensors]
data = [x / 0 * 0 if number == 4 else x for number, x in enumerate(batches(7))]
losses = train(model, optimizer, data)
counters = [t._version for t in [*tensors, *data, *(p.grad for p in inner.parameters())]]
report([model], [optimizer], losses, calls=sorted(calls.items()), counters=counters)
print("in place", places == [t.data_ptr() for t in tensors], [id(t) for t in tensors] == [id(t) for t in [*inner.parameters(), *inner.buffers()]])
