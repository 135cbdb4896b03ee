"""What rules share that compare announcements made when a module is wrapped. Not a rule itself. Torch-free."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any

from ddpdebug.detectors.kinds import Detector, Fields, Finding, Findings, Step
from ddpdebug.schema.announcements import InitialValues, Structure, WrapperGroup


class WrapRule(Detector):
    """Compares the k-th wrapped module between the ranks of one process group.

    The group is announced after the module, so facts wait for it; a step or the end of the run ends the wait.
    """

    reads = ()
    of_several = True

    def __init__(self, config: Fields | None = None) -> None:
        super().__init__(config)
        self._waiting: dict[int, Mapping[int, Any]] = {}
        self._groups: dict[int, dict[int, tuple[int, ...]]] = {}

    def incident_key(self, finding: Finding) -> tuple[Hashable, ...]:
        return finding.evidence.get("wrapper"), finding.ranks

    def judge(self, index: int, facts: Mapping[int, Any]) -> Findings:
        """Judge the announcements of ranks that reduce together."""
        yield from ()

    def compare(self, topic: str, facts: Mapping[int, Any]) -> Findings:
        name, _, number = topic.partition(":")
        index = int(number) if number.isdigit() else 0
        groups = {rank: _group_of(fact) for rank, fact in facts.items()}
        if all(groups.values()):
            self._groups[index] = groups
        if name != "group":
            self._waiting[index] = facts
        if index in self._groups and index in self._waiting:
            yield from self._settle(index)

    @property
    def awake(self) -> bool:
        return bool(self._waiting)

    def detect(self, step: Step) -> Findings:
        yield from self.finish()

    def finish(self) -> Findings:
        for index in sorted(self._waiting):
            yield from self._settle(index)

    def _settle(self, index: int) -> Findings:
        facts = self._waiting.pop(index)
        groups = self._groups.pop(index, {})
        everyone = tuple(sorted(facts))
        for group in sorted({groups.get(rank, everyone) for rank in facts}):
            members = {rank: facts[rank] for rank in group if rank in facts}
            if len(members) > 1:
                yield from self.judge(index, members)


def _group_of(fact: Structure | InitialValues | WrapperGroup) -> tuple[int, ...]:
    if isinstance(fact, WrapperGroup):
        return fact.ranks
    return fact.group if isinstance(fact, Structure) else ()
