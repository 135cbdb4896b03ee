"""dictConfig that disables loggers, root handlers, factories, levels, shutdown.

slow: yes
"""

import logging
import logging.config
import time
import warnings

import torch
from _report import batches, report, start, train
from torch import nn

start()
model = nn.Linear(16, 4)
optimizer = torch.optim.SGD(model.parameters(), 0.01)
losses = train(model, optimizer, batches(20))
seen = []


class H(logging.Handler):
    def emit(s, r):
        seen.append((r.name, r.levelname, r.getMessage()[:60], r.threadName, r.funcName))


logging.config.dictConfig(
    {"version": 1, "disable_existing_loggers": True, "root": {"level": "DEBUG", "handlers": []}}
)
logging.getLogger().addHandler(H())
logging.captureWarnings(True)
old = logging.getLogRecordFactory()
n = [0]


def fac(*a, **k):
    n[0] += 1
    return old(*a, **k)


logging.setLogRecordFactory(fac)


class N(nn.Module):
    def __init__(s):
        super().__init__()
        s.l = nn.Linear(16, 4)

    def forward(s, x):
        logging.info("in")
        warnings.warn("w")
        return s.l(x)


k = N()
p = torch.optim.SGD(k.parameters(), 0.01)
losses += train(k, p, batches(30))
x = torch.zeros(8, 16)
x[0, 0] = float("nan")
k(x).sum().backward()
p.zero_grad()
losses += train(k, p, batches(30))
time.sleep(1.1)
losses += train(k, p, batches(3))
logging.shutdown()
losses += train(k, p, batches(3))
names = sorted(x for x in logging.root.manager.loggerDict if not x.startswith(("torch", "ddpdebug")))
report(
    [model, k],
    [optimizer, p],
    losses,
    seen=seen,
    n=n,
    names=names,
    ours=[x for x in logging.root.manager.loggerDict if "ddpdebug" in x],
    h=len(logging._handlerList),
)
