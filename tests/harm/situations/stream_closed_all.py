"""stdin, stdout and stderr are closed before Python starts.

run: alone
under: "$@" <&- >&- 2>&-; code=$?; cat result.txt; exit $code
"""

import sys

import torch
from _report import report, start, train
from torch import nn

start()
model = nn.Linear(16, 4)
optimizer = torch.optim.SGD(model.parameters(), 1e-2)
losses = train(model, optimizer)
streams = [sys.stdin, sys.stdout, sys.stderr]
sys.stdout = open("result.txt", "w")
report([model], [optimizer], losses, streams=streams)
sys.stdout.close()
