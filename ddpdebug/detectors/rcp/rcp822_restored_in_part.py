"""RCP822: what was loaded, and what begins with it, does not belong to one moment."""

from __future__ import annotations

from typing import Any

from ddpdebug.detectors.comparison import MAX_NAMES
from ddpdebug.detectors.examples import steps
from ddpdebug.detectors.kinds import EventRule, Examples, Facts, Fields, Severity, Threshold
from ddpdebug.schema.announcements import Restored

_SAID: dict[str, Fields] = {
    "names": {
        "title": "a checkpoint's names do not fit the model's, and `strict=False` keeps that silent",
        "causes": (
            "names begin with `module.` (saved from DDP), `_orig_mod.` (from `torch.compile`) or with another part",
            "the file is of another model, or its weights lie below a key (`state_dict`, `model`)",
            "all entries were filtered out before the load",
        ),
        "actions": (
            "print what `load_state_dict` returns: `missing_keys` and `unexpected_keys`",
            "strip the prefix, and load with `strict=True`; take out by name what shall not be loaded",
        ),
    },
    "overwritten": {
        "title": "weights that were loaded are others when training begins",
        "causes": (
            "an initialisation runs over the model after the load (`model.apply(init)`, a constructor's last line)",
            "another rank has loaded nothing, or something else, and its weights were broadcast",
            "intended: all weights are changed after the load (averaged, perturbed)",
        ),
        "actions": ("load last: after the model is built, initialised and changed, and before DDP wraps it",),
    },
    "optimizer": {
        "title": "the schedule goes on and the optimizer begins without its state",
        "causes": (
            "a resume that loads model and scheduler, and not the optimizer",
            "the optimizer is made anew after its state was loaded",
            "intended: a schedule that is wound forward for a new optimizer",
        ),
        "actions": ("save `optimizer.state_dict()` in the checkpoint, and load it after the optimizer is made",),
    },
    "rebuilt": {
        "title": "the optimizer is made anew again and again, and its state begins at zero each time",
        "causes": (
            "the optimizer is made inside of the loop over epochs, or in a function that each epoch calls",
            "intended: rounds, as federated averaging has them, or restarts",
        ),
        "actions": ("make the optimizer once, before the first epoch",),
    },
}


def _told(kind: str, **more: Any) -> tuple[Facts]:
    fact = {"kind": kind, "class": "AdamW", "step": 50, **more}
    return (Facts(topic="alone:restored", values={0: fact, 1: fact}),)


class RestoredInPart(EventRule):
    """Model, optimizer and schedule belong to different moments: something was not loaded, or did not stay.

    Seen are `load_state_dict` of modules, up to the next step, and what optimizers and their schedules begin with.
    Weights that are copied otherwise, averages of weights, and what a file holds beside what is loaded are not.

    Impact: training goes on from weights that nobody has trained, or with moments of zero under a rate that is meant
    for the middle of a run: the loss jumps after each resume.

    Diagnosis: before the first step after a load print a weight beside that of the file, the optimizer's
    `state[p]["step"]`, `scheduler.last_epoch` and the sampler's epoch: they must be of one moment.

    Causes:
    - `strict=False` hides names that do not fit
    - a part of the checkpoint is not loaded: optimizer, schedule
    - the order is wrong: something is built, initialised or wrapped after it was loaded
    - an optimizer that is made in each epoch

    Remedy:
    - save and load model, optimizer, scheduler, scaler and the position in the data together, in one function
    - compare the first loss after a resume with the last one before
    """

    code = "RCP822"
    severity = Severity.WARNING
    title = "a run was restored in part"
    events = ("restored",)
    rebuilt_often = Threshold(
        2,
        "optimizers of the same parameters that began without the state of the one before",
        source="a second stage of training begins with a new one, once",
    )
    fires_on = Examples(
        lambda: _told("names", names=["0.weight"], number=4, others=4),
        lambda: _told("overwritten"),
        lambda: _told("optimizer", schedule="LambdaLR", calls=50),
        lambda: (*steps(2), *_told("rebuilt", calls=2, steps=15)),
    )
    silent_on = Examples(
        lambda: steps(3), lambda: _told("rebuilt", calls=1, steps=50), lambda: _told("resumed", steps=50)
    )

    def judge(self, fact: Restored) -> Fields | None:
        if (said := _SAID.get(fact.kind)) is None or (fact.kind == "rebuilt" and fact.calls < self.rebuilt_often):
            return None
        evidence: dict[str, Any] = {
            "names": {"fitted": fact.fitted, "of": fact.number, "names_that_the_model_has_not": fact.others},
            "optimizer": {"calls_of_the_schedule": fact.calls, "steps_of_the_optimizer": 0},
            "rebuilt": {"optimizers_without_state": fact.calls, "steps_of_the_one_before": fact.steps},
        }.get(fact.kind, {})
        subject = fact.names[:MAX_NAMES] or (fact.class_name,)
        return {**said, "phase": fact.kind, "subject": subject, "evidence": evidence}
