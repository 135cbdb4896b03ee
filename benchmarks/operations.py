"""Operations of torch in a step of a 5M-parameter GPT in DDP: what attaching adds, by the probe that issues them.

    python benchmarks/operations.py [--device meta] [--rounds 20]

Counted on the training thread by a dispatch mode: `checked` a step that is checked in full and samples no layers,
`sampled` one that samples them, `watched` one that has a row and is not checked. Views of a tensor start nothing on a
device and are not counted. On `meta`, tensors without data stand for those of a device: the probes then do what they do
on a GPU, where an operation is one launch or a few. Its copies to the host and the kernel of the fingerprints are
stood in for; what differs by the values of tensors does not show there.

On the CPU the processor time of the training thread is measured besides, in rounds of blocks of steps without the mode:
the median of the rounds' ratios to plain with the quartiles, and the least ms a step that ddpdebug takes.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from overhead import Model
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import ddpdebug
from ddpdebug import devices, torch_internals as internals
from ddpdebug.monitor.sampling import Schedule
from ddpdebug.probes import async_copy

_OURS = str(Path(ddpdebug.__file__).parent) + "/"
_PROBES = _OURS + "probes/"
#: What works for several probes: who calls it counts.
_SHARED = {"async_copy.py", "ranges.py", "values.py", "gradients.py"}
_VIEWS = {"detach", "alias", "view", "select", "slice", "as_strided", "t", "transpose", "unsqueeze", "expand"}
#: Nor is memory that is not written, or, on the host, read in place of a copy.
_VIEWS |= {"zeros", "_unsafe_view", "permute", "split", "unbind", "lift_fresh", "_reshape_alias", "empty", "empty_like"}


class Counting(TorchDispatchMode):
    """Counts operations by the probe that issues them; plays the host's part for tensors without data."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[tuple[str, str]] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Count one operation, and run it."""
        name = func.overloadpacket.__name__
        if name not in _VIEWS:
            self.found[_caller(), name] += 1
        if name == "_local_scalar_dense" and args[0].is_meta:
            return 0.0 if args[0].is_floating_point() else 0
        return func(*args, **(kwargs or {}))


def _caller() -> str:
    """Return the probe that runs, its file and function; `the job` where none does."""
    frame, shared = sys._getframe(2), None  # noqa: SLF001 - the stack is what tells
    while frame is not None:
        path = frame.f_code.co_filename
        if path.startswith(_OURS):
            name = path.rpartition("/")[2]
            found = f"{name.removesuffix('.py')}.{frame.f_code.co_name}"
            if path.startswith(_PROBES) and name not in _SHARED:
                return found
            shared = shared or found
        frame = frame.f_back
    return shared or "the job"


class Training:
    """The model and its step."""

    def __init__(self, device: str, args: argparse.Namespace) -> None:
        torch.manual_seed(0)
        self.device = device
        self.module = Model(args.width, args.depth).to(device)
        self.model = nn.parallel.DistributedDataParallel(self.module, init_sync=device == "cpu")
        if device == "meta":
            self.model.register_comm_hook(None, lambda _, bucket: _reduced(bucket))
            self.model.reducer = _Reducer(self.model.reducer)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, foreach=True)
        self.tokens = torch.randint(0, 512, (args.batch, args.tokens + 1)).to(device)

    def step(self) -> None:
        """Take one step."""
        loss = nn.functional.cross_entropy(self.model(self.tokens[:, :-1]).flatten(0, 1), self.tokens[:, 1:].flatten())
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()


class _Reducer:
    """DDP's, which does not put its buckets into another order: it would copy that from a device."""

    def __init__(self, own: Any) -> None:
        self._own = own

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own, name)

    def _rebuild_buckets(self) -> bool:
        return False


