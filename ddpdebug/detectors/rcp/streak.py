"""The base of rules that fire when ranks set a flag in a number of consecutive steps."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from typing import Any, ClassVar

from ddpdebug.detectors.base import Detector
from ddpdebug.schema.finding import Finding
from ddpdebug.schema.row import Flag
from ddpdebug.schema.step import Step


class Streak(Detector):
    """A rule about one flag; `describe` makes fields of the finding of what the `recipe` details say."""

    flag: ClassVar[Flag]
    key: ClassVar[str]  # of the details
    length: ClassVar[str] = "habit_steps"  # the threshold that says how many steps in a row
    wants = ("recipe",)

    def __init__(self, config: Mapping[str, Any] | None = None) -> None:
        super().__init__(config)
        self._since: dict[int, tuple[int, int]] = {}  # optimizer -> (first step, number of steps)

    def cause(self, finding: Finding) -> tuple[Hashable, ...]:
        return ()

    def shows(self, step: Step) -> bool:
        """Tell whether the step is one of the streak."""
        return step.any(self.flag)

    def suspects(self, step: Step) -> bool:
        return self._next(step)[1] == int(self.limit(self.length))

    def detect(self, step: Step) -> Iterator[Finding]:
        if step.any(Flag.SKIPPED) and not self.shows(step):
            return
        first, number = self._since[step.optimizer] = self._next(step)
        if number < self.limit(self.length):
            return
        details = step.details.get("recipe", {})
        told = {rank: own for rank, known in sorted(details.items()) if (own := (known or {}).get(self.key))}
        about = next(iter(told.values()), None)
        fields = self.describe(about, step) if about is not None else {}
        if fields is not None:
            ranks = step.ranks_with(self.flag)
            yield self.finding(**{"step": first, "last_step": step.step, "ranks": ranks, **fields})

    def describe(self, about: Any, step: Step) -> dict[str, Any] | None:
        """Return fields of the finding; None: nothing is wrong."""
        del step
        return {"location": about.get("location"), "evidence": {k: v for k, v in about.items() if k != "location"}}

    def _next(self, step: Step) -> tuple[int, int]:
        first, number = self._since.get(step.optimizer, (step.step, 0))
        if not self.shows(step):
            return step.step + 1, 0
        return (first if number else step.step), number + 1


def told(
    topic: str, facts: Mapping[int, Any], name: str, kind: str | None = None
) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """Yield rank and value of announcements of one topic, and of one kind of it."""
    for rank, fact in sorted(facts.items()):
        if topic == f"alone:{name}" and isinstance(fact, Mapping) and kind in {None, fact.get("kind")}:
            yield rank, fact
