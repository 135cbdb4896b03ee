"""RANK106: some ranks train a module that others evaluate."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ddpdebug.detectors.comparison import MAX_NAMES, classes_of, culprits, values_of
from ddpdebug.detectors.examples import step_at, steps, tables as ranks
from ddpdebug.detectors.kinds import ComparisonRule, Examples, Findings, RankClasses, Severity, Step
from ddpdebug.schema.details import Modes, differing_names
from ddpdebug.schema.row import Flag

_USUAL: dict[str, Any] = {"(model)": True, "body": True, "body.drop": True}
_EVAL = dict.fromkeys(_USUAL, False)
_DROP_OFF: dict[str, Any] = {**_USUAL, "body.drop": False}


class ModesDiffer(ComparisonRule):
    """In a training forward a module is in train mode on some ranks and in eval mode on others.

    Impact: dropout and normalisation act on a part of the ranks only; BatchNorm statistics stop or run ahead there.
    Gradients are averaged over different models, and no error appears.

    Diagnosis: print `[n for n, m in model.named_modules() if not m.training]` on every rank at the start of the
    training step. Look for `eval()` under `if rank == 0` without the `train()` that should follow.

    Causes:
    - rank 0 evaluates, samples or exports, calls `eval()`, and does not go back to `train()`
    - `train()` at the start of the epoch sits in the branch of the ranks that do not evaluate
    - a frozen part is put into eval mode from a configuration that differs between ranks
    - an exception in the evaluation of one rank skipped the switch back

    Remedy:
    - call `model.train()` on all ranks at the start of every training step or epoch, unconditionally
    - wrap evaluation in a context manager that restores the mode: `was = model.training ... model.train(was)`
    """

    code = "RANK106"
    severity = Severity.ERROR
    title = "train and eval mode differ between ranks"
    reads = ("modes_digest",)
    of_several = True
    wants = ("modes",)
    fires_on = Examples(
        lambda: step_at(20, odd={0: {"modes_digest": 5}}, modes=ranks(4, _USUAL, {0: _EVAL})),
        lambda: step_at(20, world=2, odd={1: {"modes_digest": 5}}, modes=ranks(2, _USUAL, {1: _DROP_OFF})),
    )
    silent_on = Examples(lambda: steps(3), lambda: step_at(3, modes_digest=5, modes=ranks(4, _EVAL)))

    def rank_classes(self, step: Step) -> RankClasses | None:
        return classes_of(step, "modes_digest", on_purpose=Flag(0))

    def report(self, step: Step, classes: RankClasses) -> Findings:
        by_rank = {rank: told.training for rank, told in step.answers(Modes).items()}
        names = differing_names(by_rank)
        top = _outermost(names)
        evidence: dict[str, object] = {"modules_that_differ": len(names)}
        if top:
            values = values_of(by_rank, top[0])
            evidence["modes"] = {rank: {True: "train", False: "eval"}.get(value) for rank, value in values.items()}
        yield self.finding(step, ranks=culprits(classes), subject=tuple(top[:MAX_NAMES]), evidence=evidence)


def _outermost(names: Sequence[str]) -> list[str]:
    """Leave out modules inside of others on the list."""
    if "(model)" in names:
        return ["(model)"]
    listed = set(names)
    return [name for name in names if not any(parent in listed for parent in _parents(name))]


def _parents(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[:i]) for i in range(1, len(parts))]
