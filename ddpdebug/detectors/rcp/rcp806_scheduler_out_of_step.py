"""RCP806: the scheduler is out of step with the optimizer."""

from __future__ import annotations

from typing import Any

from ddpdebug.detectors.examples import steps
from ddpdebug.detectors.kinds import EventRule, Examples, Facts, Fields, Severity, Threshold
from ddpdebug.detectors.rcp.habits import WindowHabit
from ddpdebug.schema.announcements import UnusedSchedule
from ddpdebug.schema.details import ScheduledOften
from ddpdebug.schema.row import Flag

_OFTEN: dict[int, Any] = {
    r: {"scheduler": {"class": "OneCycleLR", "calls": 4, "micro_batches": 4, "location": "train.py:66"}}
    for r in range(4)
}
_NEVER = (
    "the loop lacks `scheduler.step()`, or it stands in a branch that never runs",
    "another scheduler than the one that was made is stepped, of an optimizer that does not train",
    "it is meant for a later phase (averaging of weights), which the run did not reach",
)


class SchedulerOutOfStep(WindowHabit, EventRule):
    """The learning-rate scheduler advanced more often than the optimizer, once per micro-batch say, or never.

    Impact: the learning rate decays too early or too late by a factor: a warm-up that ends after a fraction of its
    length, a rate near 0 for most of the run, or a schedule that never moves.

    Diagnosis: print `scheduler.last_epoch` beside the number of optimizer steps, and plot the lr in the optimizer
    over steps. Compare their ratio with accumulation steps, with world size and with steps per epoch: it is usually
    exactly one of them. Compare `T_max` or `total_steps` with the optimizer steps that will really happen.

    Causes:
    - `scheduler.step()` inside the micro-batch loop under accumulation
    - `T_max` or `total_steps` counted in batches or epochs while the scheduler steps in the other unit
    - a wrapper that advances the scheduler once per process, or a user call on top of the trainer's own
    - a scheduler stepped although the gradient scaler skipped the optimizer step
    - a resume that restored the optimizer and not the scheduler
    - a scheduler that is made and never stepped: told at the end of a run that ended by itself

    Remedy:
    - call `scheduler.step()` right after `optimizer.step()`, once, under the same condition
    - compute the total as `epochs * ceil(len(loader) / accumulation)` on the sharded loader
    - save and load `scheduler.state_dict()`
    - with a gradient scaler skip the scheduler when the scale went down
    """

    code = "RCP806"
    severity = Severity.ERROR
    title = "the scheduler is out of step with the optimizer"
    events = ("schedule",)
    flag = Flag.SCHEDULED_OFTEN
    key = "scheduler"
    schedule_unused_steps = Threshold(
        40,
        "steps of an optimizer whose scheduler nothing has stepped, from which on it was forgotten",
        source="chosen: a run that is shorter may end before the first epoch does",
    )
    fires_on = Examples(
        lambda: steps(4, flags=Flag.SCHEDULED_OFTEN, micro_batches=4, recipe=_OFTEN),
        lambda: Facts(topic="alone:schedule", values={0: {"class": "CosineAnnealingLR", "step": 80, "steps": 40}}),
    )
    silent_on = Examples(
        lambda: steps(6),
        lambda: Facts(topic="alone:schedule", values={0: {"class": "CosineAnnealingLR", "step": 80, "steps": 39}}),
        lambda: steps(3, flags=Flag.SCHEDULED_OFTEN, recipe=_OFTEN),
        lambda: (
            *steps(1, flags=Flag.SCHEDULED_OFTEN, recipe=_OFTEN),
            *steps(5, start=1),
        ),  # wound forward after a resume
    )

    def describe(self, about: ScheduledOften) -> dict[str, Any] | None:
        calls, micro = about.calls, about.micro_batches
        what = "per micro-batch" if calls == micro else f"{calls} times per optimizer step"
        evidence = {"stepped": what, "calls": calls, "micro_batches": micro}
        return {"subject": (about.class_name,), "location": about.location, "evidence": evidence}

    def judge(self, fact: UnusedSchedule) -> Fields | None:
        if fact.steps < self.schedule_unused_steps:
            return None
        return {
            "severity": Severity.WARNING,
            "title": "the scheduler was never stepped",
            "step": 0,
            "last_step": fact.step,
            "subject": (fact.class_name,),
            "evidence": {"stepped": "never", "optimizer_steps": fact.step},
            "causes": _NEVER,
            "actions": ("call `scheduler.step()`, once per optimizer step or per epoch as its lengths are counted",),
        }
