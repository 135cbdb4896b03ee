"""A timer and signals of `faulthandler`, a fork, a waiting rank.

ranks: 2
slow: yes
"""

import faulthandler
import os
import signal
import sys
import time

import torch
from _report import batches, ddp, finish, report, start, train
from torch import nn

start()
model = ddp(nn.Linear(16, 4))
optimizer = torch.optim.Adam(model.parameters(), 1e-3)
losses = train(model, optimizer)
name = f"stacks-{os.environ['RANK']}.txt"
file = open(name, "w")
faulthandler.enable(file)
faulthandler.register(signal.SIGUSR1, file, all_threads=False)
faulthandler.dump_traceback_later(2.0, file=file.fileno())
sys.stdout.flush()
child = os.fork()
if child == 0:
    os._exit(5)
print("child", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
if os.environ["RANK"] == "1":
    time.sleep(6.0)
os.kill(os.getpid(), signal.SIGUSR1)
losses += train(model, optimizer, batches(seed=7))
time.sleep(2.5)
text = open(name).read()
print("timer", text.count("Timeout ("), "signal", text.count("Current thread"), "enabled", faulthandler.is_enabled())
faulthandler.disable()
faulthandler.unregister(signal.SIGUSR1)
os.unlink(name)
report([model], [optimizer], losses)
del model
finish()
