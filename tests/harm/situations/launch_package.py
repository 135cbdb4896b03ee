"""`python -m package`: relative imports, pickles by name, argparse.

run: alone
under: for last; do :; done; mkdir own; cp "$(dirname "$last")/_report.py" .; cp "$last" own/__main__.py; echo 'WORD = "a part"' > own/part.py; export PYTHONDONTWRITEBYTECODE=1; exec "${@:1:$#-1}" -m own one
"""

import argparse
import pickle
import sys

import torch
from _report import report, start, train
from torch import nn

from . import part


class Net(nn.Linear):
    pass


start()
model = Net(16, 4)
optimizer = torch.optim.SGD(model.parameters(), 0.01)
losses = train(model, optimizer)
again = pickle.loads(pickle.dumps(model))
found = part.WORD, __package__, __spec__.name, sys.argv[1:], argparse.ArgumentParser().prog
report([model, again], [optimizer], losses, found=found, kind=type(again).__module__)
