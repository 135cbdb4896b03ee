"""sys.stderr is a file of the script's, or a class that writes to two places, from before torch comes.

run: alone
"""

import sys


class Both:
    def __init__(self, first, second):
        self.first, self.second, self.calls = first, second, 0

    def write(self, text):
        self.calls += 1
        self.first.write(text)
        self.second.write(text)

    def flush(self):
        self.first.flush()
        self.second.flush()


plain = sys.stderr
log = open("errors.log", "w")
sys.stderr = log

import torch  # noqa: E402
from _report import report, start, train  # noqa: E402
from torch import nn  # noqa: E402

start()
model = nn.Linear(16, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
losses = train(model, optimizer)
data = [torch.full((8, 16), value) for value in (1.0, 2.0, float("nan"), 2.0)]
losses += train(model, optimizer, data)
print("of the script", file=sys.stderr)
sys.stderr = Both(plain, log)
losses += train(model, optimizer)
print("of both", file=sys.stderr)
log.flush()
report([model], [optimizer], losses, calls=sys.stderr.calls, text=open("errors.log").read())
