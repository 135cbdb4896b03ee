"""Agreement between the ranks in one step, by a vote over digests: for the terminal's summary and for metrics.

Facts, not verdicts: whether a difference is a mistake is for the detectors. Differences that a rank's own state
declares as intended (sharded state, local SGD, Join) do not count, nor do those of optimizer state beside parameters
that the step has left equal: each rank has that of what it owns. That the ranks agree nevertheless does.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from ddpdebug.schema.row import Flag
from ddpdebug.schema.step import Step, outvoted

#: What is compared -> the digests that say so.
COMPARED = {
    "parameters": ("params_before_digest", "params_after_digest", "frozen_params_digest"),
    "gradients": ("grads_digest",),
    "optimizer_state": ("state_digest",),
    "hyperparameters": ("hyper_digest",),
    "buffers": ("buffers_digest",),
    "modes": ("modes_digest",),
}
#: Likewise, of the classes of sharded parameters.
_OF_CLASSES = {"parameters": "params", "gradients": "grads", "optimizer_state": "state"}
_REPLICAS_DIFFER = Flag.LOCAL_ONLY | Flag.IN_JOIN
_INTENDED = {
    "parameters": _REPLICAS_DIFFER,
    "gradients": _REPLICAS_DIFFER,
    "optimizer_state": _REPLICAS_DIFFER | Flag.SHARDED_STATE,
    "buffers": _REPLICAS_DIFFER,
}


def dissenters(step: Step) -> Mapping[str, frozenset[int]]:
    """Return, for each thing compared in this step, the ranks that were outvoted (all, without a majority).

    Computed once per step, whoever asks.
    """
    if "dissenters" not in step.memo:
        step.memo["dissenters"] = _dissenters(step)
    found: Mapping[str, frozenset[int]] = step.memo["dissenters"]
    return found


def is_certified(step: Step) -> bool:
    """Whether FSDP2's gathers, or its reductions, were checked on all ranks: results against inputs."""
    rows = step.rows.values() if step.any(Flag.SHARDED) and len(step.rows) > 1 else ()
    gathered = all(row.gathered_values for row in rows)
    return bool(rows) and (gathered or all(math.isfinite(value) for row in rows for value in row.reduced_sums))


def _dissenters(step: Step) -> dict[str, frozenset[int]]:
    found: dict[str, frozenset[int]] = {}
    if len(step.rows) < 2:
        return found
    left_alike = step.agrees("params_after_digest") and "foreign_params_digest" not in step.differing
    for what, names in COMPARED.items():
        intended = what in _INTENDED and step.any(_INTENDED[what])
        intended |= what == "optimizer_state" and left_alike
        for name in names[:1] if intended else names:  # of averaged ones, those before the step
            if name not in step.differing:
                if sum(map(bool, step.columns[name])) > 1:
                    found.setdefault(what, frozenset())
            elif not intended:
                found[what] = found.get(what, frozenset()) | {*step.minority(name)}
        for shown in step.replicas(_OF_CLASSES[what]).values() if what in _OF_CLASSES and not intended else ():
            if len(shown) > 1:
                found[what] = found.get(what, frozenset()) | {*outvoted(shown)}
    return found
