"""What the rules about habits of the training loop share: a flag in a number of steps in a row, and its detail."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any, ClassVar

from ddpdebug.detectors.kinds import Findings, Step, Streak, StreakRule, Threshold
from ddpdebug.schema.details import Recipe
from ddpdebug.schema.row import Flag, Row
from ddpdebug.schema.wire import to_json

_NEVER = 1 << 60


class HabitRule(StreakRule):
    """A rule about a flag that ranks set in several steps in a row, and what the `recipe` details say about it."""

    flag: ClassVar[Flag]
    #: Flags beside which that flag is in order.
    unless: ClassVar[Flag] = Flag(0)
    key: ClassVar[str]  # the field of `Recipe`
    wants = ("recipe",)

    def __init_subclass__(cls) -> None:
        if hasattr(cls, "flag"):
            cls.reads = (cls.flag,)

    def shown(self, step: Step) -> Mapping[Hashable, bool] | None:
        shows = bool(self._ranks(step))
        return {self.key: shows} if shows or not step.any(Flag.SKIPPED) else None

    def shows(self, row: Row) -> bool:
        """Whether a rank that has set the flag shows the habit."""
        return not row.flags & int(self.unless)

    def describe(self, about: Any) -> dict[str, Any] | None:
        """Fields of the finding about one rank's detail, None where nothing is wrong; called for a long streak."""
        evidence = to_json(about)
        return {"location": evidence.pop("location"), "evidence": evidence}

    def report(self, step: Step, streaks: Mapping[Any, Streak]) -> Findings:
        ranks = self._ranks(step)
        known = (getattr(recipe, self.key) for rank, recipe in sorted(step.answers(Recipe).items()) if rank in ranks)
        about = next((entry for entry in known if entry is not None), None)
        fields = self.describe(about) if about is not None else {}
        if fields is None:  # nothing more of it is judged, until it has ended
            self._streaks[step.optimizer, self.key] = Streak(streaks[self.key].first, -_NEVER)
        else:
            yield self.finding(**{"step": streaks[self.key].first, "last_step": step.step, "ranks": ranks, **fields})

    def _ranks(self, step: Step) -> tuple[int, ...]:
        return tuple(rank for rank in step.ranks_with(self.flag) if self.shows(step.row_of(rank)))


class StepHabit(HabitRule):
    """A habit that every step shows."""

    habit_steps = enough = Threshold(
        3,
        "steps in a row with the same mistake in the loop",
        source="chosen: one step is an exception (a skipped batch, a resume), two are chance",
    )


class WindowHabit(HabitRule):
    """A habit of steps that are made of several backward passes or scheduler calls."""

    habit_steps_window = enough = Threshold(
        4,
        "steps in a row with the same mistake where a step has several backward passes or scheduler calls",
        source="a resume that winds a schedule forward takes one step",
    )
