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


_EARLY: Fields = {
    "title": "the schedule is stepped per batch and has ended early",
    "phase": "early",
    "causes": (
        "its lengths are counted in epochs, and it is stepped after each batch",
        "its total was computed for a shorter run: fewer epochs, or a loader that was sharded once more",
        "intended: a rate that goes up and down again, for which a schedule with restarts is meant",
    ),
    "actions": (
        "call `scheduler.step()` once per epoch, or count `T_max`, `step_size`, `milestones`, `total_iters` in batches",
        "for cycles use `CosineAnnealingWarmRestarts` or `CyclicLR`",
    ),
}
_LATE: Fields = {
    "title": "the schedule is stepped per epoch and its length is counted in batches",
    "phase": "late",
    "causes": (
        "its total is the number of steps or batches, and it is stepped once per epoch: the rate hardly moves",
        "`scheduler.step()` stands one level too far out",
    ),
    "actions": ("call `scheduler.step()` after each `optimizer.step()`, or give the schedule the number of epochs",),
}
_LONG: Fields = {
    "title": "the schedule is several times as long as the run",
    "phase": "long",
    "causes": (
        "its total was computed before the loader was sharded: it is as many times too long as there are ranks",
        "its total counts batches, and it is stepped once for several of them (gradient accumulation)",
        "the run was cut short",
    ),
    "actions": ("compute the total from `len(loader)` of one rank, divided by the accumulation steps",),
}
_AGAIN: Fields = {
    "title": "the schedule starts again although the optimizer was restored",
    "phase": "resume",
    "causes": (
        "a resume that loads model and optimizer, and not the scheduler",
        "the scheduler is made after the checkpoint was loaded, so that what was loaded into it is gone",
        "`last_epoch` was given the number of the epoch, and the schedule is stepped per batch",
        "intended: another schedule for a second stage, with the optimizer's state kept",
    ),
    "actions": (
        "save `scheduler.state_dict()` in the checkpoint, and load it after the scheduler has been made",
        "or make the scheduler with `last_epoch=` the number of calls that it had",
    ),
}
_WORSE: Fields = {
    "title": "the schedule lowers the rate because its measure has moved the wrong way from the first call on",
    "phase": "measure",
    "causes": (
        "`ReduceLROnPlateau` is given a measure that shall rise (an accuracy) in its usual mode, which is `min`",
        "what it is given really becomes worse: the model overfits, or the measure is not that of what is trained",
    ),
    "actions": ('pass `mode="max"` for a measure that shall rise', "or give it the validation loss"),
}
#: What these are told is no total.
_BY_FACTOR = frozenset({"StepLR", "MultiStepLR", "ExponentialLR"})


def _used(calls: int, steps: int, length: int, **more: Any) -> Facts:
    fact = {"class": "CosineAnnealingLR", "step": steps, "steps": steps, "calls": calls, "length": length, **more}
    return Facts(topic="alone:schedule", values={0: fact})


