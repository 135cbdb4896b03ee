"""RCP813: gradients are clipped before they are unscaled."""

from __future__ import annotations

from typing import Any

from ddpdebug.detectors.examples import steps
from ddpdebug.detectors.kinds import Examples, Fields, Severity
from ddpdebug.detectors.rcp.habits import StepHabit
from ddpdebug.schema.details import ScaledClip
from ddpdebug.schema.row import Flag

_OTHERS: dict[str | None, Fields] = {
    "idle": {
        "severity": Severity.WARNING,
        "title": "gradients are clipped after the step, or before backward: no step uses the result",
        "phase": "after the step",
        "causes": (
            "clipping stands after `optimizer.step()`, or before `backward()`: the step sees gradients as they came",
            "a loop was reordered, and the call stayed behind",
            "intended: the norm is only read, by a limit that nothing reaches",
        ),
        "actions": ("clip between the last `backward()` of a step and `optimizer.step()`",),
    },
    "nothing": {
        "severity": Severity.WARNING,
        "title": "clipping is given parameters without gradients: nothing is clipped",
        "phase": "no gradients",
        "causes": (
            "`params = model.parameters()` is a generator, and the optimizer or the first clipping has used it up",
            "a list of another model's parameters, or of those that were replaced (a new head, a load by assignment)",
        ),
        "actions": ("clip `model.parameters()`, called anew each time, or keep `list(model.parameters())`",),
    },
    "early": {
        "severity": Severity.WARNING,
        "title": "gradients are clipped once a micro-batch, while they still add up",
        "phase": "micro-batches",
        "causes": (
            "clipping stands in the loop over micro-batches: the sum so far is cut, the first ones count less",
            "intended: the norm is only read, by a limit that nothing reaches",
        ),
        "actions": (
            "clip once, after the last `backward()` of a step; with Accelerate under `if accelerator.sync_gradients`",
        ),
    },
    "layers": {
        "severity": Severity.WARNING,
        "title": "a part of each layer is clipped: its weight and not its bias, or the other way round",
        "phase": "part of a layer",
        "causes": (
            "only one of the optimizer's groups is clipped: with groups by weight decay, what decays",
            "a list of parameters that was filtered for something else, such as weight decay",
        ),
        "actions": ("clip `model.parameters()`: one norm over all that the step uses",),
    },
    "step": {
        "severity": Severity.WARNING,
        "title": "the optimizer step uses gradients that are still multiplied by the loss scale",
        "phase": "still scaled",
        "causes": (
            "`optimizer.step()` instead of `scaler.step(optimizer)`: nothing unscales, or looks for infinities",
            "the gradients are unscaled by hand, after the look at them",
        ),
        "actions": (
            "`scaler.scale(loss).backward(); scaler.step(optimizer); scaler.update()`",
            "with bfloat16 leave the scaler out",
        ),
    },
    "never": {
        "severity": Severity.WARNING,
        "title": "float16 training without a GradScaler: small gradients become zero",
        "phase": "float16",
        "causes": (
            "`autocast(dtype=torch.float16)` without `GradScaler`, or with one that is not enabled",
            "a change from bfloat16, which needs no scaler, to float16",
        ),
        "actions": ("use `torch.amp.GradScaler`", "or bfloat16, where the device has it"),
    },
    "part": {
        "severity": Severity.WARNING,
        "title": "gradients of a loss that was never scaled are divided by the scale",
        "phase": "partly scaled",
        "causes": (
            "`scaler.scale(loss) + other`, or a `backward()` of a loss that was not given to `scaler.scale`",
            "several optimizers with one scaler: the loss of one is scaled, that of another is not",
            "a penalty whose gradients are added to scaled ones",
        ),
        "actions": ("scale all that a step uses: `scaler.scale(loss + other).backward()`",),
    },
}


class ClipBeforeUnscale(StepHabit):
    """Clipping ran on gradients that still carried the loss scale; they were unscaled later.

    Or it ran between a step and the next backward, after each micro-batch, on what has no gradients, or on a part of
    each layer; or a step used scaled ones, some of both, or such in float16.

    Impact: with a scale of 65536 nearly every gradient exceeds the threshold, so that after unscaling its norm is
    at most max_norm / scale: SGD hardly moves, in Adam eps takes over, and the step length depends on the loss
    scale.

    Diagnosis: read the order of the calls: backward, unscale, clip, step, update. Print the norm that
    `clip_grad_norm_` returns: values of 1e4 and more that follow `scaler.get_scale()` confirm it.

    Causes:
    - `clip_grad_norm_` without `scaler.unscale_(optimizer)` before it
    - `unscale_` called on another optimizer than the one whose gradients are clipped
    - a framework's clipping option combined with a hand-written scaler

    Remedy:
    - `scaler.scale(loss).backward(); scaler.unscale_(optimizer); clip_grad_norm_(params, max_norm);
      scaler.step(optimizer); scaler.update()`
    - call `unscale_` once per optimizer and step, after the last micro-batch of an accumulation
    - the same order holds for anything that reads gradient values: noise, logging, manual decay
    """

    code = "RCP813"
    severity = Severity.ERROR
    title = "gradients are clipped before they are unscaled"
    flag = Flag.CLIPPED_SCALED
    key = "clip"
    fires_on = Examples(
        lambda: steps(
            3,
            flags=Flag.CLIPPED_SCALED,
            recipe={r: {"clip": {"location": "train.py:70", "scale": 65536.0}} for r in range(4)},
        ),
        lambda: steps(3, flags=Flag.CLIPPED_SCALED | Flag.SKIPPED),
        lambda: steps(3, flags=Flag.CLIPPED_SCALED, recipe={0: {"clip": {"location": "train.py:70", "idle": True}}}),
        lambda: steps(3, flags=Flag.CLIPPED_SCALED, recipe={0: {"clip": {"location": "t.py:7", "instead": "nothing"}}}),
        lambda: steps(3, flags=Flag.CLIPPED_SCALED, recipe={0: {"clip": {"location": "t.py:7", "instead": "layers"}}}),
        lambda: steps(3, flags=Flag.CLIPPED_SCALED, recipe={0: {"clip": {"location": "t.py:7", "instead": "early"}}}),
        lambda: steps(3, flags=Flag.CLIPPED_SCALED, recipe={0: {"clip": {"scale": 512.0, "instead": "step"}}}),
        lambda: steps(3, flags=Flag.CLIPPED_SCALED, recipe={0: {"clip": {"instead": "part"}}}),
    )
    silent_on = Examples(
        lambda: steps(5, flags=Flag.CLIPPED),
        lambda: steps(2, flags=Flag.CLIPPED_SCALED),
    )

    def describe(self, about: ScaledClip) -> dict[str, Any]:
        evidence = {"scale": about.scale} if about.scale is not None else {}
        kind = _OTHERS.get("idle" if about.idle else about.instead, {})
        return {"location": about.location, "evidence": evidence, **kind}
