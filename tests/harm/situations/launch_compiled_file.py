"""A compiled file of an odd name is run.

run: alone
under: export PYTHONDONTWRITEBYTECODE=1; for last; do :; done; cp "$(dirname "$last")/_report.py" .; "$1" -c 'import py_compile, sys; py_compile.compile(sys.argv[1], "größe von.pyc", "a name", True)' "$last"; exec "${@:1:$#-1}" "größe von.pyc"
"""

import sys

import torch
from _report import report, start, train
from torch import nn

start()
model = nn.Linear(16, 4)
optimizer = torch.optim.SGD(model.parameters(), 0.01)
losses = train(model, optimizer)
report([model], [optimizer], losses, words=sys.argv, spec=__spec__ is None)
