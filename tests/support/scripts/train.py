"""A small job; its one argument names what goes wrong."""
import os
import signal
import sys
import time

import torch
from torch import nn, distributed as dist
from torch.nn.parallel import DistributedDataParallel

mode, steps = sys.argv[1], int(sys.argv[2])
torch.manual_seed(0)
if "RANK" in os.environ:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = DistributedDataParallel(nn.Linear(4, 2))
else:
    rank, model = 0, nn.Linear(4, 2)
data = torch.Generator().manual_seed(10 + rank)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)


def say(*words):
    os.write(1, (" ".join(map(str, words)) + "\n").encode())  # one write: lines of two ranks do not mix


say("argv", sys.argv)
say("variables", *sorted(name for name in os.environ if name.startswith("DDPDEBUG_")))
try:
    for step in range(steps):
        if step == 3 and rank == 1:
            if mode == "lr":
                optimizer.param_groups[0]["lr"] = 0.2
            elif mode == "raise":
                raise ValueError("bad batch")
            elif mode == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            elif mode == "hang":
                time.sleep(600)
            elif mode == "exit":
                sys.exit(7)
        optimizer.zero_grad()
        model(torch.randn(8, 4, generator=data)).pow(2).mean().backward()
        optimizer.step()
finally:
    say("finally", rank)
if mode == "os._exit":
    os._exit(0)
say("RESULT", rank, sum(p.double().sum().item() for p in model.parameters()))
time.sleep(0.3)
if dist.is_initialized():
    dist.destroy_process_group()
