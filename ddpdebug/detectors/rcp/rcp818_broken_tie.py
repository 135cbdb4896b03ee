"""RCP818: two parameters that look tied are separate objects and have drifted apart."""

from __future__ import annotations

import re
from collections.abc import Hashable, Mapping
from typing import Any

from ddpdebug.detectors.examples import step_at, steps
from ddpdebug.detectors.kinds import Detector, Examples, Facts, Fields, Finding, Findings, Severity, Step, Threshold
from ddpdebug.schema.announcements import Announcement, BrokenTies, InitialValues, Structure
from ddpdebug.schema.details import Parameters

#: Only the pair that is usually tied is looked at: copies of whole networks start equal on purpose.
EMBEDDING = re.compile(r"emb|wte|tok|vocab|lookup", re.IGNORECASE)
OUTPUT = re.compile(r"head|out|proj|decoder|logit|lm_|classif|predict|unembed", re.IGNORECASE)


_CUT: Fields = {
    "title": "parameters that were tied as the model was built train as separate ones",
    "causes": (
        "`to_empty` after the tie, of a model on the meta device: each module gets a tensor of its own",
        "`fully_shard` of the modules one by one: each cuts the parameter for itself",
        "a conversion that makes new parameters module by module",
    ),
    "actions": (
        "tie again after `to_empty`: `model.head.weight = model.embed.weight`, before values are loaded",
        "give both modules to one call, `fully_shard([model.embed, model.head])`, or leave them to that of the model",
    ),
}
_UNTIED: dict[str, Any] = {"kind": "untied", "step": 1, "pairs": [["emb.weight", "head.weight"]]}


def _known(embedding: str, output: str, name: str = "head.weight") -> tuple[Facts, Facts]:
    entries = [["parameter", n, [50, 16], "float32", True] for n in ("emb.weight", name)]
    structure = {r: {"entries": entries} for r in range(4)}
    initial = {r: {"digests": {"emb.weight": embedding, name: output}} for r in range(4)}
    return Facts(topic="structure:0", values=structure), Facts(topic="init:0", values=initial)


def _after(embedding: str, output: str) -> dict[int, Any]:
    return {r: {"after": {"emb.weight": embedding, "head.weight": output}} for r in range(4)}


class BrokenTie(Detector):
    """Two parameters were one as the model was built and train apart, or an embedding and an output layer began equal.

    The first is seen where both modules were given the same parameter (`head.weight = embed.weight`) and nobody has
    given either of them another; the second where they started bitwise equal and differ after training steps.

    Impact: the model trains two separate weights: more parameters than intended, and whatever saves only one of
    them loses the other.

    Diagnosis: `model.head.weight is model.embed.weight` at construction, after loading, after wrapping, after
    moving: the first place where it turns false is the cause. Equal values at the start can be chance for constants
    (norm weights of 1, biases of 0), which is nothing to look at.

    Causes:
    - tied by copy: `nn.Parameter(w.clone())` or `data.copy_` instead of sharing the object
    - `load_state_dict(assign=True)`, which assigns two Parameters for the two names
    - a deep copy, a conversion or a surgery on one side only
    - not meant to be tied: initialised from each other on purpose

    Remedy:
    - tie by object, `self.head.weight = self.embed.weight`, and tie again after `assign=True`, conversion or
      surgery, before DDP and the optimizer see the model
    - do not tie by copying values every step
    """

    code = "RCP818"
    severity = Severity.WARNING
    title = "two parameters that look tied are separate objects and have drifted apart"
    reads = ()
    topics = ("structure", "init", "alone")
    wants = ("parameters",)
    tie_step = Threshold(
        6,
        "the step at which two weights that started equal are compared",
        source="a warm-up from 0 has moved them by then",
    )
    fires_on = Examples(
        lambda: (*_known("a1", "a1"), step_at(6, parameters=_after("b1", "c1"))),
        lambda: (*_known("a1", "a1"), *steps(2), step_at(6, parameters=_after("b1", "c2"))),
        lambda: Facts(topic="alone:audit", values={0: _UNTIED, 1: _UNTIED}),
    )
    silent_on = Examples(
        lambda: (*_known("a1", "a2"), step_at(6, parameters=_after("b1", "c1"))),
        lambda: (*_known("a1", "a1"), step_at(6, parameters=_after("b1", "b1"))),
        lambda: (*_known("a1", "a1", "target.emb.weight"), step_at(6, parameters=_after("b1", "c1"))),
    )

    def __init__(self, config: Fields | None = None) -> None:
        super().__init__(config)
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._pairs: list[tuple[str, str]] = []

    def incident_key(self, finding: Finding) -> tuple[Hashable, ...]:
        return finding.subject

    def can_show(self, step: Step) -> bool:
        return False

    def compare(self, topic: str, facts: Mapping[int, Announcement]) -> Findings:
        for rank, told in sorted(facts.items()):
            if isinstance(told, BrokenTies):
                for pair in told.pairs:
                    yield self.finding(step=0, last_step=told.step, ranks=(rank,), subject=pair, phase="cut", **_CUT)
        self._begin(facts[min(facts)])

    def _begin(self, fact: Announcement) -> None:
        """Learn which embeddings and output layers began equal."""
        if isinstance(fact, Structure):
            trained = [entry for entry in fact.entries if entry[0] == "parameter" and entry[4]]
            self._shapes = {name: shape for _, name, shape, _, _ in trained}
        digests = fact.digests.items() if isinstance(fact, InitialValues) else ()
        known = [(name, value) for name, value in digests if len(self._shapes.get(name, ())) == 2]
        for name, value in known:
            for other, same in known:
                alike = value == same and self._shapes[name] == self._shapes[other]
                if alike and name != other and EMBEDDING.search(name) and OUTPUT.search(other):
                    self._pairs.append((name, other))

    def suspects(self, step: Step) -> bool:
        return bool(self._pairs) and step.optimizer == 0 and step.step == int(self.tie_step)

    @property
    def awake(self) -> bool:
        return bool(self._pairs)

    def detect(self, step: Step) -> Findings:
        answers = step.answers(Parameters)
        if not self.suspects(step) or not answers:
            return
        after = next(iter(answers.values())).after
        for name, other in self._pairs:
            values = [after.get(key) for key in (name, other)]
            if None not in values and values[0] != values[1]:
                evidence = {"equal_at": "construction", "differ_after_steps": step.step + 1}
                yield self.finding(step=0, last_step=step.step, subject=(name, other), evidence=evidence)
