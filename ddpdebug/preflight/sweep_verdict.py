"""Compares the script's learning rate with what a sweep has shown. Pure.

| the script's rate | verdict | where the bound comes from |
|---|---|---|
| more than 10 times the rate that breaks training | fail | a warm-up seldom begins below a tenth of its peak |
| at or above the rate that breaks training | warn | Smith 2017: the highest usable rate is where the curve turns |
| less than 1/300 of the lower suggestion | warn | Adam at 1e-4 and fine-tuning keep within that, also of small models |
| no rate lowers the loss | warn; info where the loss scatters by its own size | |
| anything else | pass | |
| zero | info | a warm-up may begin there |
"""

from __future__ import annotations

from typing import Any

from ddpdebug.preflight.checks.lr_sweep import End, Sweep
from ddpdebug.preflight.output.results import Check, Status
from ddpdebug.sinks.text import number

GROUP, NAME = "learning rate", "sweep"
#: See the module's table.
FAR_ABOVE, FAR_BELOW = 10.0, 300.0

_TOO_HIGH = (
    "the learning rate is too high for this optimizer, for example one of SGD's given to Adam",
    "it is the peak of a warm-up that the sweep does not know: then its first steps are lower",
    "gradients are large because of the initialisation or a sum instead of a mean in the loss",
)
_TOO_LOW = (
    "the learning rate is too low, for example one for fine-tuning used from scratch",
    "it is where a warm-up begins: then the peak is what counts",
    "the loss is divided once too often, which SGD feels as a lower rate",
)
_FLAT = (
    "the loss does not depend on what the optimizer trains: frozen, detached, or other parameters",
    "the batches differ by more than a hundred steps can win: the sweep needs larger batches",
    "the model is at a minimum already: a checkpoint, or a loss that begins at its floor",
)


def skipped(words: str) -> Check:
    """Return the check that was not done."""
    return Check(group=GROUP, name=NAME, status=Status.SKIPPED, summary=words)


def verdict(sweep: Sweep) -> Check:
    """Return what the sweep says about the script's learning rate."""
    if sweep.end is End.TIME or len(sweep.losses) < 2:
        return _unfinished(sweep)
    if sweep.steepest is None or sweep.tenth is None:
        return _flat(sweep)
    advice = f"steepest descent at {number(sweep.steepest, 2)}, minimum / 10 at {number(sweep.tenth, 2)}"
    last = number(sweep.rates[-1], 2)
    edge = f"nothing breaks up to {last}" if sweep.edge is None else f"training breaks at {number(sweep.edge, 2)}"
    words = f"the loss falls fastest at {number(sweep.steepest, 2)}, {edge}"
    current, evidence = sweep.current, _evidence(sweep)
    if current == 0:
        return _check(Status.INFO, f"{words}; the script begins at a learning rate of 0", sweep, evidence)
    words = f"{words}; the script's learning rate is {number(current, 3)}"
    actions = (f"try a learning rate between {_between(sweep)} ({advice})",)
    if sweep.edge is not None and current >= sweep.edge:
        status = Status.FAIL if current > FAR_ABOVE * sweep.edge else Status.WARN
        text = f"{words}: {_times(current / sweep.edge)} times what breaks it"
        return _check(status, text, sweep, evidence, "HLTH710", _TOO_HIGH, actions)
    if current < min(sweep.steepest, sweep.tenth) / FAR_BELOW:
        text = f"{words}: {_times(sweep.steepest / current)} times lower"
        return _check(Status.WARN, text, sweep, evidence, "HLTH709", _TOO_LOW, actions)
    return _check(Status.PASS, f"{words} ({advice})", sweep, evidence)


def _unfinished(sweep: Sweep) -> Check:
    if sweep.end is End.TIME:
        return _check(Status.SKIPPED, f"{End.TIME.value} after {len(sweep.losses)} steps", sweep, _evidence(sweep))
    causes = (
        "the loss or a gradient is NaN before anything is trained: see the steps before",
        "the first update alone breaks the model, at whatever rate",
    )
    actions = ("run the script with `ddpdebug run`: it names the operation that makes the first NaN",)
    text = "the loss was not finite from the beginning, at the lowest learning rate"
    return _check(Status.FAIL, text, sweep, {"steps": len(sweep.losses)}, "NUM302", causes, actions)


def _flat(sweep: Sweep) -> Check:
    if sweep.too_noisy:
        words = "the loss scatters by its own size from batch to batch: no learning rate can be told from another"
        return _check(Status.INFO, words, sweep, _evidence(sweep))
    ends = f"{number(min(sweep.losses), 4)} to {number(max(sweep.losses), 4)}"
    text = f"no learning rate from {number(sweep.rates[0], 2)} to {number(sweep.rates[-1], 2)} lowers the loss ({ends})"
    actions = ("see whether one batch can be overfitted, and which parameters get gradients",)
    return _check(Status.WARN, text, sweep, _evidence(sweep), "HLTH709", _FLAT, actions)


def _times(ratio: float) -> str:
    return f"{ratio:.0f}" if 10 <= ratio < 1e6 else number(ratio, 2)


def _between(sweep: Sweep) -> str:
    low, high = sorted(rate for rate in (sweep.steepest, sweep.tenth) if rate is not None)
    return f"{number(low, 2)} and {number(high, 2)}"


def _evidence(sweep: Sweep) -> dict[str, Any]:
    return {
        "steepest_descent": sweep.steepest,
        "minimum_by_10": sweep.tenth,
        "breaks_at": sweep.edge,
        "script": sweep.current,
        "steps": len(sweep.losses),
        "ended": sweep.end.value,
    }


def _check(
    status: Status,
    summary: str,
    sweep: Sweep,
    evidence: dict[str, Any],
    code: str = "",
    hypotheses: tuple[str, ...] = (),
    actions: tuple[str, ...] = (),
) -> Check:
    return Check(
        group=GROUP,
        name=NAME,
        status=status,
        summary=summary,
        code=code,
        evidence=evidence,
        hypotheses=hypotheses,
        actions=actions,
        plots=(sweep.plot(),) if sweep.losses else (),
    )
