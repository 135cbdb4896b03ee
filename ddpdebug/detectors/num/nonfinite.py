"""What the rules share that say who made the first NaN or Inf of a step. Torch-free.

Everything non-finite in a step follows from what came first on the way of the numbers: parameters (NUM304), input batch
(NUM305), module outputs (NUM301), loss and the gradient from it (NUM302), own gradient (NUM303), reduction (NUM309),
optimizer step (NUM304). The earliest of these that any rank shows is the verdict, and only ranks that show it are
named; after the reduction everybody looks guilty.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from ddpdebug.detectors.comparison import MAX_NAMES
from ddpdebug.detectors.kinds import ChainRule, Finding, RankClasses, Severity, Step, Verdict
from ddpdebug.schema.details import LossBackward, ModuleCall, NonfiniteLoss, Numerics
from ddpdebug.schema.row import Flag
from ddpdebug.schema.wire import to_json

_OWN = Flag.LOSS_NONFINITE | Flag.LOCAL_GRADS_NONFINITE | Flag.PARAMS_NONFINITE | Flag.STEP_NONFINITE
BAD = _OWN | Flag.GRADS_NONFINITE
ROOT = "(model)"

#: What a rank tells that has seen nothing; stands for a detail that did not come.
NOTHING = Numerics()
Replay = Mapping[str, Any]


class NonfiniteRule(ChainRule):
    """Base of the rules that say where the first non-finite number came from."""

    severity: ClassVar[Severity] = Severity.CRITICAL
    reads = (BAD,)
    wants: ClassVar[tuple[str, ...]] = ("numerics",)
    group = "nonfinite"
    by_kind = True
    learns = True
    #: It is about what the model or its loss has made: where nothing better is known, the line that calls the model.
    of_call: ClassVar[bool] = False

    def rank_classes(self, step: Step) -> RankClasses | None:
        if self.config.get("guard") == "off" or step.any(Flag.SKIPPED):
            return None
        if step.any(BAD):
            return {rank: 2 if row.flags & _OWN else bool(row.flags & BAD) for rank, row in step.rows.items()}
        return {} if step.all(Flag.CHECKED) else None

    def learned(self, step: Step) -> Finding | None:
        verdict = self._known(type(self), step)
        return None if verdict is None else self.word(step, verdict)

    def word(self, step: Step, verdict: Verdict) -> Finding:
        known = known_of(step)
        replay = next((r for rank in verdict.ranks if (r := known.get(rank, NOTHING).replay)), None)
        verdict = self.replayed(verdict, replay) if replay else verdict
        told = next((known[rank] for rank in verdict.ranks if rank in known and known[rank].called_at), NOTHING)
        location = verdict.location
        if self.of_call:
            location = location or told.called_at
            verdict = replace(verdict, evidence={**verdict.evidence, "model": told.model, "called_at": told.called_at})
        return self.finding(
            step,
            title=verdict.title or self.title,
            step=step.step if verdict.step is None else verdict.step,
            ranks=verdict.ranks,
            subject=verdict.subject[:MAX_NAMES],
            phase=verdict.phase,
            location=location,
            evidence={name: value for name, value in verdict.evidence.items() if value not in (None, [], {})},
        )

    def replayed(self, verdict: Verdict, replay: Replay) -> Verdict:
        """The verdict with what a replay found: its operation, and how it ended; called where there was one."""
        evidence = {"operation": replay.get("op"), "backward_of": None, "operands": replay.get("operands")}
        if node := replay.get("node"):
            forward = replay.get("forward_op")
            evidence["backward_of"] = f"{forward} ({node})" if forward else node
        last = {
            k: replay.get(v) for k, v in (("replay", "reason"), ("bundle", "bundle"), ("no_bundle", "bundle_reason"))
        }
        return replace(verdict, evidence={**evidence, **verdict.evidence, **last})


class ReplayedRule(NonfiniteRule):
    """Base of the rules whose operation and line a replay knows better than the modules and the loss do."""

    def replayed(self, verdict: Verdict, replay: Replay) -> Verdict:
        if replay.get("op"):
            # where the modules could not be looked at, the loss was: what it names only handed the bad numbers on
            own = {name: value for name, value in verdict.evidence.items() if name not in {"operation", "operands"}}
            verdict = replace(verdict, evidence=own)
        module = (str(replay["module"]),) if replay.get("module") else ()
        return replace(
            super().replayed(verdict, replay),
            location=replay.get("location") or verdict.location,
            subject=tuple(dict.fromkeys((*module, *verdict.subject))) if module else verdict.subject,
        )


def known_of(step: Step) -> dict[int, Numerics]:
    """Return rank -> what it has seen, where that is anything."""
    return {rank: told for rank, told in step.answers(Numerics).items() if told != NOTHING}


def first_call(told: Numerics) -> ModuleCall | None:
    """Return the module call that made the first NaN or Inf of a forward: -Inf counts when it reached the output."""
    calls = [call for call in told.forward if not call.usual]
    made = [call for call in calls if set(call.kinds) - {"-Inf"}]
    if made:
        return made[0]  # -Inf before it is most likely a mask: it stands in the evidence
    return calls[0] if calls and told.output_finite is False else None


def maker(call: ModuleCall) -> str:
    """Return the module that made it: the call's own, or the one around it when the call was given it already."""
    if not call.input_nonfinite or call.module == ROOT:
        return call.module
    return call.caller or call.module.rpartition(".")[0] or ROOT


