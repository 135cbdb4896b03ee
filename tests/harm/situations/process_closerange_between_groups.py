"""Between two groups all descriptors from 3 on are closed, twice.

ranks: 2
"""

import os
import time

from _report import batches, ddp, finish, report, start, train
from torch import nn, optim

start()
rank, losses, texts = os.environ["RANK"], [], []
for number in range(3):
    model = ddp(nn.Linear(16, 4))
    optimizer = optim.SGD(model.parameters(), 0.1)
    losses += train(model, optimizer, batches(20))
    inner = model.module
    del model  # it holds the group
    finish()
    os.closerange(3, 200)
    files = [open(f"mine{number}-{i}-{rank}.log", "w") for i in range(12)]
    losses += train(inner, optimizer, batches(5))
    time.sleep(1.5)  # a look of every thread of ours
    for i, file in enumerate(files):
        file.write(f"line {i}\n")
        file.close()
    texts += [open(f"mine{number}-{i}-{rank}.log", "rb").read() for i in range(12)]
    open(f"ended-{number}-{rank}", "w").close()
    while not os.path.exists(f"ended-{number}-{1 - int(rank)}"):  # the store of rank 0 is about to go
        time.sleep(0.01)
report([inner], [optimizer], losses, texts=texts)
