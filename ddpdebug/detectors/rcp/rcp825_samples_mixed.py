"""RCP825: a sample's outputs depend on the other samples of its batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ddpdebug.detectors.base import runbook
from ddpdebug.detectors.examples import steps
from ddpdebug.detectors.kinds import EventRule, Examples, Facts, Fields, Severity
from ddpdebug.schema.announcements import SampleMixing

_FACT: dict[str, Any] = {
    "step": 4,
    "samples": 32,
    "change": 0.4,
    "operation": "softmax",
    "module": "attention",
    "location": "train.py:21",
}


#: The cause, and its remedy, that an operation tells; 0 for others.
_CAUSE: dict[str | None, int] = {
    **dict.fromkeys(("softmax", "log_softmax", "mul", "div", "sub", "mean"), 1),
    **dict.fromkeys(("view", "reshape", "unsafe_view", "clone", "copy"), 2),
}


class SamplesMixed(EventRule):
    """In eval mode every sample's outputs change with the other samples of the batch, or with its place among them.

    Under `check` one rank asks each model once, early: it runs the last forward twice more, in eval mode, in a copy of
    the process. The second time half of the samples are in other places and the others are replaced. Where a batch has
    positions and no loader tells its size, only a model that mixes along both of its first two dimensions is reported.
    Compiled models, models whose forward communicates or samples, batch norm without running statistics, full batches
    that never change and graphs are not asked. `ddpdebug preflight` asks before training.

    Impact: the model learns from neighbours that mean nothing; results depend on the batch size, on the order of
    samples, and on what else is in a batch when the model is used.

    Diagnosis: the location is the first operation that mixes. In eval mode compare `model(x)[:1]` with `model(x[:1])`:
    they must be equal.

    Causes:
    - attention, a recurrent layer or a position's encoding counts the batch as time: `batch_first` the wrong way round
    - a softmax, mean or norm over dimension 0
    - `view` or `reshape` where `transpose` or `permute` is meant
    - intended: statistics over a batch (the discriminator of a GAN), or the first dimension is no batch

    Remedy:
    - pass `batch_first=True` to `nn.MultiheadAttention`, `nn.TransformerEncoderLayer`, `nn.LSTM` and `nn.GRU` where the
      batch comes first, and index positions by dimension 1
    - name the dimension that is meant: `softmax(dim=-1)`, `mean(dim=1)`
    - `transpose` or `permute`, and then `reshape`: `x.view(T, B)` of a tensor (B, T) keeps no row together
    """

    code = "RCP825"
    severity = Severity.WARNING
    title = "a sample's outputs depend on the other samples of its batch"
    events = ("mixing",)
    fires_on = Examples(
        lambda: Facts(topic="alone:mixing", values={0: _FACT}),
        lambda: (*steps(4), Facts(topic="alone:mixing", values={0: {**_FACT, "operation": None, "module": None}})),
    )
    silent_on = Examples(
        lambda: steps(3),
        lambda: Facts(topic="alone:mixing", values={0: {**_FACT, "change": 0.0, "operation": None}}),
    )

    def judge(self, fact: SampleMixing) -> Fields | None:
        if fact.change <= 0:
            return None
        evidence: dict[str, Any] = {"samples": fact.samples, "change_of_outputs": round(fact.change, 4)}
        if fact.operation is not None:
            evidence["first_mixed_by"] = fact.operation
        prose = runbook(type(self))
        likely = _CAUSE.get(fact.operation, 0)
        return {
            "ranks": (),  # every rank trains the same model; the one that was asked is no culprit
            "subject": (fact.module,) if fact.module else (),
            "evidence": evidence,
            "causes": _first(prose["causes"], likely),
            "actions": _first(prose["remedy"], likely),
        }


def _first(texts: Sequence[str], index: int) -> tuple[str, ...]:
    return (texts[index], *texts[:index], *texts[index + 1 :])
