"""python -bb -I, without columns in tracebacks, short integers, bytes warnings as errors.

run: alone
python: -bb -I -X no_debug_ranges -X int_max_str_digits=640 -X warn_default_encoding -W error::BytesWarning -W error::EncodingWarning:__main__
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import torch
from _report import batches, report, start
from torch import nn

start()
model = nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 4))
optimizer = torch.optim.SGD(model.parameters(), 0.01)
losses = []
for number, x in enumerate(batches(12)):
    if number == 6:
        x[0, 0] = float("nan")
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    for p in model.parameters():
        p.grad.nan_to_num_(0)
    optimizer.step()
    losses.append(loss.detach())
report([model], [optimizer], losses, flags=sys.flags)
