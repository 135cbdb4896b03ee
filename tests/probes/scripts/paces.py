"""Two ranks that train in many manners, one optimizer after another; rank 1 sleeps where its name says so.

Prints the names of the manners in the order of their optimizers.
"""

import gc
import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
RANK = dist.get_rank()
STEPS, SECONDS = 4, 0.06
NAMES = []
torch.manual_seed(0)


def wrapped(module=None, **options):
    return DDP(module or nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)), **options)


def sgd(name, model, **options):
    NAMES.append(name)
    return torch.optim.SGD(model.parameters(), 0.01, **options)


def late(seconds=SECONDS):
    """Be slow, on rank 1."""
    if RANK == 1:
        time.sleep(seconds)


class Sleeps(torch.autograd.Function):
    """Sleeps in backward, on rank 1."""

    @staticmethod
    def forward(_, x):
        return x.clone()

    @staticmethod
    def backward(_, grad):
        late()
        return grad


class Reduces(torch.autograd.Function):
    """Communicates in forward and in backward, as `SyncBatchNorm` does on devices."""

    @staticmethod
    def forward(_, x):
        late()
        total = x.clone()
        dist.all_reduce(total)
        return total / dist.get_world_size()

    @staticmethod
    def backward(_, grad):
        late()
        total = grad.clone()
        dist.all_reduce(total)
        return total / dist.get_world_size()


class Around(nn.Module):
    """Puts a function before or after a model's layers."""

    def __init__(self, before=None, inner=None):
        super().__init__()
        self.first, self.last, self.before = inner or nn.Linear(8, 16), nn.Linear(16, 4), before

    def forward(self, x):
        out = self.first(x).relu()
        return self.last(out if self.before is None else self.before.apply(out))


def step(model, optimizer, count=STEPS, rows=8, before_backward=None):
    for _ in range(count):
        optimizer.zero_grad()
        loss = model(torch.randn(rows, 8)).square().mean()
        if before_backward is not None:
            before_backward()
        loss.backward()
        optimizer.step()


def plain():
    model = wrapped()
    step(model, sgd("plain", model))


def backward():
    model = wrapped(Around(Sleeps))
    step(model, sgd("backward", model))


def hooks():
    """A hook of the user's that sleeps, on the parameter whose gradient comes last."""
    model = wrapped()
    model.module[0].weight.register_hook(lambda grad: late())
    step(model, sgd("hooks", model))


def forward():
    model = wrapped()
    model.module[0].register_forward_pre_hook(lambda *_: late())
    step(model, sgd("forward", model))


def other():
    model = wrapped()
    step(model, sgd("other", model), before_backward=late)


def optimizer():
    class Slow(torch.optim.Optimizer):
        @torch.no_grad()
        def step(self):
            late()
            for p in self.param_groups[0]["params"]:
                p -= 0.01 * p.grad

    model = wrapped()
    NAMES.append("optimizer")
    step(model, Slow(model.parameters(), {}))


def accumulation():
    model = wrapped(Around(Sleeps))
    made = sgd("accumulation", model)
    for _ in range(STEPS):
        made.zero_grad()
        with model.no_sync():
            model(torch.randn(4, 8)).mean().backward()
        model(torch.randn(8, 8)).mean().backward()
        made.step()


def adversarial():
    """Two models, the gradients of one of which come through the other."""
    first, second = wrapped(nn.Linear(8, 8), broadcast_buffers=False), wrapped(Around(Sleeps))
    of_first, of_second = sgd("generator", first), sgd("discriminator", second)
    for _ in range(STEPS):
        of_first.zero_grad()
        second(first(torch.randn(8, 8))).mean().backward()
        of_first.step()
        of_second.zero_grad()
        second(first(torch.randn(8, 8)).detach()).mean().backward()
        of_second.step()


def static_graph():
    model = wrapped(Around(Sleeps), static_graph=True)
    step(model, sgd("static_graph", model))


def unused():
    module = Around(Sleeps)
    module.unused = nn.Linear(3, 3)
    model = wrapped(module, find_unused_parameters=True)
    step(model, sgd("unused", model))


def lbfgs():
    model = wrapped(Around(Sleeps))
    NAMES.append("lbfgs")
    made = torch.optim.LBFGS(model.parameters(), 0.01, max_iter=2)

    def closure():
        made.zero_grad()
        loss = model(torch.ones(8, 8)).square().mean()
        loss.backward()
        return loss

    for _ in range(STEPS):
        made.step(closure)


def scaler():
    """Its second step is skipped."""
    model = wrapped(Around(Sleeps))
    made, scale = sgd("scaler", model), torch.amp.GradScaler("cpu", init_scale=4.0)
    for number in range(STEPS):
        made.zero_grad()
        loss = model(torch.randn(8, 8)).square().mean() * (float("inf") if number == 1 else 1.0)
        scale.scale(loss).backward()
        scale.step(made)
        scale.update()


def cut():
    """The second step raises in backward on both ranks, before anything was reduced."""
    model = wrapped(Around(Sleeps))
    made = sgd("cut", model)
    step(model, made, 1)
    out = model(torch.randn(8, 8))
    out.register_hook(lambda _: 1 / 0)
    try:
        out.mean().backward()
    except ZeroDivisionError:
        print("cut")
    model = wrapped(model.module)
    step(model, made, STEPS - 1)


def buffers():
    """What a rank is late with before its forward the other waits for as buffers are broadcast."""
    model = wrapped(Around(None, nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16))))
    made = sgd("buffers", model)
    for _ in range(STEPS):
        if RANK == 0:  # who broadcasts
            time.sleep(SECONDS)
        step(model, made, 1)


def reduces():
    model = wrapped(Around(Reduces))
    step(model, sgd("reduces", model))


def collectives():
    """Calls of the script's own, nested, refused, begun only, and from another thread."""
    model = wrapped()
    made = sgd("collectives", model)
    for _ in range(STEPS):
        late()
        found = [None, None]
        dist.all_gather_object(found, RANK)
        work = dist.all_reduce(torch.ones(2), async_op=True)
        work.wait()
        try:
            dist.all_reduce("text")
        except TypeError:
            late(SECONDS / 2)
        dist.barrier()
        step(model, made, 1)


def collector():
    """The heap is large, and collected in each step by one rank."""
    model = wrapped()
    made = sgd("collector", model)
    kept = [[number] for number in range(200_000 if RANK == 1 else 10)]
    for _ in range(STEPS):
        gc.collect()
        step(model, made, 1)
    del kept


def fused():
    """Each parameter has an optimizer of its own, which steps inside of backward."""
    model = wrapped(Around(Sleeps))
    NAMES.append("fused")
    made = {p: torch.optim.SGD([p], 0.01) for p in model.parameters()}
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(lambda p: made[p].step())
    for _ in range(STEPS):
        model.zero_grad()
        model(torch.randn(8, 8)).square().mean().backward()


for name in sys.argv[1:]:
    globals()[name]()
if RANK == 0:
    print("manners", *NAMES)
dist.barrier()
dist.destroy_process_group()
