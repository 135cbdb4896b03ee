"""Replays the forwards of a step until one shows its fault, and says what of it goes into the finding and the bundle.

Loaded and run in a disposable copy of the process; see `investigator.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ddpdebug.clock import time
from ddpdebug.forensics.replay.replay import Trace, replay
from ddpdebug.forensics.replay.stack_lines import line_of
from ddpdebug.isolation.guard import Guard
from ddpdebug.probes.forward_capture import ForwardCapture
from ddpdebug.schema.finding import strict

_MAX_OPERANDS = 3
_MAX_CALLS = 6


def look_at(
    kept: Sequence[ForwardCapture],
    seconds: float,
    guard: Guard | None,
    code: str | None,
    facts: Mapping[str, Any],
    dropped: int,
) -> dict[str, Any]:
    """Return as JSON values what a finding says of the first culprit, and what the bundle's document does.

    Args:
        code: of the finding, if it is known.
        dropped: of the step's forwards, those that were not kept.
    """
    trace, capture = _first_bad(kept, time.monotonic() + seconds, guard)
    found = _compact(trace)
    if len(kept) > 1:
        found["micro_batch"] = capture.number
    if dropped:
        found["notes"] = [*found["notes"], f"{dropped} of the step's first micro-batches were not kept"]
    document = {"code": code or _suggested_code(trace, facts), "replay": trace.to_json()}
    return dict(strict({"found": found, "document": document}))


def _suggested_code(trace: Trace, facts: Mapping[str, Any]) -> str:
    """Return the code of the finding that a replay suggests; `NUM` if it shows nothing."""
    if trace.culprit is None:
        other = "NUM308" if trace.masked else "NUM"
        return "NUM302" if trace.complete and facts.get("loss") else other
    known = {"input": "NUM305", "parameter": "NUM304", "output-gradient": "NUM302"}
    return known.get(trace.culprit.kind, "NUM301" if trace.culprit.phase == "forward" else "NUM303")


def _compact(trace: Trace) -> dict[str, Any]:
    """Return the part of a replay's result that goes into a finding."""
    culprit = trace.culprit
    found: dict[str, Any] = {
        "complete": trace.complete,
        "reason": trace.reason,
        "reproduced": trace.reproduced,
        "notes": trace.notes,
        "seconds": round(trace.seconds, 3),
    }
    if culprit is None:
        if trace.masked:
            first = trace.masked[0]
            found["masked"] = {
                "op": first.name,
                "module": first.module,
                "location": line_of(first.stack[0]) if first.stack else None,
                "operands": first.operands[:_MAX_OPERANDS],
                "ended_at": first.ended_at,
            }
        return found
    return found | {
        "kind": culprit.kind,
        "name": culprit.name,
        "op": culprit.name if culprit.is_operation else None,
        "phase": culprit.phase,
        "value": culprit.value,
        "module": culprit.module,
        "module_class": culprit.module_class,
        "call": culprit.call,
        "node": culprit.node,
        "forward_op": culprit.forward_op if culprit.is_builtin else None,
        "location": trace.location if culprit.is_operation else None,
        "stack": culprit.stack,
        "operands": culprit.operands[:_MAX_OPERANDS],
        "made_of": None
        if culprit.made_of is None
        else {name: getattr(culprit.made_of, name) for name in ("kind", "name", "module", "stack")},
        "became_nan": culprit.became_nan,
        "calls": trace.calls[-_MAX_CALLS:],
    }


def _first_bad(kept: Sequence[ForwardCapture], deadline: float, guard: Guard | None) -> tuple[Trace, ForwardCapture]:
    found: list[tuple[Trace, ForwardCapture]] = []
    for capture in kept:
        trace = replay(capture, seconds=deadline - time.monotonic(), guard=guard)
        found.append((trace, capture))
        if trace.reproduced:
            return trace, capture
    incomplete = [pair for pair in found if not pair[0].complete]
    return (incomplete or found)[0]
