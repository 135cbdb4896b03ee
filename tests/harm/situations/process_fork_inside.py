"""Children forked inside forwards, hooks, losses and steps end by os._exit.

slow: yes
"""

import os

import torch
from _report import batches, report, start
from torch import nn

statuses = []


def fork(code):
    child = os.fork()
    if child == 0:
        os._exit(code)
    statuses.append(os.waitstatus_to_exitcode(os.wait()[1]))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(16, 4)

    def forward(self, x):
        fork(11)
        return self.layer(x)


class Own(torch.optim.SGD):
    def step(self, closure=None):
        fork(12)
        return super().step(closure)


class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        fork(13)
        return torch.full((16,), float(index))


def children():
    return open(f"/proc/self/task/{os.getpid()}/children").read().split()


start()
model = Net()
model.layer.register_forward_hook(lambda *args: fork(14))
model.register_full_backward_hook(lambda *args: fork(15))
optimizer = Own(model.parameters(), 0.001)
losses, seen = [], set()
for _ in range(3):
    for x in torch.utils.data.DataLoader(Data(), 4):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
        seen.add(len(children()))
try:
    os.wait()
except ChildProcessError:
    statuses.append("no child")
report([model], [optimizer], losses, statuses=statuses, children=sorted(seen))
