"""Golden runs: loss, gradient norm and parameters of each step, recorded and compared bit by bit. Torch-free.

On the platform of the recording the path is compared bit by bit. Elsewhere it may differ by rounding, and how much that
is follows from the script itself: the recording runs it once more with every weight moved by a rounding error after
each step, and what comes of that, up to a step, is what may differ there.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

from ddpdebug.schema.step import Step

#: `<1 for a shaken run, else 0> <file>`: where rank 0 writes its path.
TRAJECTORY = "DDPDEBUG_TRAJECTORY"
_VERSION = 1
_MAX_BYTES = 256 << 20
#: What one shaken run shows is one draw; another order of summation is another. Four standard deviations cover them.
_SAFETY = 4.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """The state after one optimizer step: loss, gradient norm, and fingerprint and 2-norm of each parameter by name."""

    optimizer: int
    step: int
    loss: float | None
    grad_norm: float | None
    params: Mapping[str, tuple[str, float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Course:
    """The states of a run after each of its steps, with the platform and its relative rounding error `epsilon`."""

    platform: Mapping[str, Any]
    epsilon: float
    moments: Sequence[Moment]


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The result of comparing a run with a recording; `what` is None where they are the same."""

    steps: int
    exact: bool
    what: str | None = None
    step: int | None = None
    parameter: str | None = None
    expected: float | str | None = None
    found: float | str | None = None
    allowed: float | None = None

    @property
    def words(self) -> str:
        """What a person should read of it."""
        how = "bit by bit" if self.exact else "within the rounding error of another platform"
        if self.what is None:
            return f"{self.steps} steps as recorded, {how}"
        place = "" if self.step is None else f" at step {self.step}"
        subject = f", first in {self.parameter}" if self.parameter else ""
        values = "" if self.expected is None else f": recorded {self.expected}, now {self.found}"
        return f"leaves the recorded path{place}{subject} ({self.what}{values}; compared {how})"


def read_path(file: Path, steps: Iterable[Step]) -> Course:
    """Read what rank 0 wrote of a run, with the losses and gradient norms of its rows."""
    rows = {(step.optimizer, step.step): list(step.rows.values()) for step in steps}
    platform: Mapping[str, Any] = {}
    epsilon, moments = 0.0, []
    for line in file.read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        if "platform" in record:
            platform, epsilon = record["platform"], float(record["epsilon"])
            continue
        place = int(record["optimizer"]), int(record["step"])
        known = rows.get(place, [])
        moments.append(
            Moment(
                optimizer=place[0],
                step=place[1],
                loss=_finite(math.fsum(row.loss for row in known) / len(known)) if known else None,
                grad_norm=_finite(known[0].grad_norm) if known else None,
                params={name: (str(digest), float(norm)) for name, (digest, norm) in record["params"].items()},
            )
        )
    return Course(platform=platform, epsilon=epsilon, moments=moments)


def recording(first: Course, second: Course, shaken: Course, world: int) -> dict[str, Any]:
    """Return the content of a golden file from two runs as they are and one that was shaken."""
    exact = first.moments == second.moments
    floor = _SAFETY * first.epsilon
    allowed = [
        max(floor, _SAFETY * a, _SAFETY * b) for a, b in zip(_drift(first, second), _drift(first, shaken), strict=True)
    ]
    moments = [{**asdict(moment), "allowed": limit} for moment, limit in zip(first.moments, allowed, strict=False)]
    platform = {**first.platform, "world": world}
    return {"version": _VERSION, "exact": exact, "platform": platform, "steps": moments}


