"""Known faults, put into the user's own script by `ddpdebug check --self-test` to see that the rules find them.

Only a run that was started for that has them. They are put in place before the probes, which therefore see them as they
would see the user's own mistakes. Ranks share data through files: a fault must not add collectives to the job.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ddpdebug import torch_internals as internals
from ddpdebug.ci.selftest import FAULT, STEP
from ddpdebug.clock import time
from ddpdebug.nested import tensors_in_objects

#: The rank that does wrong where one does.
_CULPRIT = 1
_WAIT_SECONDS = 20.0
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class _Clock:
    """Counts the steps of the first optimizer."""

    def __init__(self) -> None:
        self.step = 0
        self._first: int | None = None

    def after(self, optimizer: Any, *_: Any) -> None:
        self._first = id(optimizer) if self._first is None else self._first
        self.step += id(optimizer) == self._first


def install(environ: Mapping[str, str]) -> None:
    """Put the fault in place that this run was started with, if any."""
    name, _, folder = environ.get(FAULT, "").partition(" ")
    if name:
        clock, culprit = _Clock(), environ.get("RANK") == str(_CULPRIT)
        _FAULTS[name](clock, culprit, Path(folder))
        register_optimizer_step_post_hook(clock.after)


def _bit_flip(clock: _Clock, culprit: bool, _: Path) -> None:  # noqa: FBT001 - all faults take the same
    def flip(optimizer: Any, *_: Any) -> None:
        if culprit and clock.step == STEP:
            params = [p for group in optimizer.param_groups for p in group["params"] if p.numel()]
            flip_bit(max(params, key=torch.numel))

    register_optimizer_step_post_hook(flip)


def _skipped_reduction(clock: _Clock, _: bool, __: Path) -> None:  # noqa: FBT001
    def before(ddp: Any, *_: Any) -> None:
        if clock.step == STEP:
            ddp.require_backward_grad_sync = False

    wrapped: list[Any] = []

    def after(*_: Any) -> None:
        if clock.step == STEP:
            for ddp in wrapped:
                ddp.require_backward_grad_sync = True

    def watch(ddp: Any) -> None:
        wrapped.append(ddp)
        ddp.register_forward_pre_hook(before)

    on_wrapping(watch)
    register_optimizer_step_post_hook(after)


def _other_rate(clock: _Clock, culprit: bool, _: Path) -> None:  # noqa: FBT001
    def change(optimizer: Any, *_: Any) -> None:
        if culprit and clock.step == STEP:
            raise_rate(optimizer, 1.5)

    register_optimizer_step_pre_hook(change)


def _nan(clock: _Clock, culprit: bool, _: Path) -> None:  # noqa: FBT001
    def spoil(grad: torch.Tensor) -> torch.Tensor:
        return with_nan(grad) if clock.step == STEP else grad

    def watch(ddp: Any) -> None:
        first = next((p for p in ddp.module.parameters() if p.requires_grad), None)
        if culprit and first is not None:
            first.register_hook(spoil)

    on_wrapping(watch)


def _same_data(_: _Clock, __: bool, folder: Path) -> None:  # noqa: FBT001
    def forward(_: Any, args: Any, kwargs: Any) -> None:
        _take_over(folder, "forward", (args, kwargs))

    on_wrapping(lambda ddp: ddp.register_forward_pre_hook(forward, with_kwargs=True))
    iterator: Any = internals.LoaderIterator
    original = iterator.__next__

    @functools.wraps(original)
    def following(self: Any) -> Any:
        batch = original(self)
        _take_over(folder, "loader", batch)
        return batch

    iterator.__next__ = following


_FAULTS: dict[str, Callable[[_Clock, bool, Path], None]] = {
    "bit-flip": _bit_flip,
    "skipped-all-reduce": _skipped_reduction,
    "other-learning-rate": _other_rate,
    "nan": _nan,
    "same-data": _same_data,
}


# --- what breaks, for the faults of `ddpdebug.testing` too ------------------------------------------------------------


def flip_bit(parameter: torch.Tensor) -> None:
    """Flip a bit of the first element: high in the mantissa, so that the value stays finite."""
    with torch.no_grad():
        place = (0,) * parameter.dim()
        number = parameter[place].clone().reshape(1)
        bits = number.view(_INTEGERS[number.element_size()])
        mantissa = {torch.float64: 52, torch.float32: 23, torch.float16: 10, torch.bfloat16: 7}.get(number.dtype, 1)
        bits ^= 1 << (mantissa - 1)
        parameter[place] = bits.view(number.dtype)[0]


def with_nan(gradient: torch.Tensor) -> torch.Tensor:
    """Return a copy whose first element is NaN."""
    changed = gradient.clone()
    changed[(0,) * changed.dim()] = float("nan")
    return changed


def raise_rate(optimizer: torch.optim.Optimizer, factor: float) -> None:
    """Multiply the learning rate of all parameter groups."""
    for group in optimizer.param_groups:
        group["lr"] = group["lr"] * factor


# --- where -----------------------------------------------------------------------------------------------------------


def on_wrapping(act: Callable[[Any], Any]) -> None:
    """Call `act` with every DDP that is made from now on."""
    kind: Any = DistributedDataParallel
    original = kind.__init__

    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        original(self, *args, **kwargs)
        act(self)

    kind.__init__ = __init__


_TAKEN: dict[str, int] = {}


def _take_over(folder: Path, kind: str, values: Any) -> None:
    """Overwrite the tensors in `values` with those that rank 0 has in the same place; where it has none, leave them."""
    number = _TAKEN[kind] = _TAKEN.get(kind, -1) + 1
    file, tensors = folder / f"{kind}-{number}.pt", list(tensors_in_objects(values))
    if os.environ.get("RANK") == "0":
        torch.save([tensor.detach().cpu() for tensor in tensors], file.with_suffix(".part"))
        file.with_suffix(".part").rename(file)
        return
    deadline = time.monotonic() + _WAIT_SECONDS
    while not file.exists() and time.monotonic() < deadline:
        time.sleep(0.005)
    if file.exists():
        sources = torch.load(file, weights_only=True)
        for tensor, source in zip(tensors, sources, strict=False):
            if tensor.shape == source.shape:
                with torch.no_grad():
                    tensor.copy_(source)
