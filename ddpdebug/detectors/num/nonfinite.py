"""Who made the first NaN or Inf of a step: one symptom, one verdict, one code. Not a rule itself. Torch-free.

Everything non-finite in a step follows from what came first on the way of the numbers: parameters, input batch, module
outputs, loss, gradient from the loss, own gradient, reduction, optimizer step. The earliest of these that any rank
shows is the verdict, and only ranks that show it are named; after the reduction everybody looks guilty.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from ddpdebug.detectors.base import Detector, Labels, runbook
from ddpdebug.detectors.comparison import MAX_NAMES, tables
from ddpdebug.schema.finding import Finding, Severity
from ddpdebug.schema.row import Flag
from ddpdebug.schema.step import Step

_OWN = Flag.LOSS_NONFINITE | Flag.LOCAL_GRADS_NONFINITE | Flag.PARAMS_NONFINITE | Flag.STEP_NONFINITE
BAD = _OWN | Flag.GRADS_NONFINITE
_FIRST = ("NUM304", "NUM305", "NUM301", "NUM302", "NUM303", "NUM309")
ROOT = "(model)"

Table = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What came first, and on which ranks."""

    code: str
    ranks: tuple[int, ...]
    subject: tuple[str, ...] = ()
    phase: str | None = None
    location: str | None = None
    step: int | None = None  # where that is not the step that shows it
    evidence: Mapping[str, Any] = field(default_factory=dict)


class NonfiniteRule(Detector):
    """Base of the rules that say where the first non-finite number came from."""

    severity: ClassVar[Severity] = Severity.CRITICAL
    wants: ClassVar[tuple[str, ...]] = ("numerics",)
    group = "nonfinite"
    stage: ClassVar[int] = 15

    def symptom(self, step: Step) -> Labels | None:
        if self.config.get("guard") == "off" or step.any(Flag.SKIPPED):
            return None
        if step.any(BAD):
            return {rank: 2 if row.flags & _OWN else bool(row.flags & BAD) for rank, row in step.rows.items()}
        return {} if step.all(Flag.CHECKED) else None

    def detect(self, step: Step) -> Iterator[Finding]:
        if not self.symptom(step):
            return
        verdict = judge(step)
        if verdict is not None and verdict.code == self.code:
            yield self.report(step, verdict)

    def report(self, step: Step, verdict: Verdict) -> Finding:
        """Put a verdict into words."""
        prose = runbook(type(self))
        return self.finding(
            causes=fitting_first(prose["causes"], verdict.evidence),
            actions=fitting_first(prose["remedy"], verdict.evidence),
            step=step.step if verdict.step is None else verdict.step,
            last_step=step.step,
            ranks=verdict.ranks,
            subject=verdict.subject[:MAX_NAMES],
            phase=verdict.phase,
            location=verdict.location,
            evidence={name: value for name, value in verdict.evidence.items() if value not in (None, [], {})},
        )


def judge(step: Step) -> Verdict | None:
    """Return what came first in a step in which something is non-finite."""
    if "nonfinite" not in step.memo:
        step.memo["nonfinite"] = _judge(step)
    verdict: Verdict | None = step.memo["nonfinite"]
    return verdict


def _judge(step: Step) -> Verdict | None:
    known = {rank: table for rank, table in tables(step, "numerics").items() if table}
    for find in (_parameters_before, _input, _forward, _loss, _local, _reduction, _optimizer):
        verdict = find(step, known)
        if verdict is not None:
            replay = next((r for rank in verdict.ranks if (r := _replay(known.get(rank, {})))), {})
            return _with_replay(verdict, replay) if replay else verdict
    return None


def first_call(table: Table) -> Mapping[str, Any] | None:
    """Return the module call that made the first NaN or Inf of a forward: -Inf counts when it reached the output."""
    calls: list[Mapping[str, Any]] = [call for call in table.get("forward", ()) if not call.get("usual")]
    made = [call for call in calls if set(call["kinds"]) - {"-Inf"}]
    if made:
        return made[0]  # -Inf before it is most likely a mask: it stands in the evidence
    return calls[0] if calls and table.get("output_finite") is False else None


def maker(call: Mapping[str, Any]) -> str:
    """Return the module that made it: the call's own, or the one around it when the call was given it already."""
    path = str(call["module"])
    if not call.get("input_nonfinite") or path == ROOT:
        return path
    return str(call.get("caller") or path.rpartition(".")[0] or ROOT)


def about(call: Mapping[str, Any]) -> dict[str, Any]:
    """Return the evidence about a module call."""
    evidence = {key: call.get(key) for key in ("kinds", "count", "dtype", "shape", "range", "input_range", "class")}
    evidence |= {key: call.get(key) or None for key in ("call", "micro_batch", "output")}  # 0 says nothing
    if call.get("input_nonfinite"):
        evidence["observed"] = f"made in the code of {maker(call)}, before it called {call['module']}"
    return evidence


