"""Collectives inside modules, losses, optimizers and threads: refused, async, compiled, traced.

ranks: 2
slow: yes
parts: all
"""

import sys
import threading
import traceback

import torch
import torch.distributed as dist
from _report import batches, ddp, digest, finish, report, start
from torch import nn
from torch.distributed import distributed_c10d
from torch.distributed.optim import ZeroRedundancyOptimizer


class Reduced(torch.autograd.Function):
    """The mean over the ranks, in both directions."""

    @staticmethod
    def forward(_, x):
        total = x.clone()
        dist.all_reduce(total)
        return total / 2

    @staticmethod
    def backward(_, grad):
        total = grad.clone()
        dist.all_reduce(total)
        return total / 2


class Net(nn.Module):
    """Has buffers that DDP broadcasts, and normalises over the ranks as `SyncBatchNorm` does on devices."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(16, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)

    def forward(self, x):
        x = self.norm(self.first(x))
        return self.last(x - Reduced.apply(x.mean(0)))


class Odd(torch.Tensor):
    """Raises as torch works with it."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func.__name__ == "is_complex":
            raise LookupError("asked")
        return super().__torch_function__(func, types, args, kwargs or {})


def refused(call):
    """Return what a call raises, what was raised before it, and through which lines it went."""
    try:
        call()
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        places = [(frame.name, frame.lineno, frame.end_lineno, frame.colno, frame.end_colno) for frame in frames]
        return [type(error).__name__, str(error)[:80], repr(error.__context__)[:80], places]
    return None


def in_thread():
    """Reduce in a thread, in a group of its own."""
    tensor = torch.ones(3)
    dist.all_reduce(tensor, group=beside)
    found.append(tensor)


start()
inner = Net()
model = ddp(inner)
rank = dist.get_rank()
beside = dist.new_group([0, 1])
optimizer = ZeroRedundancyOptimizer(inner.parameters(), torch.optim.SGD, lr=0.1)
losses, found, calls = [], [], []
for number, x in enumerate(batches(6)):
    if number % 2:
        thread = threading.Thread(target=in_thread)
        thread.start()
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    total = loss.detach().clone()
    work = dist.all_reduce(total, async_op=True)
    optimizer.step()
    work.wait()
    calls.append(refused(lambda: dist.all_reduce("text")))
    calls.append(refused(lambda: dist.broadcast(torch.ones(1).as_subclass(Odd), src=0)))
    calls.append(refused(lambda: dist.all_gather_into_tensor([torch.ones(2)], torch.ones(3))))
    calls.append(refused(lambda: dist.broadcast_object_list([lambda: 0], src=rank)))
    objects = [None, None]
    dist.all_gather_object(objects, number)
    losses += [total, torch.tensor(float(sum(objects)))]
    if number % 2:
        thread.join()
    dist.barrier()


def graph(x):
    """Communicate in ways that a graph has and in ways that break it."""
    y = x * 2
    dist.all_reduce(y)
    dist.broadcast(y, src=0)
    parts = [torch.empty_like(y), torch.empty_like(y)]
    dist.all_gather(parts, y)
    whole = torch.empty(2 * len(y))
    dist.all_gather_into_tensor(whole, y)
    dist.barrier()
    return whole + parts[0].sum()


compiled = torch.compile(graph, backend="eager")
values = [digest([compiled(torch.full((4,), float(rank))) for _ in range(3)])]
counters = torch._dynamo.utils.counters
lines = []


def tracer(frame, event, arg):
    """Note which of torch's functions run."""
    if frame.f_code.co_filename == distributed_c10d.__file__ and frame.f_code.co_name in {"all_reduce", "broadcast"}:
        lines.append((frame.f_code.co_name, event))
        frame.f_trace_lines = False
        return tracer
    return None


sys.settrace(tracer)
dist.all_reduce(torch.ones(2))
dist.broadcast(torch.ones(2), src=0)
sys.settrace(None)
report(
    [inner],
    [],
    losses,
    found=[str(tensor) for tensor in found],
    calls=calls,
    values=values,
    frames=sorted(counters["frames"].items()),
    breaks=sorted((key.splitlines()[0], count) for key, count in counters["graph_break"].items()),
    stats=sorted((key, count) for key, count in counters["stats"].items()),
    lines=lines,
)
optimizer = None
del model
finish()
