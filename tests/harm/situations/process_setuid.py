"""The script gives up root in the middle of training, writes on as another user, and a NaN comes.

needs: root
"""

import os

import torch
from _report import report, start, train
from torch import nn

start()
model = nn.Linear(16, 4)
optimizer = torch.optim.SGD(model.parameters(), 0.01)
losses = train(model, optimizer)
os.chmod(".", 0o777)
os.setgid(65534)
os.setuid(65534)
data = [torch.full((8, 16), value) for value in (1.0, 2.0, float("nan"), 2.0)]
losses += train(model, optimizer, data)
with open("own.txt", "w") as own:
    own.write("mine")
child = os.fork()
if not child:
    os._exit(3)
report([model], [optimizer], losses, child=os.waitpid(child, 0)[1], owner=os.stat("own.txt").st_uid, uid=os.getuid())
