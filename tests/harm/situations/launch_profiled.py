"""Under `-m cProfile`, with options of its own before the script's.

run: alone
under: exec "${@:1:$#-1}" -m cProfile -o /dev/null "${@: -1}" one --two
"""

import sys

import torch
from _report import report, start, train
from torch import nn

start()
model = nn.Linear(16, 4)
optimizer = torch.optim.SGD(model.parameters(), 0.01)
losses = train(model, optimizer)
report([model], [optimizer], losses, words=sys.argv[1:], name=__name__, profiled=sys.getprofile() is not None)
sys.exit(6)
