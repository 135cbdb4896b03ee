"""Filters and registries of warnings; catch_warnings around steps.

slow: yes
"""

import os
import sys
import warnings

import torch
from _report import batches, report, start, train
from torch import nn

start()
model = nn.Linear(16, 4)
optimizer = torch.optim.SGD(model.parameters(), 0.01)
f = [str(x) for x in warnings.filters]
seen = []


class N(nn.Module):
    def __init__(s):
        super().__init__()
        s.l = nn.Linear(16, 4)

    def forward(s, x):
        warnings.warn("mine", stacklevel=2)
        warnings.warn("once", UserWarning)
        return s.l(x)


k = N()
p = torch.optim.SGD(k.parameters(), 0.01)
losses = []
for how in ("default", "once", "module", "always", "ignore"):
    with warnings.catch_warnings(record=True) as w:
        warnings.simplefilter(how)
        losses += train(k, p, batches(12))
        nn.functional.softmax(torch.zeros(2))
        torch.tensor(torch.zeros(2))
    seen.append([(str(x.message)[:30], os.path.basename(x.filename), x.lineno) for x in w])
regs = {
    n: len(v.__dict__.get("__warningregistry__", ()))
    for n, v in list(sys.modules.items())
    if n.startswith(("torch", "__main__")) and hasattr(v, "__dict__") and "__warningregistry__" in v.__dict__
}
report(
    [k],
    [p],
    losses,
    seen=seen,
    same=f == [str(x) for x in warnings.filters],
    regs=regs,
    once=len(warnings.onceregistry),
)
