"""What the rules about habits of the training loop share: a flag in a number of steps in a row, and its detail."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any, ClassVar

from ddpdebug.detectors.kinds import Findings, Step, Streak, StreakRule, Threshold
from ddpdebug.schema.details import Recipe
from ddpdebug.schema.row import Flag
from ddpdebug.schema.wire import to_json


class HabitRule(StreakRule):
    """A rule about a flag that ranks set in several steps in a row, and what the `recipe` details say about it."""

    flag: ClassVar[Flag]
    key: ClassVar[str]  # the field of `Recipe`
    wants = ("recipe",)

    def shown(self, step: Step) -> Mapping[Hashable, bool] | None:
        shows = step.any(self.flag)
        return {self.key: shows} if shows or not step.any(Flag.SKIPPED) else None

    def describe(self, about: Any) -> dict[str, Any] | None:
        """Fields of the finding about one rank's detail, None where nothing is wrong; called for a long streak."""
        evidence = to_json(about)
        return {"location": evidence.pop("location"), "evidence": evidence}

    def report(self, step: Step, streaks: Mapping[Any, Streak]) -> Findings:
        known = (getattr(recipe, self.key) for _, recipe in sorted(step.answers(Recipe).items()))
        about = next((entry for entry in known if entry is not None), None)
        if (fields := self.describe(about) if about is not None else {}) is not None:
            ranks = step.ranks_with(self.flag)
            yield self.finding(**{"step": streaks[self.key].first, "last_step": step.step, "ranks": ranks, **fields})


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
        "the same where a step is made of several backward passes or scheduler calls",
        source="a resume that winds a schedule forward takes one step",
    )