def about(call: ModuleCall) -> dict[str, Any]:
    """Return the evidence about a module call."""
    table = to_json(call)
    evidence = {key: table[key] for key in ("kinds", "count", "dtype", "shape", "range", "input_range", "class")}
    evidence |= {key: table[key] or None for key in ("call", "micro_batch", "output")}  # 0 says nothing
    if call.input_nonfinite:
        evidence["observed"] = f"made in the code of {maker(call)}, before it called {call.module}"
    return evidence


def ranks_with(step: Step, known: Mapping[int, Numerics], test: Callable[[int, Numerics], bool]) -> tuple[int, ...]:
    """Return the ranks whose detail passes a test; `NOTHING` stands for a detail that did not come."""
    return tuple(rank for rank in step.rows if test(rank, known.get(rank, NOTHING)))


def has(step: Step, rank: int, flags: Flag) -> bool:
    """Return whether a rank's row has any of the flags."""
    return bool(step.row_of(rank).flags & flags)


def of_loss(known: Mapping[int, Numerics], ranks: Sequence[int]) -> dict[str, Any]:
    """Return the evidence about the loss expression of the first rank that has one."""
    loss = next((loss for rank in ranks if (loss := known.get(rank, NOTHING).loss)), None)
    if loss is None:
        return operation(None)
    made = "not by the model: an operand without gradient was non-finite already" if loss.brought else None
    return {**operation(loss), "made": made, "loss": loss.value, "backward_at": loss.backward}


def operation(found: NonfiniteLoss | LossBackward | None) -> dict[str, Any]:
    """Return the evidence about an operation of the loss expression."""
    return {name: to_json(getattr(found, name, None)) for name in ("operation", "operands", "candidates", "line_found")}


def seen(**found: Any) -> dict[str, Any]:
    """Return a rank's `numerics` detail for the examples."""
    whole = {"entry": {"finite": True, "range": [-0.1, 0.1]}, "parameters": {"before": [], "after": [], "state": []}}
    return {"checked": True, "output_finite": True, **whole, **found}


def call(module: str = "blocks.1.attention", order: int = 3, **found: Any) -> dict[str, Any]:
    """Return an entry about a module call for the examples."""
    place = {"module": module, "class": "Attention", "order": order, "dtype": "float32", "shape": [4, 8]}
    shown = {"kinds": ["NaN"], "count": 2, "range": [-1.0, 1.0], "input_range": [-3.0, 3.0], "input_nonfinite": False}
    return {**place, **shown, **found}
