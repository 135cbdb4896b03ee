"""Contracts 5 to 7: sizes of losses, gradients and learning rates, the order of calls, number types. Torch-free."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise

from ddpdebug.facts.fact import Fact, about, how_often, middle, over
from ddpdebug.facts.seen import Seen, column, lowest
from ddpdebug.schema.announcements import (
    InitialLoss,
    LossBroadcast,
    LossInput,
    Precision,
    SoftmaxOfOne,
    Structure,
    TargetRange,
    UnusedSchedule,
)
from ddpdebug.schema.details import Contract
from ddpdebug.schema.row import CHECKSUM_SLOTS, Flag
from ddpdebug.schema.step import Step

#: What depends on drawn numbers is the same within these factors: in the first steps, and later on.
_MAGNITUDES = {"loss": (4.0, 16.0), "grad_norm": (4.0, 16.0), "param_norm": (2.0, 4.0), "loss_scale": (2.0, 1e9)}
_UPDATE, _MEAN, _EXACT = 4.0, 1.2, 1.0001
_WORDS = {
    "loss": "loss",
    "grad_norm": "norm of the gradients",
    "param_norm": "norm of the parameters",
    "loss_scale": "loss scale",
}
#: What has come down below this share of its beginning is not followed further.
_FLOOR = 0.05
#: Magnitudes are the middle of steps from one of these to the next.
_WINDOWS = (0, 8, 16, 32, 64, 128, 256, 512, 1024)
_ORDER = (
    (6, Flag.GRADS_CARRIED, "a step uses gradients that are not its own, or a loss twice"),
    (6, Flag.GRADS_DISCARDED, "gradients are cleared before a step has used them"),
    (6, Flag.STEPPED_TWICE, "another optimizer has stepped the same parameters since the backward"),
    (6, Flag.CLIPPED_SCALED, "clipping sees gradients that carry the loss scale, or that no step uses"),
    (6, Flag.SCHEDULED_OFTEN, "a scheduler is stepped several times for a step"),
    (6, Flag.SCHEDULED_ELSEWHERE, "the learning rate is set where it is not read"),
    (6, Flag.FEWER_FORWARDS, "there are fewer forwards than backwards"),
    (6, Flag.CLOSURE, "it evaluates a closure"),
    (5, Flag.CLIPPED, "gradients are clipped"),
    (5, Flag.MEANS_ADDED, "the losses of its micro-batches are not weighted as one mean"),
    (5, Flag.GRADS_WRITTEN, "something else than clipping changes gradients"),
    (7, Flag.SKIPPED, "steps are skipped by the loss scaler"),
    (7, Flag.FORWARD_NONFINITE, "outputs of modules are not finite"),
    (7, Flag.INPUT_NONFINITE, "inputs are not finite"),
    (7, Flag.LOSS_NONFINITE, "the loss is not finite"),
    (7, Flag.GRADS_NONFINITE, "gradients are not finite"),
    (7, Flag.PARAMS_NONFINITE | Flag.STEP_NONFINITE, "parameters or state are not finite"),
    (7, Flag.NEAR_OVERFLOW, "numbers in 16 bits come near the largest"),
)
#: Steps of a run in which a loss scaler finds its scale.
_SCALER_SETTLES = 4


def facts(seen: Seen) -> Iterator[Fact]:
    """Yield facts about scale, order and number types."""
    for optimizer, steps in seen.steps.items():
        name = f"optimizer {optimizer}"
        yield from _rates(name, steps)
        yield from _magnitudes(name, steps)
        yield from over(about(5, name, "micro-batches in a step"), column(steps[1:], "micro_batches"))
        for contract, flag, what in _ORDER:
            begins = _SCALER_SETTLES if contract == 7 else 0
            yield from how_often(about(contract, name, what), ((s.step, s.any(flag)) for s in steps[begins:]))
    for _, step, contract_kept in seen.details(Contract):
        for clip in contract_kept.clips:
            sees = "this rank's own gradients" if clip.before_sync else "reduced gradients"
            yield about(6, "clipping", "sees", sees, step, step, place=clip.location)
    yield from _losses(seen)
    for told in seen.first_rank(Precision):
        yield seen.fact(7, f"ddp{told.number}", "autocast", told.value.autocast or "off", told.step)
        yield seen.fact(7, f"ddp{told.number}", "precision of products", told.value.matmul or "default", told.step)
    for one in seen.first_rank(Structure):
        types = sorted({dtype for kind, _, _, dtype, _ in one.value.entries if kind == "parameter"})
        yield seen.fact(7, f"ddp{one.number}", "types of the parameters", ", ".join(types) or "none", one.step)


def _rates(name: str, steps: Sequence[Step]) -> Iterator[Fact]:
    rates = list(column(steps, "lr"))
    for step, rate in rates:
        if step == steps[0].step:
            yield about(5, name, "learning rate", rate, step, step, within=_EXACT)
        elif step & (step - 1) == 0:
            yield about(5, name, f"learning rate at step {step}", rate, step, step, within=_EXACT)
    moves = ((now[0], now[1] != before[1]) for before, now in pairwise(rates))
    yield from how_often(about(6, name, "the learning rate changes between steps"), moves)
    limits = column(steps, "clip_max")
    yield from over(about(5, name, "gradients are clipped to"), limits, lambda value: f"{value:.4g}")


def _magnitudes(name: str, steps: Sequence[Step]) -> Iterator[Fact]:
    """Yield how large things are in the first steps and in later ones, coarsely: seeds differ."""
    floors: dict[str, float] = {}
    for first, end in pairwise(_WINDOWS):
        window = [step for step in steps if first <= step.step < end]
        if not window or steps[-1].step < end - 1:
            return
        rows = [row for step in window for row in step.rows.values()]
        when = "as training begins" if not first else f"in steps {first} to {end - 1}"
        for field, (begins, later) in _MAGNITUDES.items():
            if (value := middle(getattr(row, field) for row in rows)) is not None:
                within = later if first else begins
                if first and field in floors:  # a loss near 0 is as good as another one
                    value = max(value, _FLOOR * floors[field])
                else:
                    floors[field] = abs(value)
                yield about(5, name, f"{_WORDS[field]} {when}", value, end - 1, end - 1, within=within)
        if first:
            continue
        ratio = middle(row.update_norm / row.param_norm for row in rows if row.param_norm > 0)
        if ratio is not None:
            yield about(
                5, name, f"share of the parameters that a step changes {when}", ratio, end - 1, end - 1, within=_UPDATE
            )
        if (mean := middle(map(_multiple, window))) is not None:
            yield about(5, name, "reduced gradient as a multiple of the mean", mean, end - 1, end - 1, within=_MEAN)


def _multiple(step: Step) -> float:
    """Return by which factor reduced checksums are the mean of the ranks' own, in the middle; NaN where unknown."""
    ratios = []
    for slot in range(CHECKSUM_SLOTS):
        local = [row.local_sums[slot] for row in step.rows.values()]
        norms = [row.local_norms[slot] for row in step.rows.values()]
        if all(map(math.isfinite, (*local, *norms))):
            shares = step.all(Flag.SHARDED)  # each rank has a piece of the mean, and of what it put in its share
            mean = math.fsum(local) / (1 if shares else len(local))
            reduced = [row.reduced_sums[slot] for row in step.rows.values()]
            if abs(mean) > 0.01 * math.hypot(*norms):
                ratios.append((math.fsum(reduced) if shares else lowest(step).reduced_sums[slot]) / mean)
    found = middle(ratios)
    return math.nan if found is None else found


