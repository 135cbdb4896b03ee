"""Subclasses of Module, DDP and GradScaler count what is asked of their properties and methods; two ranks

parts: all
ranks: 2
"""
import torch
import torch.distributed as dist
from _report import report, start
from torch import nn
from torch.nn.parallel import DistributedDataParallel

start()
dist.init_process_group("gloo")
asked = {}


def counted(name):
    kept = f"kept_{name}"

    def read(self):
        asked[name] = asked.get(name, 0) + 1
        return self.__dict__[kept]

    def write(self, value):
        self.__dict__[kept] = value

    return property(read, write)


class Part(nn.Linear):
    training = counted("training")


class Wrapper(DistributedDataParallel):
    require_backward_grad_sync = counted("require_backward_grad_sync")
    static_graph = counted("static_graph")
    gradient_as_bucket_view = counted("gradient_as_bucket_view")


class Scaler(torch.amp.GradScaler):
    def is_enabled(self):
        asked["is_enabled"] = asked.get("is_enabled", 0) + 1
        return super().is_enabled()


torch.manual_seed(0)
model = Wrapper(nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.1), Part(8, 2)))
optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.05), Scaler("cpu", init_scale=16.0)
losses = []
for step in range(12):
    loss = model(torch.randn(3, 4)).square().mean()
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    losses.append(loss)
report([model], [optimizer], losses, asked=asked)
dist.destroy_process_group()
