"""What the rules about hangs have in common: what they make of a verdict. Torch-free."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from ddpdebug.detectors.kinds import EventRule, Fields, Finding
from ddpdebug.schema.announcements import Hang
from ddpdebug.schema.finding import UNDECIDED

_STILL_THERE = frozenset({"mismatch", "cycle"})


class HangRule(EventRule):
    """Base of the rules about hangs: one rank has judged what all have seen, and has said so."""

    def evidence(self, fact: Hang) -> dict[str, Any]:
        """What was seen, as far as it was."""
        found: dict[str, Any] = {
            "waiting": dict(fact.waits),
            "where" if fact.kind in _STILL_THERE else "missing": dict(fact.where),
            "calls": dict(fact.sides),
            "difference": fact.difference,
            "first_difference": dict(fact.parted),
            UNDECIDED: [list(ranks) for ranks in fact.undecided],
            "collectives_so_far": dict(fact.calls),
            "waited_seconds": fact.waited,
            "stacks": {ranks: list(stack) for ranks, stack in fact.stacks.items()},
        }
        return {name: value for name, value in found.items() if value} | {"hang": f"{fact.judge}:{fact.number}"}

    def judge(self, fact: Hang) -> Fields | None:
        return {"ranks": fact.ranks, "phase": fact.phase, "evidence": self.evidence(fact)}

    def incident_key(self, finding: Finding) -> tuple[Hashable, ...]:
        return finding.evidence.get("hang"), finding.ranks, finding.step
