"""sys.exit("text"): exit code 1, the text on stderr.

run: alone
"""

import sys

import torch
from _report import report, start, train
from torch import nn

start()
model = nn.Linear(16, 4)
optimizer = torch.optim.Adam(model.parameters(), 1e-3)
losses = train(model, optimizer)
report([model], [optimizer], losses)
sys.exit("the data ran out")