def _replay(table: Table) -> Mapping[str, Any]:
    found = table.get("replay")
    return found if isinstance(found, Mapping) else {}


def _with_replay(verdict: Verdict, replay: Mapping[str, Any]) -> Verdict:
    """Add what the replay found: the operation and the line, where it reproduced the same thing."""
    evidence = {"operation": replay.get("op"), "backward_of": None, "operands": replay.get("operands")}
    if node := replay.get("node"):
        forward = replay.get("forward_op")
        evidence["backward_of"] = f"{forward} ({node})" if forward else node
    last = {"replay": replay.get("reason"), "bundle": replay.get("bundle"), "no_bundle": replay.get("bundle_reason")}
    own = dict(verdict.evidence)
    if verdict.code in {"NUM301", "NUM303"} and evidence["operation"]:
        # where the modules could not be looked at, the loss was: what it names only handed the bad numbers on
        own = {name: value for name, value in own.items() if name not in {"operation", "operands"}}
    changes: dict[str, Any] = {"evidence": {**evidence, **own, **last}}
    if verdict.code in {"NUM301", "NUM303"}:
        changes["location"] = replay.get("location") or verdict.location
        if module := replay.get("module"):
            changes["subject"] = tuple(dict.fromkeys((str(module), *verdict.subject)))
    return replace(verdict, **changes)


def _with(step: Step, known: Mapping[int, Table], test: Callable[[int, Table], bool]) -> tuple[int, ...]:
    return tuple(rank for rank in step.rows if test(rank, known.get(rank, {})))


def _has(step: Step, rank: int, flags: Flag) -> bool:
    return bool(step.rows[rank].flags & flags)


def _parameters_before(step: Step, known: Mapping[int, Table]) -> Verdict | None:
    ranks = step.ranks_with(Flag.PARAMS_NONFINITE)
    if not ranks:
        return None
    found = [known[rank]["parameters"] for rank in ranks if rank in known]
    names = tuple(dict.fromkeys(name for table in found for name in table["before"]))
    phase = next((table["phase"] for table in found if table["phase"]), None)
    made = step.step - 1 if phase == "optimizer" else None
    evidence = {"parameters": len(names), "observed": "non-finite before this step's forward", "seen_at": step.step}
    return Verdict(code="NUM304", ranks=ranks, subject=names, phase=phase, step=made, evidence=evidence)


def _input(step: Step, known: Mapping[int, Table]) -> Verdict | None:
    def guilty(rank: int, table: Table) -> bool:
        harmed = Flag.LOSS_NONFINITE | Flag.LOCAL_GRADS_NONFINITE
        return bool(table.get("inputs")) and _has(step, rank, harmed)

    ranks = _with(step, known, guilty)
    if not ranks:
        return None
    first = {rank: known[rank]["inputs"][0] for rank in ranks}
    evidence = {
        "samples": {str(rank): entry["samples"] for rank, entry in first.items()},
        "kinds": sorted({kind for entry in first.values() for kind in entry["kinds"]}),
        "elements": {str(rank): entry["count"] for rank, entry in first.items()},
        "shape": first[ranks[0]]["shape"],
        "dtype": first[ranks[0]]["dtype"],
    }
    names = tuple(dict.fromkeys(entry["argument"] for rank in ranks for entry in known[rank]["inputs"]))
    return Verdict(code="NUM305", ranks=ranks, subject=names, phase="input", evidence=evidence)


def _forward(step: Step, known: Mapping[int, Table]) -> Verdict | None:
    def guilty(rank: int, table: Table) -> bool:
        made = first_call(table)
        if _has(step, rank, Flag.LOSS_NONFINITE):
            return made is not None or table.get("output_finite") is False
        # what was masked on its way to the loss comes back in backward
        alone = step.any(Flag.NO_DDP) or len(step.rows) == 1
        lost = _has(step, rank, Flag.LOCAL_GRADS_NONFINITE | (Flag.GRADS_NONFINITE if alone else Flag(0)))
        return lost and made is not None and bool(set(made["kinds"]) - {"-Inf"})

    ranks = _with(step, known, guilty)
    if not ranks:
        return None
    calls = {rank: call for rank in ranks if (call := first_call(known[rank])) is not None}
    if not calls:
        line = _of_loss(known, ranks)
        evidence = {"observed": "what the model returned is non-finite; its modules were not looked at", **line}
        return Verdict(code="NUM301", ranks=ranks, subject=(ROOT,), phase="forward", evidence=evidence)
    earliest = min((call["micro_batch"], call["order"]) for call in calls.values())
    first = tuple(rank for rank, call in calls.items() if (call["micro_batch"], call["order"]) == earliest)
    names = tuple(dict.fromkeys(maker(calls[rank]) for rank in first))
    evidence = {**about(calls[first[0]]), "also_on": [rank for rank in ranks if rank not in first]}
    before = [call["module"] for call in known[first[0]]["forward"] if call["kinds"] == ["-Inf"]]
    evidence["minus_inf_before_in"] = before[:4]
    if not step.any(Flag.LOSS_NONFINITE):
        evidence["loss"] = "finite: it was masked on the way, and came back in backward"
    return Verdict(code="NUM301", ranks=first, subject=names, phase="forward", evidence=evidence)


