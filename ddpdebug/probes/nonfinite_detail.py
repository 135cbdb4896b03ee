"""The `numerics` detail of a step, from what was seen; on the training thread, or later in the background thread."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from ddpdebug.probes import async_copy as device, ranges
from ddpdebug.probes.nonfinite_notes import Looks
from ddpdebug.probes.record import StepRecord
from ddpdebug.schema.row import Flag

_MAX_NAMES = 64
_MAX_CALLS = 8


def is_bad_call(call: Mapping[str, Any]) -> bool:
    """Tell whether a module call returned what no mask explains: -Inf alone is what masks are made of."""
    return bool(set(call["kinds"]) - {ranges.MINUS_INF})


def summary(record: StepRecord, looks: Looks) -> tuple[Flag, dict[str, Any]]:
    """Return the flags that follow from what was seen in the window, and the detail as far as it is known."""
    names = dict(zip(record.ids, record.names, strict=True))
    near = list(looks.near)
    if record.loss_scale is None:  # a scaler takes scaled gradients to the limit on purpose
        near += _near_gradients(looks, names)
    flags = Flag.FORWARD_NONFINITE if any(is_bad_call(call) for call in looks.forward) else Flag(0)
    flags |= Flag.INPUT_NONFINITE if looks.inputs else Flag(0)
    flags |= Flag.NEAR_OVERFLOW if near else Flag(0)
    detail: dict[str, Any] = {
        "checked": bool(record.flags & Flag.CHECKED) and not looks.compiled,
        "compiled": looks.compiled,
        "loss": looks.loss,
        "loss_line": looks.loss_line,
        "loss_backward": looks.loss_backward,
        "forward": looks.forward,
        "output_finite": looks.output_finite,
        "inputs": looks.inputs,
        "entry": looks.entry,
        "local": [names[key] for key in looks.local if key in names][:_MAX_NAMES],
        "reduced": [],
        "largest": {names[key]: value for key, value in looks.largest.items() if key in names},
        "parameters": {"before": [], "after": [], "state": [], "phase": None},
        "near": near[:_MAX_CALLS],
        "replay": None,
    }
    return flags, detail


def _near_gradients(looks: Looks, names: Mapping[int, str]) -> list[dict[str, Any]]:
    found = [(names[key], *numbers) for key, numbers in looks.near_gradients.items() if key in names]
    return [
        {"module": f"gradient of {name}", "dtype": "16 bits", "largest": largest, "limit": limit, "history": []}
        for name, largest, limit in found
    ]


def complete(record: StepRecord, looks: Looks) -> Callable[[], Flag]:
    """Return what judges a step whose numbers are still on a device; the detail is then in the record."""
    outputs = device.numbers([number for seen in looks.later_outputs for number in seen])
    entries = device.numbers([number for seen in looks.later_entries for number in seen])

    def judge() -> Flag:
        for read in looks.later:
            calls = read()
            looks.forward += [call for call in calls if "kinds" in call][:_MAX_CALLS]
            looks.near += [
                {"module": c["module"], "dtype": c["dtype"], "largest": c["near"], "limit": c["limit"], "history": []}
                for c in calls
                if "near" in c
            ]
        for inputs in looks.later_inputs:
            looks.inputs = looks.inputs or inputs()
        if numbers := outputs():
            looks.output_finite = all(map(math.isfinite, numbers))
        if numbers := entries():
            looks.entry = {"finite": all(map(math.isfinite, numbers)), "range": [min(numbers), max(numbers)]}
        _, local, _, reduced = record.checksums()
        losses = [read_loss() for read_loss in record.window.losses]
        bad_loss = next((value for value in losses if not math.isfinite(value)), None)
        looks.loss = None if bad_loss is None or looks.loss is None else {**looks.loss, "value": bad_loss}
        flags, record.numerics = summary(record, looks)
        record.numerics["local"] = [name for name, norm in local.items() if not math.isfinite(norm)][:_MAX_NAMES]
        record.numerics["reduced"] = [name for name, norm in reduced.items() if not math.isfinite(norm)][:_MAX_NAMES]
        return flags

    return judge
