"""The `numerics` detail of a step from recorded numbers; on the training thread, or later in the background thread."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace

from ddpdebug.isolation.user_code import location
from ddpdebug.probes import async_copy as device, ranges
from ddpdebug.probes.loop_calls import Losses
from ddpdebug.probes.nonfinite_notes import Judgement, Looks
from ddpdebug.probes.record import StepRecord
from ddpdebug.probes.step_digests import GradientDigests
from ddpdebug.schema.details import EntryGradient, ModuleCall, NearLimit, NonfiniteParameters, Numerics
from ddpdebug.schema.row import Flag

_MAX_NAMES = 64
_MAX_CALLS = 8


def is_bad_call(call: ModuleCall) -> bool:
    """Return whether a module call returned non-finite values other than -Inf, which masks consist of."""
    return bool(set(call.kinds) - {ranges.MINUS_INF})


def summary(record: StepRecord, looks: Looks) -> tuple[Flag, Numerics]:
    """Return the flags from the notes since the last step, and the detail as far as known."""
    names = dict(zip(record.ids, record.names, strict=True))
    near = list(looks.near)
    if record.since.parts[Losses].scale is None:  # a scaler takes scaled gradients to the limit on purpose
        near += _near_gradients(looks, names)
    flags = Flag.FORWARD_NONFINITE if any([is_bad_call(call) for call in looks.forward]) else Flag(0)
    flags |= Flag.INPUT_NONFINITE if looks.inputs else Flag(0)
    flags |= Flag.NEAR_OVERFLOW if near else Flag(0)
    detail = Numerics(
        checked=record.checked and not looks.compiled,
        compiled=looks.compiled,
        loss=looks.loss,
        loss_line=looks.loss_line,
        loss_backward=looks.loss_backward,
        forward=tuple(looks.forward),
        model=looks.model,
        called_at=None if looks.called is None else location(*looks.called),
        output_finite=looks.output_finite,
        inputs=tuple(looks.inputs),
        entry=looks.entry,
        local=tuple([names[key] for key in looks.local if key in names])[:_MAX_NAMES],
        largest={names[key]: value for key, value in looks.largest.items() if key in names},
        parameters=NonfiniteParameters(),
        near=tuple(near[:_MAX_CALLS]),
    )
    return flags, detail


def _near_gradients(looks: Looks, names: Mapping[int, str]) -> list[NearLimit]:
    return [
        NearLimit(module=f"gradient of {names[key]}", dtype="16 bits", largest=largest, limit=limit)
        for key, (largest, limit) in looks.near_gradients.items()
        if key in names
    ]


def complete(record: StepRecord, looks: Looks) -> Callable[[], Flag]:
    """Return the function that judges a step whose numbers are still on a device; it also completes the detail."""
    both = device.numbers([number for seen in (*looks.later_outputs, *looks.later_entries) for number in seen])
    of_outputs = 2 * len(looks.later_outputs)

    def judge() -> Flag:
        for read in looks.later:
            calls = read()
            looks.forward += [call for call in calls if isinstance(call, ModuleCall)][:_MAX_CALLS]
            looks.near += [call for call in calls if isinstance(call, NearLimit)]
        for inputs in looks.later_inputs:
            looks.inputs = looks.inputs or inputs()
        outputs, entries = (numbers := both())[:of_outputs], numbers[of_outputs:]
        if outputs:
            looks.output_finite = all(map(math.isfinite, outputs))
        if entries:
            span = min(entries), max(entries)
            looks.entry = EntryGradient(finite=all(map(math.isfinite, entries)), range=span)
        _, local, _, reduced = record.parts[GradientDigests].checksums()
        losses = [read_loss() for read_loss in record.since.parts[Losses].given]
        bad_loss = next(iter([value for value in losses if not math.isfinite(value)]), None)
        looks.loss = None if bad_loss is None or looks.loss is None else replace(looks.loss, value=bad_loss)
        flags, detail = summary(record, looks)
        bad_local, bad_reduced = (
            tuple([name for name, norm in norms.items() if not math.isfinite(norm)])[:_MAX_NAMES]
            for norms in (local, reduced)
        )
        record.parts[Judgement].detail = replace(detail, local=bad_local, reduced=bad_reduced)
        return flags

    return judge
