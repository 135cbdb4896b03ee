"""A job that goes wrong as its one argument says."""
import os
import signal
import subprocess
import sys
import time

import torch
from torch import nn, distributed as dist
from torch.nn.parallel import DistributedDataParallel

mode, rank = sys.argv[1], int(os.environ.get("RANK", "0"))
if mode == "crash-early":
    raise RuntimeError("no data")
if mode == "hang-at-init" and rank == 1:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    child = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
    process = subprocess.Popen([sys.executable, "-c", child], start_new_session=True)
    open(sys.argv[2], "w").write(f"{os.getpid()} {process.pid}")
    time.sleep(600)
if mode == "grandchild" and rank == 1:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    open(sys.argv[2], "w").write(str(process.pid))
if "RANK" in os.environ:
    dist.init_process_group("gloo")
torch.manual_seed(0)
model = nn.Linear(4, 2)
if "RANK" in os.environ:
    model = DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = torch.Generator().manual_seed(10 + rank)
for step in range(8):
    if mode == "leaves-early" and rank == 1 and step == 3:
        sys.exit(0)
    if mode == "loud":
        for _ in range(6):
            sys.stdout.write("x" * 1023 * 1024 + "\n" * 1024)
    optimizer.zero_grad()
    model(torch.randn(8, 4, generator=data)).pow(2).mean().backward()
    optimizer.step()
sys.stdout.flush()
if dist.is_initialized():
    dist.barrier()
    dist.destroy_process_group()
