"""An audit hook refuses sockets, processes, forks, writing files and ctypes."""

import sys

import torch
from _report import batches, report, start, train
from torch import nn

strict, refused = False, []


def hook(event, args):
    if not strict:
        return
    if event in {"socket.connect", "socket.bind", "subprocess.Popen", "os.fork", "os.posix_spawn", "os.kill", "os.remove"}:
        raise PermissionError(event)
    if event == "open" and isinstance(args[1], str) and set(args[1]) & set("wax+"):
        raise PermissionError(f"{event} {args[1]}")
    if event.startswith(("ctypes", "os.mkdir", "os.rename")):
        raise PermissionError(event)


start()
sys.addaudithook(hook)
model = nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 4))
optimizer = torch.optim.SGD(model.parameters(), 0.01)
losses = train(model, optimizer)
strict = True
data = list(batches(60))
data[40][0, 0] = float("nan")
for x in data:
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    for p in model.parameters():
        p.grad.nan_to_num_(0)
    optimizer.step()
    losses.append(loss.detach())
try:
    open("mine.txt", "w")
except PermissionError as error:
    print("refused", error)
strict = False
report([model], [optimizer], losses)
