"""After the group all descriptors from 3 on are closed; training goes on; two ranks.

ranks: 2
"""

import os
import time

from _report import batches, ddp, finish, report, start, train
from torch import nn, optim

start()
rank = os.environ["RANK"]
model = ddp(nn.Linear(16, 4))
optimizer = optim.SGD(model.parameters(), 1e-2)
losses = train(model, optimizer, batches(30))
inner = model.module
del model  # it holds the group
finish()
os.closerange(3, 200)
files = [open(f"mine{i}-{rank}.log", "w") for i in range(12)]
time.sleep(2.5)  # a look of every thread of ours
losses += train(inner, optimizer, batches(10))
for i, file in enumerate(files):
    file.write(f"line {i}\n")
    file.close()
texts = [open(f"mine{i}-{rank}.log", "rb").read() for i in range(12)]
report([inner], [optimizer], losses, texts=texts)
