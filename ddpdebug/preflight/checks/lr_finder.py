"""The learning-rate finder: a sweep with one optimizer step per rate, from far too low to far too high.

`check` works on copies. `find_lr` is for the user's own program, also inside a DDP job: it trains the model that it
is given and puts everything back, since a copy of a DDP would need a second set of process groups and buckets.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from ddpdebug.clock import time
from ddpdebug.errors import UsageError
from ddpdebug.monitor import attach
from ddpdebug.preflight.capture.copies import copied
from ddpdebug.preflight.checks.lr_sweep import NAME, End, Stop, Sweep, rates, skipped, verdict
from ddpdebug.preflight.output.results import Check
from ddpdebug.preflight.sandbox.lockstep import Ranks
from ddpdebug.preflight.sandbox.restoring import restored
from ddpdebug.preflight.sandbox.trials import attempt, backward, copy_of_batch
from ddpdebug.preflight.subject import LossOf, Subject

#: The range of fastai's finder: below nothing moves, above everything breaks.
LOWEST, HIGHEST = 1e-7, 10.0
STEPS = 100
SECONDS = 12.0
#: Fewer steps over eight decades say nothing: the rate would grow more than twofold in each.
LEAST_STEPS = 30
#: What a sweep may take of the time that it was given when its steps turn out slower than the first ones.
_OVERTIME = 1.3
#: Steps at the lowest rate that tell how long one takes; the first is slow for other reasons.
_TRIALS = 3
#: A first step that takes this part of the time says enough, however slow first steps are.
_HOPELESS = 0.25
#: GradScaler begins at 2**16 and halves its scale with each step that it skips; beyond that the loss is to blame.
_MAX_SKIPS = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plan:
    """The settings of a sweep: ends of the range, steps, micro-batches per step, seconds."""

    lowest: float
    highest: float
    steps: int
    micro_batches: int
    seconds: float | None


class TooSlow(Exception):  # noqa: N818 - the outcome of a sweep that was not begun
    """The time is too short for a sweep; the text says how much it needs."""


def check(subject: Subject, *, seconds: float = SECONDS, scaler: Any = None) -> list[Check]:
    """Sweep learning rates on copies of model, optimizer and batches, and compare the script's learning rate.

    Args:
        seconds: the sweep takes fewer steps where steps are slow, and is skipped where even those take longer.
        scaler: a GradScaler of the caller's kind, for this sweep only.
    """
    return attempt(NAME, lambda: _check(subject, seconds, scaler))


def _check(subject: Subject, seconds: float, scaler: Any) -> list[Check]:
    if subject.optimizer_for is None:
        return [skipped("there is no optimizer")]
    if not subject.batches:
        return [skipped("there are no batches")]
    model = copied(subject.model)
    plan = _Plan(
        lowest=LOWEST, highest=HIGHEST, steps=STEPS, micro_batches=max(1, subject.micro_batches), seconds=seconds
    )
    trainer = _Trainer(model, subject.optimizer_for(model), subject.loss_of, scaler, Ranks(model))
    try:
        found = _sweep(trainer, map(copy_of_batch, itertools.cycle(subject.batches)), plan)
    except TooSlow as slow:
        return [skipped(str(slow))]
    return [verdict(found)]


def find_lr(  # noqa: PLR0913 - settings, all of them by name
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    loss_fn: Callable[[torch.nn.Module, Any], Any],
    batches: Iterable[Any],
    *,
    micro_batches: int = 1,
    scaler: Any = None,
    lowest: float = LOWEST,
    highest: float = HIGHEST,
    steps: int = STEPS,
    seconds: float | None = None,
) -> Sweep:
    """Sweep over learning rates with the caller's own model and optimizer, and put everything back bit for bit.

    Inside a DDP job all ranks call it, with the same arguments and each with its own batches, as they take a training
    step: the model's collectives run, and one small all_reduce per optimizer step carries the mean of the losses, so
    that all ranks go through the same rates, stop at the same step and return the same answer.

    Args:
        loss_fn: `loss_fn(model, batch)` returns the loss, a tuple that begins with it, or something with a `loss`.
        batches: a list or a DataLoader; it is begun anew when it ends. Workers of a loader are started and ended.
        micro_batches: batches per optimizer step; the rate grows once per optimizer step.
        scaler: the caller's GradScaler, if there is one.
        seconds: fewer steps are taken where they would take longer.

    Returns:
        the sweep, with `steepest`, `tenth`, `edge` and `plot()`.

    Raises:
        ddpdebug.UsageError: the arguments make no sense, or differ between ranks.
    """
    if not 0 < lowest < highest < math.inf or steps < LEAST_STEPS or micro_batches < 1:
        raise UsageError(
            f"find_lr needs 0 < lowest < highest, at least {LEAST_STEPS} steps and 1 micro-batch; "
            f"got lowest={lowest!r}, highest={highest!r}, steps={steps!r}, micro_batches={micro_batches!r}"
        )
    plan = _Plan(lowest=lowest, highest=highest, steps=steps, micro_batches=micro_batches, seconds=seconds)
    ranks = Ranks(model)
    ranks.same(
        (lowest, highest, steps, micro_batches, -1.0 if seconds is None else seconds),
        ("lowest", "highest", "steps", "micro_batches", "seconds"),
    )

    with _unwatched(), restored(model, optimizer, scaler, batches):
        trainer = _Trainer(model, optimizer, lambda m, b: (_loss_in(loss_fn(m, b)), None), scaler, ranks)
        try:
            return _sweep(trainer, _again(batches), plan)
        except TooSlow as slow:
            raise UsageError(str(slow)) from None


def _loss_in(found: Any) -> torch.Tensor:
    """Return the loss in what a user's function returns."""
    if isinstance(found, tuple):
        found = found[0]
    if isinstance(found, Mapping):
        found = found.get("loss")
    loss = getattr(found, "loss", found)
    if not isinstance(loss, torch.Tensor):
        raise UsageError(f"loss_fn(model, batch) must return the loss as a tensor, got {type(loss).__name__}")
    return loss