def _of_loss(known: Mapping[int, Table], ranks: Sequence[int]) -> dict[str, Any]:
    loss = next((t["loss"] for rank in ranks if (t := known.get(rank, {})).get("loss")), None) or {}
    made = "not by the model: an operand without gradient was non-finite already" if loss.get("brought") else None
    return {**_operation(loss), "made": made, "loss": loss.get("value"), "backward_at": loss.get("backward")}


def _operation(found: Mapping[str, Any]) -> dict[str, Any]:
    """Return the evidence about an operation of the loss expression."""
    return {key: found.get(key) for key in ("operation", "operands", "candidates", "line_found")}


#: The end of an operation's name -> what a cause or a remedy says that is about it.
_ABOUT = (
    (r"log\d*", r"\blog\b"),
    (r"mean|nllloss(2d)?|nll_loss\w*", r"mean over|count"),
    (r"div|reciprocal", r"divi"),
    (r"r?sqrt|\w*norm|cdist", r"of sqrt|root"),
    (r"pow", r"\bpower|\bsquare|root"),
    (r"exp|b?mm|addmm|mul|mse_?loss", r"overflow|float32|\.float\(\)"),
    (r"softmax", r"softmax|masked row"),
    (r"acos|asin|atanh", r"acos|open range"),
)


def fitting_first(texts: Sequence[str], evidence: Mapping[str, Any]) -> tuple[str, ...]:
    """Return causes or remedies with those first that are about the operation that the evidence names."""
    words = _words(evidence)
    return tuple(sorted(texts, key=lambda text: words is None or re.search(words, text) is None))


def _words(evidence: Mapping[str, Any]) -> str | None:
    """Return a pattern for what is said of an operation: `LogBackward0`, `aten.log.default`."""
    operation = str(evidence.get("backward_of") or evidence.get("operation") or "")
    if evidence.get("made"):
        return r"labels, weights"
    if operation.endswith("Backward"):  # without the number that torch's own nodes have
        return r"autograd\.Function"
    name = operation.removeprefix("aten.").partition("Backward")[0].partition(".")[0].strip("_").lower()
    return next((words for names, words in _ABOUT if re.fullmatch(rf"(\w*_)?({names})", name)), None)


def _loss(step: Step, known: Mapping[int, Table]) -> Verdict | None:
    ranks = step.ranks_with(Flag.LOSS_NONFINITE)
    phase, evidence = "loss", _of_loss(known, ranks)
    if ranks and not any(known.get(rank, {}).get("output_finite") for rank in ranks):
        evidence["observed"] = "the loss is non-finite; what came before it was not looked at in this step"
    tables_ = [known[rank] for rank in ranks if rank in known]
    found = [table.get("loss") or {} for table in tables_]
    if not ranks:
        spoilt = Flag.LOCAL_GRADS_NONFINITE | Flag.GRADS_NONFINITE
        ranks = _with(step, known, lambda rank, table: _has(step, rank, spoilt) and _is_spoilt_by_loss(table))
        phase = "loss-backward"
        tables_ = [known[rank] for rank in ranks]
        found = [{"expression": t.get("loss_line"), **(t.get("loss_backward") or {})} for t in tables_]
        evidence = _operation(next((entry for entry in found if entry.get("operation")), {}))
        evidence["observed"] = "the loss is finite, the gradient that it gives to the model's output is not"
    if not ranks:
        return None
    spans = [table["entry"]["range"] for table in tables_ if table.get("entry")]
    evidence["gradient_from_loss"] = spans[0] if spans else None
    if any(call["kinds"] for table in tables_ for call in table["forward"]):
        evidence["masked_in"] = [call["module"] for table in tables_ for call in table["forward"]][:4]
    line = next((entry["location"] for entry in found if entry.get("location")), None)
    whole = next((entry["expression"] for entry in found if entry.get("expression")), None)
    how = evidence.pop("line_found")
    evidence |= {"loss_at": whole if line and whole != line else None, "line_found": how}
    return Verdict(
        code="NUM302", ranks=ranks, subject=("loss",), phase=phase, location=line or whole, evidence=evidence
    )


def _is_spoilt_by_loss(table: Table) -> bool:
    return (table.get("entry") or {}).get("finite") is False or bool(table.get("loss_backward"))


