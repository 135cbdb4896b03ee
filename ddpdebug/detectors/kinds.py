"""The kinds of rules: about an event, about a streak of steps, about ranks that differ. Torch-free.

A rule imports from here what it is written in: its kind, `Examples`, `Threshold`, `Severity`, ...
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

from ddpdebug.detectors.base import Detector, Examples, Facts, Fields, Findings, RankClasses
from ddpdebug.detectors.thresholds import Threshold
from ddpdebug.schema.finding import Finding, Severity
from ddpdebug.schema.step import Step

__all__ = [
    "ChainRule",
    "ComparisonRule",
    "Detector",
    "EventRule",
    "Examples",
    "Facts",
    "Fields",
    "Finding",
    "Findings",
    "RankClasses",
    "Severity",
    "Step",
    "Streak",
    "StreakRule",
    "Threshold",
    "Verdict",
]


class EventRule(Detector):
    """A rule about something that a rank announces once, without waiting for the others."""

    topics: ClassVar[tuple[str, ...]] = ("alone",)
    #: What it listens to: `name` of an announcement `alone:<name>`, or `name:kind` for one kind of it.
    events: ClassVar[tuple[str, ...]]

    def judge(self, fact: Any) -> Fields | None:
        """Fields of the finding about one rank's announcement, None where nothing is wrong; called for each.

        Step, rank and location are those of the announcement unless given.
        """
        raise NotImplementedError

    def compare(self, topic: str, facts: Mapping[int, Any]) -> Findings:
        name = topic.removeprefix("alone:")
        for rank, fact in sorted(facts.items()):
            if not {name, f"{name}:{getattr(fact, 'kind', None)}"} & {*self.events}:
                continue
            if (fields := self.judge(fact)) is not None:
                about = {"step": fact.step, "ranks": (rank,), "location": getattr(fact, "location", None)}
                yield self.finding(**{**about, **fields})


class Streak(NamedTuple):
    """Steps in a row that have shown the same."""

    first: int  # the step that began it
    length: int  # number of steps


class StreakRule(Detector):
    """A rule about something that shows in a number of steps in a row of one optimizer."""

    #: How many steps in a row.
    enough: ClassVar[Threshold]

    def __init__(self, config: Fields | None = None) -> None:
        super().__init__(config)
        self._streaks: dict[tuple[int, Hashable], Streak] = {}

    @property
    def awake(self) -> bool:
        return bool(self._streaks)

    def shown(self, step: Step) -> Mapping[Any, bool] | None:
        """Whether the step shows it, for everything counted by itself (a rank, a layer); None where it does not count.

        Called once per step; for rules with `wants` once more before, and then it must not change the memory.
        """
        raise NotImplementedError

    def report(self, step: Step, streaks: Mapping[Any, Streak]) -> Findings:
        """Findings about the streaks that are long enough; called while there are any."""
        raise NotImplementedError

    def suspects(self, step: Step) -> bool:
        shown = self.shown(step) or {}
        return any(self._longer(step, key).length == int(self.enough) for key, shows in shown.items() if shows)

    def detect(self, step: Step) -> Findings:
        shown = self.shown(step)
        if shown is None:
            return
        if step.chosen:  # who is not there is an ordinary rank
            for key in self.running(step.optimizer):
                if key not in shown:
                    del self._streaks[step.optimizer, key]
        for key, shows in shown.items():
            if shows:
                self._streaks[step.optimizer, key] = self._longer(step, key)
            else:
                self._streaks.pop((step.optimizer, key), None)
        full = {key: self._streaks[step.optimizer, key] for key, shows in shown.items() if shows}
        if full := {key: streak for key, streak in full.items() if streak.length >= self.enough}:
            yield from self.report(step, full)

    def running(self, optimizer: int) -> list[Any]:
        """What is in a streak of an optimizer now."""
        return [key for owner, key in self._streaks if owner == optimizer]

    def _longer(self, step: Step, key: Hashable) -> Streak:
        first, length = self._streaks.get((step.optimizer, key), (step.step, 0))
        return Streak(first, length + 1)


class ComparisonRule(Detector):
    """A rule about ranks that differ where they should agree.

    The diagnosis knows from `rank_classes`, without details, that the ranks still differ as an open incident has it,
    that they agree again, and that further ranks have parted.
    """

    incident: ClassVar[tuple[str, ...]] = ("subject", "phase", "location")
    #: Judges chosen rows of ranks that have parted as well: one rank of each kind says what it looks for.
    by_kind: ClassVar[bool] = False

    def rank_classes(self, step: Step) -> RankClasses | None:
        """What each rank shows, empty when they agree, None when the step cannot tell; called for every step."""
        raise NotImplementedError

    def report(self, step: Step, classes: RankClasses) -> Findings:
        """Findings of a step whose ranks differ, with the details in `wants` as far as there are any."""
        raise NotImplementedError

    def remember(self, step: Step, classes: RankClasses | None) -> None:
        """Add a judged step to the memory; a rule that overrides it is given every step."""

    def is_new_event(self, step: Step) -> bool:
        """Whether something new happened although the ranks differ as before; called while an incident is open."""
        return False

    def suspects(self, step: Step) -> bool:
        return bool(self.rank_classes(step))

    def detect(self, step: Step) -> Findings:
        classes = self.rank_classes(step)
        if classes:
            yield from self.report(step, classes)
        self.remember(step, classes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What explains a difference, and what shows it."""

    ranks: tuple[int, ...]
    subject: tuple[str, ...] = ()
    phase: str | None = None
    location: str | None = None
    step: int | None = None  # where that is not the step that shows it
    evidence: Mapping[str, Any] = field(default_factory=dict)
    title: str | None = None  # where that of the rule says too much


class ChainRule(ComparisonRule):
    """One of several comparison rules with a common difference: the first in the chain that can explain it speaks."""

    #: The link before this one.
    after: ClassVar[type[ChainRule] | None] = None

    @classmethod
    def verdict(cls, step: Step) -> Verdict | None:
        """What this rule's link shows, None where it shows nothing; called when no link before it has a verdict."""
        raise NotImplementedError

    def word(self, step: Step, verdict: Verdict) -> Finding:
        """The finding for a verdict."""
        raise NotImplementedError

    def report(self, step: Step, classes: RankClasses) -> Findings:
        own = None if self._is_explained(self.after, step) else self._known(type(self), step)
        if own is not None:
            yield self.word(step, own)

    @classmethod
    def _is_explained(cls, link: type[ChainRule] | None, step: Step) -> bool:
        return link is not None and (cls._is_explained(link.after, step) or cls._known(link, step) is not None)

    @staticmethod
    def _known(link: type[ChainRule], step: Step) -> Verdict | None:
        key = ("verdict", link.code)
        if key not in step.memo:
            step.memo[key] = link.verdict(step)
        verdict: Verdict | None = step.memo[key]
        return verdict