class SchedulerOutOfStep(WindowHabit, EventRule):
    """The learning-rate scheduler advanced more often than the optimizer, once per micro-batch say, or never.

    Or it is stepped per batch and its lengths are counted in epochs, or the other way round. Or the run ends, and the
    schedule is as many times longer as there are ranks, or micro-batches in a step. Or `ReduceLROnPlateau` has cut the
    rate twice, and none of its measures was as good as the first.

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
        "steps of an optimizer without a scheduler step, from which on it was forgotten",
        source="chosen: a run that is shorter may end before the first epoch does",
    )
    schedule_resumed_steps = Threshold(
        8,
        "steps of a loaded optimizer from which on its schedule must have moved too",
        source="chosen: a checkpoint is not written earlier; one from the first epoch may have a schedule of epochs",
    )
    schedule_per_batch = Threshold(
        0.9,
        "calls of a schedule per optimizer step, from which on it is stepped per batch",
        source="a gradient scaler skips a few steps",
    )
    schedule_early = Threshold(
        0.5,
        "share of the steps after which a schedule stepped per batch stays lowest",
        source="chosen: what decays to nothing does so towards the end, and no run spends half of its steps there",
    )
    schedule_left = Threshold(
        0.05,
        "share of the rate at a schedule's end, up to which training ends there",
        source="chosen: one drop to a tenth, after which most of a run follows, is usual where an epoch is one batch",
    )
    schedule_longest = Threshold(
        300,
        "length of a schedule, up to which it may be a number of epochs",
        source="recipes of image classifiers train for 90 to 300 epochs (DeiT: 300); longer ones may be cycles",
    )
    schedule_late = Threshold(
        0.25,
        "share of its length that a schedule has passed at the end of a run",
        source="per epoch instead of per batch it is one by the number of batches in an epoch, 4 at the least",
    )
    schedule_same_unit = Threshold(
        0.05,
        "relative difference of a schedule's length and the run's steps or batches",
        source="the last batch of an epoch may be dropped in the one count and not in the other",
    )
    fires_on = Examples(
        lambda: _used(6, 48, 0, **{"class": "ReduceLROnPlateau", "cuts": 3, "measures": [0.4, 0.8]}),
        lambda: Facts(topic="alone:schedule", values={0: {"class": "LambdaLR", "steps": 50, "begins_again": True}}),
        lambda: _used(4, 60, 0, begins_again=True),
        lambda: _used(40, 40, 6),
        lambda: _used(300, 300, 80, left=0.01, **{"class": "MultiStepLR"}),
        lambda: _used(4000, 4000, 90, **{"class": "StepLR"}),
        lambda: _used(6, 240, 240),
        lambda: _used(80, 80, 320, world=4, passes=80, **{"class": "OneCycleLR"}),
        lambda: _used(6, 120, 240, passes=240),
        lambda: steps(4, flags=Flag.SCHEDULED_OFTEN, micro_batches=4, recipe=_OFTEN),
        lambda: Facts(topic="alone:schedule", values={0: {"class": "CosineAnnealingLR", "step": 80, "steps": 40}}),
    )
    silent_on = Examples(
        lambda: Facts(topic="alone:schedule", values={0: {"class": "LambdaLR", "steps": 3, "begins_again": True}}),
        lambda: steps(6),
        lambda: Facts(topic="alone:schedule", values={0: {"class": "CosineAnnealingLR", "step": 80, "steps": 39}}),
        lambda: steps(3, flags=Flag.SCHEDULED_OFTEN, recipe=_OFTEN),
        lambda: _used(240, 240, 240),
        lambda: _used(80, 80, 240, world=4, passes=80),  # a run that was cut short
        lambda: _used(80, 80, 160, passes=160),  # one stage, after which another one came
        lambda: _used(240, 240, 121),
        lambda: _used(6, 240, 6),  # per epoch
        lambda: _used(6, 240, 3),  # per epoch, a cycle
        lambda: _used(9000, 9000, 500),  # cycles of a thousand steps
        lambda: _used(9, 90, 90, **{"class": "StepLR"}),
        lambda: _used(300, 300, 80, left=0.1, **{"class": "MultiStepLR"}),  # one drop, epochs of one batch
        lambda: _used(5, 240, 90),  # a run that was cut short
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
        if fact.begins_again:
            return self._again(fact)
        if fact.cuts:
            first, last = fact.measures
            evidence = {"cuts": fact.cuts, "first_measure": first, "last_measure": last, "calls": fact.calls}
            return {**_WORSE, "severity": Severity.WARNING, "subject": (fact.class_name,), "evidence": evidence}
        if not fact.calls:
            return self._never(fact)
        if fact.length is None or not fact.steps:
            return None
        per_step = fact.calls / fact.steps
        units = (fact.steps, fact.passes)
        if per_step >= self.schedule_per_batch:
            ended = fact.length <= min(self.schedule_early * fact.steps, self.schedule_longest)
            ended = ended and fact.left <= self.schedule_left
            world, passes = fact.world or 0, fact.passes / fact.steps
            times = [n for n in (world, passes, world * passes) if world and n > 1]
            found = _EARLY if ended else _LONG if any(self._is(fact.length, n * fact.calls) for n in times) else None
        else:
            same = fact.class_name not in _BY_FACTOR and any(self._is(fact.length, unit) for unit in units)
            found = _LATE if same and 1 < fact.calls <= self.schedule_late * fact.length else None
        if found is None:
            return None
        evidence = {"calls": fact.calls, "optimizer_steps": fact.steps, "length_of_the_schedule": fact.length}
        step = fact.length if found is _EARLY else 0
        about = {"severity": Severity.WARNING, "step": step, "last_step": fact.step, "subject": (fact.class_name,)}
        return {**found, **about, "evidence": evidence}

    def _is(self, length: float, other: float) -> bool:
        """Whether a length is that of several, or of other, steps of the run."""
        return abs(length - other) <= self.schedule_same_unit * other

    def _again(self, fact: UnusedSchedule) -> Fields | None:
        if fact.steps < self.schedule_resumed_steps:
            return None
        evidence = {"steps_of_the_optimizer": fact.steps, "calls_of_the_schedule": fact.calls}
        return {**_AGAIN, "severity": Severity.WARNING, "subject": (fact.class_name,), "evidence": evidence}

    def _never(self, fact: UnusedSchedule) -> Fields | None:
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
