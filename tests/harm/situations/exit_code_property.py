"""SystemExit whose code is a property that counts."""



import torch
from _report import report, start, train
from torch import nn


class Leaves(SystemExit):
    @property
    def code(self):
        print("asked")
        return 5


start()
model = nn.Linear(16, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
report([model], [optimizer], train(model, optimizer))

raise Leaves
