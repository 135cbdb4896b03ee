"""Depth of the stack in forwards, hooks, losses, loaders, closures."""

import logging
import sys
import warnings

import torch
from _report import batches, report, start
from torch import nn
from torch.utils.data import DataLoader, Dataset, Sampler

seen = {}
logging.basicConfig(format="%(funcName)s %(filename)s:%(lineno)d %(message)s", stream=sys.stdout)


def note(where):
    frames, frame = [], sys._getframe(1)
    while frame is not None and frame.f_code.co_name != "<module>":
        frames.append((frame.f_code.co_name, frame.f_code.co_filename.rpartition("/")[2], frame.f_lineno))
        frame = frame.f_back
    seen.setdefault(where, [])
    if frames not in seen[where]:
        seen[where].append(frames)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(16, 4)
        self.loss = nn.MSELoss()

    def forward(self, x):
        note("forward")
        return self.layer(x)


class Leaf(nn.Module):
    def forward(self, x):
        note("leaf")
        if len(x) == 7:
            logging.warning("who calls", stacklevel=4)
            warnings.warn("who calls", stacklevel=4)
        return x


class Numbers(Dataset):
    def __len__(self):
        return 24

    def __getitem__(self, index):
        note("dataset")
        return torch.full((16,), index / 24)


class InOrder(Sampler):
    def __iter__(self):
        for index in range(24):
            note("sampler")
            yield index


def collate(items):
    note("collate")
    return torch.stack(items)


start()
warnings.simplefilter("always")
warnings.showwarning = lambda text, kind, file, line, *_: print("warning", text, file.rpartition("/")[2], line)
model = nn.Sequential(Net(), Leaf(), nn.Linear(4, 4))
model.register_forward_hook(lambda *_: note("hook"))
optimizer = torch.optim.SGD(model.parameters(), 0.05)
schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: note("schedule") or 0.9**step)
losses = []


def closure():
    note("closure")
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.register_hook(lambda _: note("gradient"))
    loss.backward()
    losses.append(loss.detach())
    return loss


for _ in range(3):
    for x in DataLoader(Numbers(), 8, sampler=InOrder(), collate_fn=collate):
        optimizer.step(closure)
    schedule.step()
    model.eval()
    with torch.no_grad():
        model(x[:7])
    model.train()
    model.load_state_dict(model.state_dict())
for x in batches(count=2):
    optimizer.step(closure)
report([model], [optimizer], losses)
for where, frames in seen.items():
    print(where, *frames, sep="\n  ")
