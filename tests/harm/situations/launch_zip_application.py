"""A zip application with modules of its own.

run: alone
under: export PYTHONDONTWRITEBYTECODE=1; for last; do :; done; cp "$last" __main__.py; cp "$(dirname "$last")/_report.py" .; "$1" -m zipfile -c app.pyz __main__.py _report.py; rm *.py; exec "${@:1:$#-1}" app.pyz
"""

import sys

import torch
from _report import report, start, train
from torch import nn

start()
print(sys.argv, sys.path[0].rpartition("/")[2], __file__.rpartition("/")[2], __spec__.name, type(__loader__).__name__, __package__)
model = nn.Linear(16, 4)
optimizer = torch.optim.SGD(model.parameters(), 1e-2)
losses = train(model, optimizer)
report([model], [optimizer], losses)
