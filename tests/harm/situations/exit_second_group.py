"""The group is destroyed and made again twice on the same port.

ranks: 2
"""

import os
import time

import torch
from _report import ddp, finish, report, start, train
from torch import nn

start()
losses = []
for number in range(3):
    model = ddp(nn.Linear(16, 4))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    losses += train(model, optimizer)
    inner = model.module
    del model
    finish()
    if os.environ["RANK"] == "0":
        open(f"ended-{number}", "w").close()
    while not os.path.exists(f"ended-{number}"):  # another rank would find the store that is about to go
        time.sleep(0.01)
report([inner], [optimizer], losses)
