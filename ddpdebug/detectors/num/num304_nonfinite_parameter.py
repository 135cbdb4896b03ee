"""NUM304: parameters or optimizer state become non-finite without a non-finite gradient."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ddpdebug.detectors.comparison import MAX_NAMES
from ddpdebug.detectors.examples import step_at, steps
from ddpdebug.detectors.kinds import Examples, Finding, Step, Verdict
from ddpdebug.detectors.num.nonfinite import NonfiniteRule, known_of, seen
from ddpdebug.schema.row import Flag

_MADE = {"before": [], "after": ["head.weight"], "state": [["head.weight", "exp_avg_sq"]], "phase": "optimizer"}
_FOUND = {"before": ["embedding.weight"], "after": [], "state": [], "phase": "outside-optimizer"}
_LEFT = {0: seen(parameters={"before": ["head.weight"], "after": [], "state": [], "unwatched_since": 71})}
_AFTER = {rank: seen(parameters=_MADE) for rank in range(4)}
_BEFORE: dict[int, Any] = {2: {"flags": Flag.PARAMS_NONFINITE | Flag.LOSS_NONFINITE}}


_UNSEEN = "a parameter or optimizer state is non-finite, from a step that was not looked at"
#: What made it where nobody has looked at the gradients; the first where these are reduced in 16 bits or by a hook.
_UNSEEN_CAUSES = (
    "gradients of the step before that overflowed in their reduction: in 16 bits, or in a communication hook (NUM309)",
    "gradients of the step before that were non-finite on a rank (NUM303), or came of a loss that was (NUM302)",
)
_LOOK = "run again with `--every-step`, which looks at the gradients of the step that made it"


class NonfiniteParameter(NonfiniteRule):
    """Gradients were finite, and weights or moments are non-finite after the step, or were so before the forward.

    Phase `optimizer`: the optimizer step made it. Phase `outside-optimizer`: something wrote it between two steps. No
    phase: it was there before anybody looked.

    Impact: the model is lost from this step on; a checkpoint written afterwards is lost as well.

    Diagnosis: print dtype, eps and lr of the parameter's group and `optimizer.state[p]` of the named parameter: a zero
    `exp_avg_sq` beside a non-zero `exp_avg` shows the division. Check `torch.tensor(eps, dtype=p.dtype)`. If the
    parameter was bad before the forward, look at what ran between the two steps: checkpoint load, EMA swap, weight
    surgery, a parameter made with `torch.empty`.

    Causes:
    - `optimizer`: an update that divides by zero (Adam's eps=1e-8 is 0 in float16; a trust ratio or a norm of a
      gradient that is exactly 0), or a learning rate that is nan or inf (a schedule that divides by zero steps)
    - `optimizer`: a float16 second moment that overflows: the square of any gradient above 256 exceeds 65504
    - `outside-optimizer`, `from the start`: a checkpoint, an average or a half-precision copy that was already
      non-finite when it was loaded
    - `outside-optimizer`, `from the start`: a parameter created with `torch.empty` that no initialiser covered, or a
      row written by hand

    Remedy:
    - `optimizer`: keep the parameters in float32 and use `torch.autocast` with a gradient scaler instead of
      `model.half()`, or an eps that the dtype can hold; put an eps into each division of an optimizer of your own
    - `outside-optimizer`, `from the start`: load or write finite values: `assert all(p.isfinite().all() for p in
      model.parameters())` after loading
    - restart from the last checkpoint whose parameters and optimizer state are finite: skipping the step does not
      repair moments
    """

    code = "NUM304"
    title = "a parameter or optimizer state is non-finite although the gradients were finite"
    fires_on = Examples(
        lambda: step_at(7, flags=Flag.STEP_NONFINITE, numerics=_AFTER),
        lambda: step_at(7, odd=_BEFORE, numerics={2: seen(parameters=_FOUND)}),
        lambda: step_at(7, flags=Flag.PARAMS_NONFINITE),
        lambda: step_at(90, flags=Flag.PARAMS_NONFINITE | Flag.ALONE, numerics=_LEFT),
    )
    silent_on = Examples(
        lambda: steps(3),
        lambda: step_at(7, flags=Flag.STEP_NONFINITE | Flag.SKIPPED, numerics=_AFTER),
        lambda: step_at(7, flags=Flag.LOSS_NONFINITE),
    )

    def word(self, step: Step, verdict: Verdict) -> Finding:
        finding = super().word(step, verdict)
        if verdict.phase is None and "seen_at" in verdict.evidence and step.step:
            reduced = step.any(Flag.HALF_REDUCTION | Flag.CUSTOM_REDUCTION)
            unseen = _UNSEEN_CAUSES if reduced else _UNSEEN_CAUSES[1:]
            evidence = {**finding.evidence, "gradients_before": "not looked at in the step that made it"}
            actions = (_LOOK, *finding.actions)
            return replace(
                finding, title=_UNSEEN, causes=(*unseen, *finding.causes), actions=actions, evidence=evidence
            )
        return finding

    @classmethod
    def verdict(cls, step: Step) -> Verdict | None:
        before = step.ranks_with(Flag.PARAMS_NONFINITE)
        # after a bad loss or gradient the optimizer hands on what it was given
        given = step.any(Flag.LOSS_NONFINITE | Flag.LOCAL_GRADS_NONFINITE | Flag.GRADS_NONFINITE)
        ranks = before or (() if given else step.ranks_with(Flag.STEP_NONFINITE))
        if not ranks:
            return None
        known = known_of(step)
        found = [parameters for rank in ranks if rank in known and (parameters := known[rank].parameters)]
        phase = next((own.phase for own in found if own.phase), None)
        names = tuple(dict.fromkeys(name for own in found for name in (own.before if before else own.after)))
        evidence: dict[str, Any] = {"parameters": len(names)}
        if before:
            unwatched = next((own.unwatched_since for own in found if own.unwatched_since is not None), None)
            evidence |= {"observed": "non-finite before this step's forward", "seen_at": step.step}
            if unwatched is not None:
                unseen = f"made in steps {unwatched} to {step.step}, which were not watched"
                evidence |= {"observed": f"non-finite as the run ended, {unseen}"}
        else:
            phase = phase or "optimizer"
            state = list(dict.fromkeys(f"{name}: {key}" for own in found for name, key in own.state))
            evidence |= {"state": state[:MAX_NAMES], "lr": step.row_of(ranks[0]).lr}
            names = names or tuple(dict.fromkeys(text.partition(": ")[0] for text in state))
        made = step.step - 1 if before and phase == "optimizer" else None
        return Verdict(ranks=ranks, subject=names, phase=phase, step=made, evidence=evidence)
