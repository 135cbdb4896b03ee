"""All descriptors from 3 on are closed while training."""

import os
import time

import torch
from _report import batches, report, start, train
from torch import nn

start()
model = nn.Linear(16, 4)
optimizer = torch.optim.SGD(model.parameters(), 1e-2)
losses = train(model, optimizer, batches(30))
os.closerange(3, 200)
files = [open(f"mine{i}.log", "w") for i in range(12)]
losses += train(model, optimizer, batches(90))
time.sleep(2.5)  # a look of every thread of ours
for i, file in enumerate(files):
    file.write(f"line {i}\n")
    file.close()
more = [os.open(f"more{i}.log", os.O_CREAT | os.O_WRONLY) for i in range(12)]
losses += train(model, optimizer, batches(10))
time.sleep(1.5)
written = [os.write(number, b"last\n") for number in more]
texts = [open(f"mine{i}.log", "rb").read() for i in range(12)]
report([model], [optimizer], losses, texts=texts, written=written)