def load(file: Path) -> dict[str, Any]:
    """Read a golden file; raise ValueError on anything else."""
    if file.stat().st_size > _MAX_BYTES:
        raise ValueError("it is too large for a golden file")
    record = json.loads(file.read_text(encoding="utf-8"))
    if not isinstance(record, dict) or record.get("version") != _VERSION:
        raise ValueError(f"it is no golden file of version {_VERSION}")
    try:
        moments = [_moment(entry) for entry in record["steps"]]
        limits = [float(entry["allowed"]) for entry in record["steps"]]
        platform, exact = dict(record["platform"]), record["exact"] is True
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"it is damaged: {type(error).__name__}: {error}") from None
    return {"moments": moments, "limits": limits, "platform": platform, "exact": exact}


def compare(golden: Mapping[str, Any], path: Course, world: int) -> Comparison:
    """Find the first step, and in it the first parameter, in which a run leaves the recorded path.

    Args:
        golden: as `load` returns it.
    """
    exact = bool(golden["exact"]) and golden["platform"] == {**path.platform, "world": world}
    count = min(len(golden["moments"]), len(path.moments))
    if count == 0:
        return Comparison(steps=0, exact=exact, what="there is no optimizer step to compare")
    scale = _Scale()
    for old, new, limit in zip(golden["moments"], path.moments, golden["limits"], strict=False):
        found = _departs(old, new, None if exact else limit, scale)
        if found is not None:
            return Comparison(steps=count, exact=exact, step=old.step, **found)
    return Comparison(steps=count, exact=exact)


class _Scale:
    """The largest loss and gradient norm so far: differences are relative to them, since both may come near zero."""

    def __init__(self) -> None:
        self._largest: dict[str, float] = {}

    def relative(self, name: str, old: float, new: float) -> float:
        largest = self._largest[name] = max(self._largest.get(name, 0.0), abs(old))
        if old == new:
            return 0.0
        return abs(new - old) / largest if largest else math.inf


def _departs(old: Moment, new: Moment, limit: float | None, scale: _Scale) -> dict[str, Any] | None:
    if (old.optimizer, old.step) != (new.optimizer, new.step):
        return {"what": f"optimizer {new.optimizer} takes its step {new.step} here"}
    if list(old.params) != list(new.params):
        odd = next(iter(set(old.params) ^ set(new.params)), "the order of the parameters")
        return {"what": "other parameters", "parameter": odd}
    for name, (digest, norm) in old.params.items():
        now = new.params[name]
        far = digest != now[0] if limit is None else scale.relative(name, norm, now[1]) > limit
        if far:
            same = norm == now[1]
            values = {"expected": digest, "found": now[0]} if same else {"expected": norm, "found": now[1]}
            return {"what": "fingerprint" if same else "norm", "parameter": name, "allowed": limit, **values}
    for what, a, b in (("loss", old.loss, new.loss), ("gradient norm", old.grad_norm, new.grad_norm)):
        if (a is None) != (b is None) or (
            a is not None and b is not None and scale.relative(what, a, b) > (0.0 if limit is None else limit)
        ):
            return {"what": what, "expected": a, "found": b, "allowed": limit}
    return None


def _drift(first: Course, other: Course) -> list[float]:
    """Return, for every step, the largest relative difference up to it."""
    scale, worst, drift = _Scale(), 0.0, []
    for old, new in zip_longest(first.moments, other.moments[: len(first.moments)]):
        if new is not None:
            values = [(name, norm, new.params[name][1]) for name, (_, norm) in old.params.items() if name in new.params]
            values += [("loss", old.loss or 0.0, new.loss or 0.0)]
            values += [("gradient norm", old.grad_norm or 0.0, new.grad_norm or 0.0)]
            worst = max(worst, *(scale.relative(*value) for value in values))
        drift.append(worst)
    return drift


def _moment(entry: Mapping[str, Any]) -> Moment:
    params = {str(name): (str(value[0]), float(value[1])) for name, value in entry["params"].items()}
    loss, norm = (None if entry[key] is None else float(entry[key]) for key in ("loss", "grad_norm"))
    return Moment(optimizer=int(entry["optimizer"]), step=int(entry["step"]), loss=loss, grad_norm=norm, params=params)


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
