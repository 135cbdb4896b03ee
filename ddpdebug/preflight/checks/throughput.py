"""The time of a step by cause: its own time, waiting for data, copies between host and device, small operations.

Measured on copies and on this machine, with nothing else of the training running: a paragraph with numbers, no verdict
on how fast it ought to be. Waiting for other ranks is no part of it, which a run alone shows (SLOW601). The words are
those of a run: `share` is the share of a step that waits for data, as in SLOW602.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch

from ddpdebug import torch_internals as internals
from ddpdebug.clock import time
from ddpdebug.detectors.slow.slow602_input_bound import InputBound
from ddpdebug.isolation.process_state import kept_random_state
from ddpdebug.nested import tensors_in
from ddpdebug.preflight.capture.copies import copied
from ddpdebug.preflight.output.results import Check, Status, Table
from ddpdebug.preflight.sandbox.trials import (
    attempt,
    backward,
    copy_of_batch,
    take_step,
)
from ddpdebug.preflight.subject import Subject
from ddpdebug.sinks.text import counted, number

NAME = "where the time goes"
SECONDS = 5.0
#: Below this an operation is mostly the way to it: Python, dispatch and a kernel's launch take 5 to 20 microseconds.
SMALL = 20e-6
#: A step is said to be made of small operations when these take half of its time.
SMALL_SHARE = 0.5
#: From the share of a step on of which a run is warned, waiting for data is worth a warning; below 10 ms it is the
#: loader's own overhead, which a model of a useful size hides.
WAIT_SHARE, LEAST_WAIT = InputBound.input_share.value, 0.01
_STEPS, _WARM_UP = 12, 2
_BATCHES = 24
_SHOWN = 8


@dataclass(slots=True)
class Counts:
    """The operations of one step: how long they took, how many copies and reads of values were among them."""

    seconds: list[float] = field(default_factory=list)
    by_name: dict[str, list[float]] = field(default_factory=dict)
    copies: int = 0
    copied_bytes: int = 0
    reads: int = 0  # of a value into Python: they wait for a device

    def add(self, name: str, took: float) -> None:
        """Count an operation."""
        self.seconds.append(took)
        self.by_name.setdefault(name, []).append(took)

    @property
    def small(self) -> list[float]:
        """The operations that are mostly overhead."""
        return [took for took in self.seconds if took < SMALL]


def check(subject: Subject, *, seconds: float = SECONDS) -> list[Check]:
    """Time steps on copies, and the caller's input pipeline where it can be started again.

    Args:
        seconds: for the steps and for the input pipeline together.
    """
    return attempt(NAME, lambda: _check(subject, seconds))


def _check(subject: Subject, seconds: float) -> list[Check]:
    if not subject.batches:
        return [Check(Status.SKIPPED, "there are no batches")]
    step, counts = _steps(subject, seconds / 2)
    with kept_random_state():
        data = _data(subject, seconds / 2)
    return [_verdict(step, counts, data, _workers(subject.facts))]


def _steps(subject: Subject, seconds: float) -> tuple[float, Counts]:
    """Return the time of an optimizer step, and what its operations were."""
    model = copied(subject.model)
    make = subject.optimizer_for
    optimizer = torch.optim.SGD(_some(model), lr=0.0) if make is None else make(model)
    began, took = time.monotonic(), list[float]()
    while len(took) < _STEPS and (not took or time.monotonic() - began < seconds):
        batches = _micro_batches(subject, len(took))
        start = time.perf_counter()
        take_step(model, optimizer, subject.loss_of, batches)
        if any(parameter.device.type != "cpu" for parameter in model.parameters()):
            torch.accelerator.synchronize()
        took.append(time.perf_counter() - start)
    return median(took[_WARM_UP:] or took[-1:]), _counted(subject, model, optimizer)


def _counted(subject: Subject, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Counts:
    counter, batches = _Counter(), _micro_batches(subject, 0)
    optimizer.zero_grad(set_to_none=True)
    with counter:
        for batch in batches:
            loss, _ = subject.loss_of(model, batch)
            backward(loss / len(batches))
    reads = counter.counts.reads  # those of the optimizer are of its own counters, which lie on the host
    with counter:
        optimizer.step()
    counter.counts.reads = reads
    return counter.counts


def _some(model: torch.nn.Module) -> list[torch.Tensor]:
    return [p for p in model.parameters() if p.requires_grad] or [torch.zeros(1, requires_grad=True)]


def _micro_batches(subject: Subject, step: int) -> list[Any]:
    places = range(step * subject.micro_batches, (step + 1) * max(1, subject.micro_batches))
    return [copy_of_batch(subject.batches[i % len(subject.batches)]) for i in places]


def _data(subject: Subject, seconds: float) -> float | None:
    """Return how long an optimizer step's batches take to come, when nobody does anything else."""
    if subject.make_batches is None:
        return None
    began, took = time.monotonic(), list[float]()
    batches = iter(subject.make_batches())
    try:
        while len(took) < _BATCHES and (len(took) < 2 or time.monotonic() - began < seconds):
            start = time.perf_counter()
            if next(batches, None) is None:
                break
            took.append(time.perf_counter() - start)
    finally:
        del batches  # ends its workers
    # the first one waits for workers to start
    return None if len(took) < 2 else sum(took[1:]) / (len(took) - 1) * max(1, subject.micro_batches)


