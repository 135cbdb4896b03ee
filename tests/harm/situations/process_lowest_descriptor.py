"""Numbers of files opened before, while and after training.

run: alone
"""

import os

before = os.open(os.devnull, os.O_RDONLY)

import torch  # noqa: E402
from _report import batches, report, start, train  # noqa: E402
from torch import nn  # noqa: E402


def lowest():
    """Return the numbers that the next files get."""
    files = [os.open(os.devnull, os.O_RDONLY) for _ in range(20)]
    for number in files:
        os.close(number)
    return files


start()
numbers = [[before], lowest()]
model = nn.Linear(16, 4)
optimizer = torch.optim.SGD(model.parameters(), 0.01)
losses = []
for _ in range(6):
    losses += train(model, optimizer, batches(15))
    numbers.append(lowest())
kept = open("mine.log", "w")
losses += train(model, optimizer, batches(15))
numbers.append(lowest())
kept.close()
report([model], [optimizer], losses, numbers=numbers)
