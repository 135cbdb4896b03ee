"""Functions of torch.distributed imported before, wrapped, pickled, inspected, refused, async.

ranks: 2
parts: all
"""

import functools
import inspect
import pickle
import traceback
import warnings

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from _report import batches, ddp, finish, report, start, train
from torch import nn
from torch.distributed import all_reduce, broadcast, distributed_c10d, irecv, isend

NAMES = ("all_reduce", "all_gather_object", "barrier", "broadcast", "gather", "irecv", "isend", "new_group", "recv")
called = []


def counted(function):
    """Count calls, as a profiler of the user's does."""

    @functools.wraps(function)
    def inner(*args, **kwargs):
        called.append(function.__name__)
        return function(*args, **kwargs)

    return inner


class Group(dist.ProcessGroup):
    """A group of the user's own, of this rank alone."""

    def __init__(self):
        super().__init__(0, 1)

    def allreduce(self, tensors, opts=None):
        called.append("own")

    def getBackendName(self):
        return "own"


def refused(call):
    """Return what a wrong call says, and through which functions it went."""
    try:
        call()
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        return [type(error).__name__, str(error)[:80], [(frame.name, frame.lineno, frame.line) for frame in frames]]
    return None


start()
dist.all_reduce = counted(dist.all_reduce)  # before the ranks have met
model = ddp(nn.Linear(16, 4))
rank = dist.get_rank()
optimizer = torch.optim.SGD(model.parameters(), 0.1)
losses = train(model, optimizer)
dist.all_gather = counted(dist.all_gather)
values = []
for x in batches(3):
    tensor = x[0].clone()
    all_reduce(tensor)
    dist.all_reduce(tensor)
    work = all_reduce(tensor, async_op=True)
    values.append(type(work).__name__)
    work.wait()
    broadcast(tensor, src=1)
    (isend if rank == 0 else irecv)(tensor, 1 - rank).wait()
    for one in dist.batch_isend_irecv([dist.P2POp(isend, tensor, 1 - rank), dist.P2POp(irecv, x[0], 1 - rank)]):
        one.wait()
    parts = [torch.zeros_like(tensor) for _ in range(2)]
    dist.all_gather(parts, tensor)
    objects = [None, None]
    dist.all_gather_object(objects, {"rank": rank})
    told = [objects]
    dist.broadcast_object_list(told, 0)
    values += [tensor, parts, told, functional.all_reduce(tensor, "sum", dist.group.WORLD).wait()]


@torch.compile(backend="eager")
def compiled(tensor):
    """Reduce inside of a graph."""
    dist.all_reduce(tensor)
    return tensor * 2


values += [compiled(torch.ones(3)), compiled(torch.ones(3))]
frames = torch._dynamo.utils.counters["frames"]
own = Group()
own._set_group_name("own")
mine = torch.ones(2)
all_reduce(mine, group=own)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    dist.all_gather_into_tensor(torch.empty(4), torch.ones(2))
    outside = dist.new_group([0])
    if rank == 1:
        dist.all_reduce(torch.ones(1), group=outside)
same = {
    name: [
        getattr(distributed_c10d, name) is getattr(dist, name),
        pickle.loads(pickle.dumps(getattr(distributed_c10d, name))) is getattr(distributed_c10d, name),
        str(inspect.signature(getattr(dist, name))),
        inspect.unwrap(getattr(distributed_c10d, name)).__code__.co_varnames,
        inspect.unwrap(getattr(distributed_c10d, name)).__code__.co_firstlineno,
        len(inspect.getsource(getattr(dist, name))),
    ]
    for name in NAMES
    if name != "all_reduce"
}
report(
    [model],
    [optimizer],
    losses,
    values=[str(value) for value in values],
    called=called,
    same=same,
    imported=[all_reduce is distributed_c10d.all_reduce, isend is dist.isend],
    frames=sorted(frames.items()),
    caught=[(str(one.message)[:60], one.filename.rpartition("/")[2], one.lineno) for one in caught],
    refused=[
        refused(lambda: all_reduce("text")),
        refused(lambda: broadcast(torch.ones(1))),
        refused(lambda: isend([1], dst=1 - rank)),
        refused(lambda: dist.all_reduce(torch.ones(1), no_such=1)),
    ],
)
del model
finish()
