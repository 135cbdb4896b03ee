"""Random numbers on a terminal, where findings are coloured.

run: alone
under: python3 -c "import pty, sys; sys.exit(pty.spawn(sys.argv[1:]) >> 8)" "$@" > /dev/null; code=$?; cat drawn.txt; rm drawn.txt; exit $code
"""

import random
import sys
import time

import numpy as np
import torch
from _report import start
from torch import nn

start()
model = nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for number in range(40):
    x = torch.randn(2, 4)
    if number == 10:
        x[0, 0] = float("nan")
    optimizer.zero_grad()
    model(x).sum().backward()
    optimizer.step()
    time.sleep(0.02)
with open("drawn.txt", "w") as file:
    print(sys.stderr.isatty(), random.random(), np.random.random(), torch.rand(()).item(), file=file)
