"""tracemalloc, faulthandler and logging as the script set them up.

run: alone
"""

import faulthandler
import logging
import sys
import tracemalloc

import torch
from _report import report, start, train
from torch import nn

faulthandler.enable()
before = [logging.getLogger(name).level for name in (None, "torch", "asyncio")], list(logging.root.handlers)
start()
model = nn.Linear(16, 4)
optimizer = torch.optim.SGD(model.parameters(), 1e-2)
tracemalloc.start(5)
losses = train(model, optimizer)
logging.warning("before the configuration")
logging.basicConfig(level=logging.DEBUG, format="%(name)s %(message)s", stream=sys.stdout, force=True)
losses += train(model, optimizer)
logging.getLogger("mine").debug("a debug line")
after = [logging.getLogger(name).level for name in ("torch", "asyncio")]
state = tracemalloc.is_tracing(), tracemalloc.get_traceback_limit(), faulthandler.is_enabled()
report([model], [optimizer], losses, state=state, before=before, after=after)
