"""A subprocess while training: its environment, arguments and descriptors.

ranks: 1
"""

import os
import subprocess
import sys

import torch
from _report import ddp, report, start, train
from torch import nn

start()
before = set(os.environ)
model = ddp(nn.Linear(16, 4))
optimizer = torch.optim.SGD(model.parameters(), 1e-2)
losses = train(model, optimizer)
source = "import os, sys; print(sorted(k for k in os.environ if 'DEBUG' in k), len(os.listdir('/proc/self/fd')), sys.argv)"
done = subprocess.run([sys.executable, "-S", "-c", source, "a"], capture_output=True, text=True)
shell = os.popen("echo hello; exit 3")
text = shell.read(), shell.close()
report([model], [optimizer], losses, child=done.stdout.strip(), shell=text, fresh=sorted(set(os.environ) - before))
