"""Settings possible only before first use, made after some steps: threads, start method, logging."""

import logging
import multiprocessing
import sys

import torch
from _report import batches, report, start, train
from torch import nn

start()
model = nn.Linear(16, 4)
optimizer = torch.optim.SGD(model.parameters(), 0.01)
losses = train(model, optimizer)
torch.set_num_interop_threads(1)
multiprocessing.set_start_method("spawn")
torch.multiprocessing.set_sharing_strategy("file_system")
logging.basicConfig(stream=sys.stdout, level=logging.DEBUG, format="%(name)s %(message)s")
logging.getLogger("mine").debug("one")
sys.setswitchinterval(0.0001)
losses += train(model, optimizer, batches(40))
handlers = [type(handler).__name__ for handler in logging.getLogger().handlers]
logging.shutdown()
found = torch.get_num_interop_threads(), multiprocessing.get_start_method(), handlers, sys.getswitchinterval()
report([model], [optimizer], losses, found=found)