def _local(step: Step, known: Mapping[int, Table]) -> Verdict | None:
    ranks = step.ranks_with(Flag.LOCAL_GRADS_NONFINITE)
    phase: str | None = "backward"
    if not ranks and step.any(Flag.GRADS_NONFINITE):
        bad = step.ranks_with(Flag.GRADS_NONFINITE)
        if step.any(Flag.NO_DDP) or len(step.rows) == 1:
            ranks = bad
        elif all(math.isfinite(step.rows[rank].grad_norm) for rank in bad):
            ranks, phase = bad, "after-reduction"
        elif not step.all(Flag.CHECKED):
            ranks, phase = bad, None
    if not ranks:
        return None
    own = {rank: known[rank].get("local") or known[rank].get("reduced") or [] for rank in ranks if rank in known}
    names = [name for rank in ranks for name in own.get(rank, ())]
    modules = tuple(dict.fromkeys(_module_of(own[rank][0]) for rank in ranks if own.get(rank)))
    calls = [call["module"] for rank in ranks for call in known.get(rank, {}).get("forward", ())]
    entry = next((e["range"] for rank in ranks if (e := known.get(rank, {}).get("entry"))), None)
    evidence = {
        "first_parameter": names[0] if names else None,
        "gradient_from_loss": entry,
        "loss": {str(rank): step.rows[rank].loss for rank in ranks},
        "nonfinite_gradients": {str(rank): len(found) for rank, found in own.items()},
        "masked_in": calls[:4],
        "observed": None if phase else "only the reduced gradients were looked at in this step",
    }
    return Verdict(code="NUM303", ranks=ranks, subject=modules, phase=phase, evidence=evidence)


def _module_of(name: str) -> str:
    return name.rpartition(".")[0] or ROOT


def _reduction(step: Step, known: Mapping[int, Table]) -> Verdict | None:
    ranks = step.ranks_with(Flag.GRADS_NONFINITE)
    if not ranks or not step.all(Flag.CHECKED):
        return None
    names = tuple(dict.fromkeys(name for rank in ranks for name in known.get(rank, {}).get("reduced", ())))
    largest: dict[str, float] = {}
    for rank, table in known.items():
        sizes = [value for name, value in table.get("largest", {}).items() if not names or name in names]
        if sizes:
            largest[str(rank)] = max(sizes)
    evidence = {
        "largest": largest,
        "local_grad_norm": {str(rank): row.local_grad_norm for rank, row in step.rows.items()},
        "parameters": len(names),
        "16_bit_reduction": step.any(Flag.HALF_REDUCTION),
        "custom_reduction": step.any(Flag.CUSTOM_REDUCTION),
    }
    return Verdict(code="NUM309", ranks=ranks, subject=names, phase="reduction", evidence=evidence)


def _optimizer(step: Step, known: Mapping[int, Table]) -> Verdict | None:
    ranks = step.ranks_with(Flag.STEP_NONFINITE)
    if not ranks:
        return None
    found = [known[rank]["parameters"] for rank in ranks if rank in known]
    names = tuple(dict.fromkeys(name for table in found for name in table["after"]))
    state = list(dict.fromkeys(f"{name}: {key}" for table in found for name, key in table["state"]))
    evidence = {"parameters": len(names), "state": state[:MAX_NAMES], "lr": step.rows[ranks[0]].lr}
    names = names or tuple(dict.fromkeys(text.partition(": ")[0] for text in state))
    phase = next((table["phase"] for table in found if table["phase"]), None)
    return Verdict(code="NUM304", ranks=ranks, subject=names, phase=phase, evidence=evidence)


def followed(code: str) -> tuple[str, ...]:
    """Return the other codes of this group: what a step shows after one of them follows from it."""
    return tuple(other for other in _FIRST if other != code)


def seen(**found: Any) -> dict[str, Any]:
    """Return a rank's `numerics` detail for the examples."""
    return {
        "checked": True,
        "compiled": False,
        "loss": None,
        "forward": [],
        "output_finite": True,
        "inputs": [],
        "entry": {"finite": True, "range": [-0.1, 0.1]},
        "local": [],
        "reduced": [],
        "largest": {},
        "parameters": {"before": [], "after": [], "state": [], "phase": None},
        "near": [],
        "replay": None,
        **found,
    }


def call(module: str = "blocks.1.attention", order: int = 3, **found: Any) -> dict[str, Any]:
    """Return an entry about a module call for the examples."""
    place = {"module": module, "class": "Attention", "call": 0, "micro_batch": 0, "order": order, "output": 0}
    shown = {"dtype": "float32", "shape": [4, 8], "kinds": ["NaN"], "count": 2, "range": [-1.0, 1.0]}
    return {**place, **shown, "input_range": [-3.0, 3.0], "input_nonfinite": False, "usual": False, **found}