def _losses(seen: Seen) -> Iterator[Fact]:
    for one in seen.first_rank(LossInput):
        made = " of ".join(one.value.before) or "nothing else"
        yield seen.fact(5, f"loss {one.value.loss}", "is given the output of", made, one.step, place=one.value.location)
    spread = seen.first_rank(LossBroadcast)
    first, place = (spread[0].step, spread[0].value.location) if spread else (0, None)
    names = ", ".join(dict.fromkeys(one.value.loss for one in spread)) or "none"
    yield seen.fact(5, "", "losses whose shapes are spread over a larger table", names, first, place=place)
    alone = seen.first_rank(SoftmaxOfOne)
    first, place = (alone[0].step, alone[0].value.location) if alone else (0, None)
    yield seen.fact(5, "", "a softmax over a single entry", "yes" if alone else "no", first, place=place)
    for began in seen.first_rank(InitialLoss)[:1]:
        yield seen.fact(5, "classifier", "first loss", began.value.loss, began.step, within=_MAGNITUDES["loss"][0])
        yield seen.fact(5, "classifier", "classes", str(began.value.classes), began.step)
    for ranged in seen.first_rank(TargetRange)[:1]:
        low, high = ranged.value.low, ranged.value.high
        between = "0 and 1" if low >= 0 and high <= 1 else f"{low:.0f} and {high:.0f}"
        yield seen.fact(5, f"loss {ranged.value.loss}", "targets lie between", between, ranged.step)
    for unused in seen.first_rank(UnusedSchedule):
        schedule = unused.value
        value = "never" if not schedule.calls else "for another length than that of the run"
        value = "from its start again" if schedule.begins_again else value
        yield seen.fact(6, schedule.class_name, "is stepped", value, unused.step, place=schedule.location)