def _reduced(bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done


def counted(step: Callable[[], None], guard: Any = None) -> Counter[tuple[str, str]]:
    """Return what a step issues."""
    with Counting() as mode:
        if guard is not None:
            guard.own_modes += 1
        try:
            step()
        finally:
            if guard is not None:
                guard.own_modes -= 1
    return mode.found


@contextmanager
def attached(training: Training, out: str, due: Callable[[int], bool]) -> Iterator[Any]:
    """Attach as a user does, but for the steps that are checked; all are watched."""
    watched = mock.patch.object(Schedule, "watched", return_value=True)
    with watched, mock.patch.object(Schedule, "due", lambda _self, _optimizer, step: due(step)):
        options: dict[str, Any] = {"out": out, "metrics": "off", "quiet": True}
        monitor = ddpdebug.watch(training.model, training.optimizer, **options)
        try:
            yield monitor
        finally:
            monitor.close()


@contextmanager
def without_data() -> Iterator[None]:
    """Let tensors without data stand for those of a device."""

    class Copy:
        def __init__(self, tensor: torch.Tensor) -> None:
            torch.empty_like(tensor).copy_(tensor)  # counted as the copy
            self.host = torch.zeros(tensor.shape, dtype=tensor.dtype)

        def wait(self) -> None:
            pass

    def one_launch(tensors: Any, *_: Any) -> torch.Tensor:
        return torch.full((len(tensors),), 0, dtype=torch.int64, device="meta")

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(torch, "is_autocast_enabled", return_value=False))
        stack.enter_context(mock.patch.object(torch, "get_autocast_dtype", return_value=torch.bfloat16))
        stack.enter_context(mock.patch.object(devices, "to_host", Copy))
        stack.enter_context(mock.patch.object(async_copy, "device_fingerprints", one_launch))
        stack.enter_context(mock.patch.object(internals, "_is_array", lambda tensor: tensor.layout is torch.strided))
        yield


def operations(training: Training, scratch: str) -> None:
    """Print what steps issue."""
    for _ in range(4):
        training.step()
    plain = counted(training.step)
    print(f"plain: {plain.total()} operations")
    for kind, due in (("watched", lambda step: step < 8), ("checked", lambda _: True)):
        with attached(training, f"{scratch}/{kind}", due) as monitor:
            found = [counted(training.step, monitor.guard) for _ in range(13)]
            if monitor.guard.off:
                print(f"not counted, because they have failed: {', '.join(sorted(monitor.guard.off))}")
        shown = {kind: min(found[9:], key=Counter.total)}
        if kind == "checked":
            shown["sampled"] = max(found[9:], key=Counter.total)
        for name, own in shown.items():
            more = own - plain
            print(f"{name}: {own.total() - plain.total()} operations more")
            by_probe: dict[str, Counter[str]] = {}
            for (probe, operation), number in more.items():
                by_probe.setdefault(probe, Counter())[operation] += number
            for probe, those in sorted(by_probe.items(), key=lambda item: -item[1].total()):
                words = ", ".join(f"{number} {operation}" for operation, number in those.most_common(6))
                print(f"{those.total():7} {probe:48} {words}")


def clocked(step: Callable[[], None], count: int) -> list[float]:
    """Return the processor time of this thread in each of some steps."""
    found = []
    for _ in range(count):
        before = time.thread_time()
        step()
        found.append(time.thread_time() - before)
    return found


def times(training: Training, scratch: str, rounds: int, steps: int) -> None:
    """Print what steps take."""
    ways: dict[str, Callable[[int], bool] | None] = {"plain": None, "again": None}
    ways |= {"watched": lambda step: step < 4, "checked": lambda _: True}
    found: dict[str, list[list[float]]] = {way: [] for way in ways}
    for number in range(rounds):
        order = [*ways][number % len(ways) :] + [*ways][: number % len(ways)]
        for way in order:
            due = ways[way]
            if due is None:
                found[way].append(clocked(training.step, steps))
                continue
            with attached(training, f"{scratch}/{way}-{number}", due):
                clocked(training.step, 5)
                found[way].append(clocked(training.step, steps))
    least = {way: min(min(block) for block in blocks) for way, blocks in found.items()}
    print(f"a plain step takes the training thread {least['plain'] * 1e3:.1f} ms at least")
    for way in [*ways][1:]:
        ratios = [statistics.median(a) / statistics.median(b) for a, b in zip(found[way], found["plain"], strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
        more = (least[way] - least["plain"]) * 1e3
        print(f"{way:8} {middle:.3f} [{low:.3f}, {high:.3f}]   least: {more:+.2f} ms a step")


def main() -> None:
    """Count and measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "meta"), default="cpu")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--depth", type=int, default=6)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=0, help="of which times are measured")
    parser.add_argument("--steps", type=int, default=6, help="of a block")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.device == "meta":
        from torch.testing._internal.distributed import fake_pg  # noqa: PLC0415 - only there

        dist.init_process_group("fake", store=fake_pg.FakeStore(), rank=0, world_size=1)
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    training = Training(args.device, args)
    with tempfile.TemporaryDirectory() as scratch:
        if args.device == "meta":
            with without_data():
                operations(training, scratch)
        else:
            operations(training, scratch)
            if args.rounds:
                times(training, scratch, args.rounds, args.steps)
    del training
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