def _again(batches: Iterable[Any]) -> Iterator[Any]:
    while True:
        empty = True
        for batch in batches:
            empty = False
            yield copy_of_batch(batch)
        if empty:
            raise UsageError("there are no more batches: give a list or a DataLoader, which can be begun anew")


@contextlib.contextmanager
def _unwatched() -> Iterator[None]:
    """Keep what watches this process from taking the sweep for training."""
    monitor = attach.current()
    if monitor is None:
        yield
        return
    before, monitor.guard.quiet = monitor.guard.quiet, True
    try:
        yield
    finally:
        monitor.guard.quiet = before


class _Trainer:
    """Takes optimizer steps at a rate; the ratios between the groups' rates stay what they are."""

    def __init__(
        self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, loss_of: LossOf, scaler: Any, ranks: Ranks
    ) -> None:
        self._model, self._optimizer, self._loss_of, self._scaler = model, optimizer, loss_of, scaler
        self.ranks = ranks
        given = [float(group["lr"]) for group in optimizer.param_groups]
        self.current = max(given, default=0.0)
        self._shares = [lr / self.current if self.current > 0 else 1.0 for lr in given]

    def step(self, rate: float, batches: Sequence[Any]) -> tuple[float, bool]:
        """Take one optimizer step at this rate; return the mean of its losses, and whether GradScaler let it happen."""
        for group, share in zip(self._optimizer.param_groups, self._shares, strict=True):
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(rate * share)
            else:
                group["lr"] = rate * share
        return self._accumulate(batches), self._apply()

    def _accumulate(self, batches: Sequence[Any]) -> float:
        self._optimizer.zero_grad(set_to_none=True)
        total = 0.0
        for number, batch in enumerate(batches, 1):
            with self._communicating(last=number == len(batches)):
                loss, _ = self._loss_of(self._model, batch)
                part = loss / len(batches)
                backward(part if self._scaler is None else self._scaler.scale(part))
            total += float(part.detach())
        return total

    def _communicating(self, *, last: bool) -> contextlib.AbstractContextManager[Any]:
        if last or not isinstance(self._model, DistributedDataParallel):
            return contextlib.nullcontext()
        return self._model.no_sync()

    def _apply(self) -> bool:
        if self._scaler is None:
            self._optimizer.step()
            return True
        before = self._scaler.get_scale()
        self._scaler.step(self._optimizer)
        self._scaler.update()
        return bool(self._scaler.get_scale() >= before)


def _sweep(trainer: _Trainer, batches: Iterator[Any], plan: _Plan) -> Sweep:
    began = time.monotonic()
    planned = rates(plan.lowest, plan.highest, _affordable(trainer, batches, plan))
    stop, seen, end = Stop(), [], End.ALL
    for rate in planned:
        late = plan.seconds is not None and time.monotonic() - began > _OVERTIME * plan.seconds
        loss, someone_late = _step(trainer, rate, batches, plan, late=late)
        if not math.isfinite(loss):
            end = End.NONFINITE
            break
        seen.append(loss)
        if stop(loss):
            end = End.DIVERGED
            break
        if someone_late:
            end = End.TIME
            break
    return Sweep(rates=tuple(planned[: len(seen)]), losses=tuple(seen), end=end, current=trainer.current)


def _step(
    trainer: _Trainer, rate: float, batches: Iterator[Any], plan: _Plan, *, late: bool = False
) -> tuple[float, bool]:
    """Take a step on all ranks; return the mean of their losses, and whether the time is over on any of them.

    A step that GradScaler skips has not tried the rate: it is taken again, with the smaller scale. No rank decides that
    alone, since every attempt runs the model's collectives.
    """
    for _ in range(_MAX_SKIPS):
        own, taken = trainer.step(rate, [next(batches) for _ in range(plan.micro_batches)])
        loss, skipped_somewhere, late_somewhere = trainer.ranks.mean([own, float(not taken), float(late)])
        if not math.isfinite(loss) or not skipped_somewhere:
            return loss, late_somewhere > 0
    return math.nan, late


def _affordable(trainer: _Trainer, batches: Iterator[Any], plan: _Plan) -> int:
    """Return how many steps the time allows, the same number on all ranks.

    Raises:
        TooSlow: too few.
    """
    if plan.seconds is None:
        return plan.steps
    took = []
    for _ in range(_TRIALS):
        began = time.monotonic()
        _step(trainer, plan.lowest, batches, plan)
        took.append(trainer.ranks.mean([time.monotonic() - began])[0])
        if took[-1] > _HOPELESS * plan.seconds:
            break
    each = max(min(took), 1e-9)
    steps = min(plan.steps, int(plan.seconds / each))
    if steps < LEAST_STEPS:
        raise TooSlow(
            f"a step takes {each:.3g} s, and a sweep needs at least {LEAST_STEPS} of them: "
            f"allow {LEAST_STEPS * each * 1.2:.0f} s"
        )
    return steps
