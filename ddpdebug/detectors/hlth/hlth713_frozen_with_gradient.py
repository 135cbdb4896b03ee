"""HLTH713: a parameter has gradients but never changes."""

from __future__ import annotations

import math
from collections.abc import Mapping

from ddpdebug.detectors.hlth.samples import SampledRule, parameters, sampled, weight
from ddpdebug.detectors.kinds import Examples, Fields, Finding, Findings, Severity, Step, Threshold
from ddpdebug.schema.details import LayerParameter
from ddpdebug.schema.row import Flag


class FrozenWithGradient(SampledRule):
    """Over the window the parameter's gradient is not zero and its value stays bitwise the same.

    Where its group has a learning rate of 0, which is a way to freeze for a while, this is `info`.

    Impact: this part of the model does not train; the loss may still fall because the rest does.

    Diagnosis: find the parameter by identity in the optimizer (`any(q is p for g in optimizer.param_groups for q in
    g["params"])`) and print its group's lr. If it is there and lr is positive, compare lr times the update with the
    spacing of the dtype at the weight's size: bfloat16 swallows a relative change below about 0.2 to 0.4 percent.
    Then look for code that writes the parameter back.

    Causes:
    - `rounded away`: bfloat16 or float16 weights that round the update away
    - `rate`: its group has learning rate 0 or a schedule that never raises it
    - `set back`: the value is restored every step: a copy from an EMA, a tied source, a projection or a clamp
    - the optimizer does not hold this object: built before the module was replaced, or only given some groups
    - every step is skipped by the gradient scaler

    Remedy:
    - `rounded away`: keep float32 weights and use `torch.autocast`, or an optimizer with float32 master weights or
      stochastic rounding
    - `set back`: find the code that writes the parameter after the step, or leave the parameter out of the
      optimizer
    - `rate`: raise the group's rate where it was not meant to be frozen, or check what raises it later
    - build the optimizer after the model is final; add late parameters with `optimizer.add_param_group`
    - set `requires_grad_(False)` where freezing was meant, which also saves the gradient and its reduction
    """

    code = "HLTH713"
    severity = Severity.ERROR
    title = "a parameter has gradients but never changes"
    never_changed_rounding = Threshold(
        1e-06,
        "gradient per element as a share of the model's largest that is rounding",
        source="ten times the epsilon of float32; a gradient that cancels in the loss measured 6e-9",
    )
    never_changed_samples = Threshold(
        4, "samples of a parameter that shall have changed", source="as `never_changed_steps`"
    )
    never_changed_steps = Threshold(
        16,
        "steps over which a parameter with gradients keeps all its bits",
        source="Amazon SageMaker Debugger's built-in rule UnchangedTensor waits for 3 steps; longer, because of "
        "warm-ups that begin at 0",
    )
    fires_on = Examples(
        lambda: sampled(24, lambda i: {"w": weight(digest="a"), "v": weight(digest=f"{i}")}),
        lambda: sampled(
            24, lambda i: {"norm.weight": weight(digest="a", update=0.0, dim=1), "v": weight(digest=f"{i}")}
        ),
    )
    silent_on = Examples(
        lambda: sampled(24, lambda i: {"w": weight(digest="a" if i < 10 else f"{i}")}),  # a warm-up that begins at 0
        lambda: sampled(24, lambda i: {"w": weight(digest="a", grad_norm=0.0)}),  # HLTH714
        lambda: sampled(40, lambda i: {"w": weight(digest=f"{min(i, 8)}")}),  # it has converged
        lambda: sampled(24, lambda i: {"w": weight(digest="a")}, flags=Flag.SKIPPED),
        lambda: sampled(  # the loss takes differences of outputs, in which the bias cancels
            24, lambda i: {"w": weight(digest=f"{i}"), "b": weight(digest="a", grad_norm=6e-9, numel=8, dim=1)}
        ),
    )

    def __init__(self, config: Fields | None = None) -> None:
        super().__init__(config)
        self._first: dict[tuple[int, str], tuple[int, str, int]] = {}  # -> (step, digest, samples)
        self._changed: set[tuple[int, str]] = set()

    def detect(self, step: Step) -> Findings:
        found: dict[bool, list[str]] = {True: [], False: []}
        table = parameters(step)
        if not table or step.any(Flag.SKIPPED | Flag.GUARD_SKIPPED | Flag.LOCAL_ONLY):
            return
        least = self.never_changed_rounding * max(map(_per_element, table.values()))
        for name, about in table.items():
            key = (step.optimizer, name)
            if key in self._changed or not about.digest:
                continue
            first, digest, samples = self._first.get(key, (step.step, about.digest, 0))
            if digest != about.digest or _per_element(about) <= least:
                self._changed.add(key)
                continue
            self._first[key] = first, digest, samples + 1
            if samples + 1 >= self.never_changed_samples and step.step - first >= self.never_changed_steps:
                self._changed.add(key)
                found[about.lr == 0].append(name)
        for without_rate, names in found.items():
            if names:
                yield self._report(step, names, table, without_rate=without_rate)

    def _report(
        self, step: Step, names: list[str], table: Mapping[str, LayerParameter], *, without_rate: bool
    ) -> Finding:
        about = table[names[0]]
        observed = None
        if about.lr and about.update is not None:
            observed = (
                "the update is rounded away" if about.update == 0 else "the optimizer changes it, and it is set back"
            )
        return self.finding(
            step,
            step=min(self._first[step.optimizer, name][0] for name in names),
            subject=tuple(names[:20]),
            phase="rate" if without_rate else None,
            severity=Severity.INFO if without_rate else self.severity,
            evidence={
                "observed": observed,
                "lr": about.lr,
                "gradient_norm": about.grad_norm,
                "weight_norm": about.norm,
                "update_by_the_optimizer": about.update,
                "parameters": len(names),
            },
        )


def _per_element(about: LayerParameter) -> float:
    """Return the size of a parameter's gradient per element, 0 where it has none."""
    size = (about.grad_norm or 0.0) / math.sqrt(max(1, about.numel))
    return size if math.isfinite(size) else 0.0
