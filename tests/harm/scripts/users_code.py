"""What users put around and into a training loop; prints what it leaves behind, and what the user's own code saw."""

import contextlib
import random
import signal
import sys
import threading
import warnings

import torch
from common import report
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

kind = sys.argv[1]
torch.manual_seed(0)
random.seed(0)
torch.set_num_threads(1)


class Odd(dict):
    """A container whose methods are not for anybody who just looks."""

    def _no(self, *_):
        raise RuntimeError("no iteration over this")

    __iter__ = items = values = keys = __getitem__ = __len__ = _no


class Unwrap(nn.Module):
    def forward(self, batch):
        return batch


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.unwrap, self.linear, self.unused = Unwrap(), nn.Linear(8, 4), nn.Linear(2, 2)

    def forward(self, x):
        if kind == "dict":
            x = dict.__getitem__(self.unwrap(x), "x")
        if kind == "vmap":
            return torch.func.vmap(self.linear)(x)
        return self.linear(x)


class Counts(TorchDispatchMode):
    seen = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        Counts.seen += 1
        return func(*args, **(kwargs or {}))


class Functions(TorchFunctionMode):
    seen = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        Functions.seen += 1
        return func(*args, **(kwargs or {}))


class Refuses(torch.Tensor):
    """A class of tensor that knows what a training step does, and nothing else."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if getattr(func, "__name__", "") in {"aminmax", "std_mean", "isfinite", "sum", "vector_norm", "_foreach_norm"}:
            raise RuntimeError(f"not for you: {func}")
        return super().__torch_function__(func, types, args, kwargs)


def batch():
    x = torch.randn(6, 8)
    if kind in {"csr", "csc"}:
        x = x.to_sparse_csr() if kind == "csr" else x.to_sparse_csc().to_sparse_csr()
    if kind == "nested":
        x = torch.nested.nested_tensor([torch.randn(3, 8), torch.randn(2, 8)])
    if kind == "jagged":
        x = torch.nested.nested_tensor([torch.randn(3, 8), torch.randn(2, 8)], layout=torch.jagged)
    if kind == "subclass":
        x = x.as_subclass(Refuses)
    if kind == "empty":
        x = x[:0]
    if kind == "strided":
        x = torch.randn(8, 6).t()
    return Odd(x=x) if kind == "dict" else x


def mean(y):
    if kind == "nested":
        return sum(part.square().mean() for part in y.unbind())
    if kind == "jagged":
        return y.values().square().mean()
    return y.square().sum() if kind == "empty" else y.square().mean()


def around():
    return {
        "dispatch": Counts,
        "functions": Functions,
        "flops": lambda: FlopCounterMode(display=False),
        "anomaly": torch.autograd.detect_anomaly,
        "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
        "device": lambda: torch.device("cpu"),
    }.get(kind, contextlib.nullcontext)()


def train(steps=6):
    if kind == "float64":
        torch.set_default_dtype(torch.float64)
    if kind == "deterministic":
        torch.use_deterministic_algorithms(True)
    model = Net()
    if kind == "complex":
        model.phase = nn.Parameter(torch.randn(4, dtype=torch.complex64))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    losses = []
    with around() as mode:
        for _ in range(steps):
            optimizer.zero_grad()
            y = model(batch())
            loss = mean(y * model.phase.abs() if kind == "complex" else y)
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
            with torch.inference_mode():
                mean(model(batch()))
    report([model], [optimizer], losses, seen=(Counts.seen, Functions.seen))
    if kind == "flops":
        print("flops", mode.get_total_flops())


class Preempted(Exception):
    pass


def signals():
    """Each signal arrives while something runs; each is caught."""
    count = [0]

    def handler(number, frame):
        count[0] += 1
        raise {"signals": Preempted, "timeouts": TimeoutError}.get(kind, RuntimeError)(number)

    if kind == "interrupts":
        signal.signal(signal.SIGALRM, signal.default_int_handler)
        handled = KeyboardInterrupt
    else:
        signal.signal(signal.SIGALRM, handler)
        handled = Exception
    model = nn.Sequential(*[nn.Linear(16, 16) for _ in range(8)])
    optimizer, x, caught = torch.optim.Adam(model.parameters()), torch.randn(4, 16), 0
    for _ in range(2):  # what torch loads at the first steps may swallow an exception by itself
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    for k in range(60):
        torch.set_grad_enabled(True)  # the one before may have come while torch had it off
        before = count[0]
        try:
            signal.setitimer(signal.ITIMER_REAL, 0.0005 + 0.0002 * k)
            for _ in range(2000):  # longer than the timer takes, should torch swallow what its handler raises
                if count[0] != before:
                    break
                optimizer.zero_grad()
                model(x).square().mean().backward()
                optimizer.step()
        except handled:
            caught += 1
    signal.setitimer(signal.ITIMER_REAL, 0)  # should torch itself have raised after a step that was cut short
    print("caught all but what torch's own profiler swallows", caught >= 58)


def where():
    """Lines to which torch's warnings belong."""
    import os

    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel as DDP

    dist.init_process_group("gloo")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = DDP(nn.Linear(2, 2), broadcast_buffers=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        schedule.step()
        schedule.step(3)
        model(torch.ones(1, 2)).sum().backward()
        nn.utils.clip_grad_norm_((p for p in ()), 1.0)
        model.register_full_backward_hook(lambda *_: None)
        model(torch.ones(1, 2)).sum().backward(create_graph=True)
        optimizer.step()
        next(iter(torch.utils.data.DataLoader([1, 2], num_workers=10**3))) if os.environ.get("NEVER") else None
        torch.utils.data.DataLoader([1, 2], num_workers=200)
        list(torch.utils.data.DataLoader([1, 2], pin_memory=True))
    for w in caught:
        print(w.category.__name__, w.filename.rpartition("/")[2], w.lineno)
    warnings.simplefilter("error")
    try:
        DDP(nn.Linear(2, 2), broadcast_buffers=False)
    except FutureWarning:
        print("RAISED")
    del model
    dist.destroy_process_group()


def threads():
    """Three threads train models of their own, at the same time."""
    found, together = {}, threading.Barrier(3)

    def go(i):
        generator = torch.Generator().manual_seed(i)
        model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))
        with torch.no_grad():
            for p in model.parameters():
                p.copy_(torch.randn(p.shape, generator=generator) / 4)
        optimizer, losses = torch.optim.Adam(model.parameters(), lr=1e-2), []
        for _ in range(60):
            together.wait()
            optimizer.zero_grad()
            loss = model(torch.randn(4, 8, generator=generator)).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        found[i] = (losses[-1].hex(), [p.detach().sum().item().hex() for p in model.parameters()])

    running = [threading.Thread(target=go, args=(i,)) for i in range(3)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    print(sorted(found.items()))


def ddp_threads():
    """Two DDPs in two threads, each with a group of its own; the ranks begin with different ones."""
    import time

    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel as DDP

    dist.init_process_group("gloo")
    groups = [dist.new_group([0, 1]) for _ in range(2)]
    models = [DDP(nn.Linear(4 + i, 3), process_group=group) for i, group in enumerate(groups)]
    found = {}

    def go(i):
        if i == dist.get_rank():
            time.sleep(0.3)
        generator, losses = torch.Generator().manual_seed(i), []
        optimizer = torch.optim.SGD(models[i].parameters(), lr=0.1)
        for _ in range(12):
            optimizer.zero_grad()
            loss = models[i](torch.randn(4, 4 + i, generator=generator)).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        found[i] = losses[-1].hex()

    running = [threading.Thread(target=go, args=(i,)) for i in range(2)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    print(sorted(found.items()))
    models.clear()
    dist.destroy_process_group()


warnings.filterwarnings("ignore", message=".*beta state.*|.*prototype stage.*|.*Anomaly Detection.*|.*in eval mode.*")
{
    "signals": signals,
    "timeouts": signals,
    "interrupts": signals,
    "runtime": signals,
    "warnings": where,
    "threads": threads,
    "ddp-threads": ddp_threads,
}.get(kind, train)()