def _workers(facts: dict[str, Any]) -> int:
    return max(
        (int(loader.get("workers", 0)) for loader in facts.get("loaders", ()) if loader.get("trains")), default=0
    )


class _Counter(internals.OperationMode):
    """Times the operations of a step one by one. On a device it is their launch that is timed."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = Counts()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation."""
        start = time.perf_counter()
        output = func(*args, **(kwargs or {}))
        took = time.perf_counter() - start
        name = str(func)
        self.counts.add(name, took)
        self.counts.reads += name.startswith("aten._local_scalar_dense")
        if name.startswith(("aten._to_copy", "aten.copy_")):
            devices = {t.device.type for t in tensors_in([args, output])}
            if len(devices) > 1:
                self.counts.copies += 1
                self.counts.copied_bytes += sum(t.nbytes for t in tensors_in(output))
        return output


def _verdict(step: float, counts: Counts, data: float | None, workers: int) -> Check:
    total = sum(counts.seconds) or 1e-12
    small = sum(counts.small) / total
    wait = 0.0 if data is None else max(0.0, data - step) if workers else data  # workers load meanwhile
    share = None if data is None else wait / (step + wait)
    slow = share is not None and share >= WAIT_SHARE and wait >= LEAST_WAIT
    actions: list[str] = []
    if slow and workers:
        actions.append(f"more than {counted(workers, 'worker')}, or less work for each sample")
    elif slow:
        actions.append("num_workers is 0: give the DataLoader workers, which load while the model computes")
    if small > SMALL_SHARE:
        actions.append(
            "larger batches, a fused optimizer or torch.compile: most of the time is spent on small operations"
        )
    return Check(
        Status.WARN if slow else Status.INFO,
        "; ".join([_computing(step, counts, small), _waiting(data, share, workers), _moving(counts)]),
        code="SLOW602" if slow else "",
        evidence={
            "share": share,
            "data_seconds": data,
            "model_seconds": step,
            "step_seconds": None if data is None else step + wait,
            "workers": workers,
            "operations": len(counts.seconds),
            "median_operation_seconds": median(counts.seconds) if counts.seconds else None,
            "small_operations": len(counts.small),
            "small_time_share": small,
            "device_copies": counts.copies,
            "values_read": counts.reads,
        },
        hypotheses=("samples are made in the training process, or a sample costs more than the step",) if slow else (),
        actions=tuple(actions),
        tables=(_table(counts),) if counts.seconds else (),
    )


def _computing(step: float, counts: Counts, small: float) -> str:
    many = len(counts.seconds)
    words = f"the own time of a step is {_time(step)}: it runs {counted(many, 'operation')}"
    if not many:
        return words
    shares = f"{_percent(len(counts.small) / many)} of them under {_time(SMALL)}, with {_percent(small)} of their time"
    return f"{words}, median {_time(median(counts.seconds))}, {shares}"


def _waiting(data: float | None, share: float | None, workers: int) -> str:
    if data is None or share is None:
        return "the input pipeline could not be started again: its share is not known"
    kind = f"{counted(workers, 'worker')} ahead of the step" if workers else "no workers, the step waits"
    return f"its data takes {_time(data)} ({kind}), {_percent(share)} of each step waits for data"


def _moving(counts: Counts) -> str:
    copies = f"{counts.copies} {'copy' if counts.copies == 1 else 'copies'} between host and device"
    size = f" ({number(counts.copied_bytes / 2**20, 3)} MiB)" if counts.copies else ""
    return f"{copies}{size}, {counted(counts.reads, 'value')} read into Python"


def _percent(share: float) -> str:
    """Return whole percents."""
    return "under 1 %" if 0 < share < 0.005 else f"{100 * share:.0f} %"


def _time(seconds: float) -> str:
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{number(seconds / size, 3)} {unit}"
    return f"{number(seconds * 1e6, 3)} us"


def _table(counts: Counts) -> Table:
    total = sum(counts.seconds) or 1e-12
    largest = sorted(counts.by_name.items(), key=lambda item: -sum(item[1]))[:_SHOWN]
    rows = tuple((name, len(took), _time(median(took)), _percent(sum(took) / total)) for name, took in largest)
    return Table(head=("operation", "calls in a step", "middle", "of the time"), rows=rows)
