"""RCP822: what was loaded, and what begins with it, does not belong to one moment."""

from __future__ import annotations

from typing import Any

from ddpdebug.detectors.comparison import MAX_NAMES
from ddpdebug.detectors.examples import steps
from ddpdebug.detectors.kinds import EventRule, Examples, Facts, Fields, Severity, Threshold
from ddpdebug.schema.announcements import Restored

_SAID: dict[str, Fields] = {
    "names": {
        "title": "a checkpoint's names do not fit the model's, and the load (`strict=False`) keeps that silent",
        "causes": (
            "names begin with `module.` (saved from DDP), `_orig_mod.` (from `torch.compile`) or with another part",
            "the file is of another model, or its weights lie below a key (`state_dict`, `model`)",
            "all entries were filtered out before the load",
            "a distributed checkpoint that is read with `allow_partial_load=True`",
        ),
        "actions": (
            "print what `load_state_dict` returns: `missing_keys` and `unexpected_keys`",
            "strip the prefix, and load with `strict=True`; take out by name what shall not be loaded",
        ),
    },
    "overwritten": {
        "title": "loaded weights were changed before training begins",
        "causes": (
            "an initialisation runs over the model after the load (`model.apply(init)`, a constructor's last line)",
            "another rank has loaded nothing, or something else, and its weights were broadcast",
            "intended: all weights are changed after the load (averaged, perturbed)",
        ),
        "actions": ("load last: after the model is built, initialised and changed, and before DDP wraps it",),
    },
    "itself": {
        "title": "`load_state_dict` restores nothing: the state is the model's own tensors",
        "causes": (
            "`best = model.state_dict()` keeps references, no copy: they have changed with each step since",
            "the weights that an evaluation has put aside were kept in the same way",
        ),
        "actions": ("keep `copy.deepcopy(model.state_dict())`, or clones on the CPU, or a file",),
    },
    "order": {
        "title": "an optimizer's state was loaded for other parameters: their order is not that of the saved ones",
        "causes": (
            "groups or parameters are listed otherwise than in the run that saved: sorted, filtered, another set",
            "modules were renamed or moved, so that `named_parameters()` gives them in another order",
        ),
        "actions": (
            "build the optimizer from the same list as in the run that saved",
            "or put the state in order by name in a hook: `optimizer.register_load_state_dict_pre_hook`",
        ),
    },
    "average": {
        "title": "weights are loaded into the model but not into its averaged copy (EMA)",
        "causes": (
            "a resume that loads the model, while its average (EMA, mean teacher, target network) was made before",
            "the average is made from the model before pretrained weights are loaded into that",
            "intended: the average may forget where it began",
        ),
        "actions": (
            "save the average's `state_dict()` in the checkpoint and load it, beside the model's",
            "or copy the model for the average after its weights were loaded",
        ),
    },
    "ended": {
        "title": "the learning rate schedule is already over when training begins",
        "causes": (
            "a new stage (fine-tuning, more epochs) that loads the schedule and the optimizer of a finished run",
            "loading the schedule has put the old length in the place of the new one",
        ),
        "actions": (
            "for a new stage make optimizer and schedule anew, and load the weights alone",
            "to train on, make the schedule of the whole length and give it `last_epoch=`",
        ),
    },
    "optimizer": {
        "title": "the run goes on where another has ended, but the optimizer's state was not restored",
        "causes": (
            "a resume that loads model, epoch or scheduler, and not the optimizer",
            "the optimizer is made anew after its state was loaded",
            "intended: a schedule that is wound forward for a new optimizer",
        ),
        "actions": ("save `optimizer.state_dict()` in the checkpoint, and load it after the optimizer is made",),
    },
    "left": {
        "title": "weights were read from a checkpoint without the optimizer's state that lies beside them",
        "severity": Severity.INFO,
        "causes": (
            "a resume that reads the model and not the optimizer",
            "intended: a new stage that begins from the weights alone",
        ),
        "actions": (
            "to train on, read both: `get_state_dict(model, optimizer)` before `dcp.load`, `set_state_dict` after it",
        ),
    },
    "rebuilt": {
        "title": "an optimizer, scaler or schedule is created again and again and loses its state each time",
        "causes": (
            "optimizer, schedule or loss scaler is made inside of the loop, or in a function that each epoch calls",
            "intended: rounds, as federated averaging has them, or restarts",
        ),
        "actions": ("make it once, before the first epoch, and hand it to the function",),
    },
}


def _told(kind: str, **more: Any) -> tuple[Facts]:
    fact = {"kind": kind, "class": "AdamW", "step": 50, **more}
    return (Facts(topic="alone:restored", values={0: fact, 1: fact}),)


class RestoredInPart(EventRule):
    """Model, optimizer and schedule belong to different moments: something was not loaded, or did not stay.

    Seen are `load_state_dict` of modules and `torch.distributed.checkpoint.load`, up to the next steps, and what
    optimizers, their schedules and loss scalers begin with. Weights that are copied otherwise and what another file
    holds beside what is loaded are not; of averages those are seen that are modules.

    Impact: training goes on from weights that nobody has trained, or with moments of zero under a rate that is meant
    for the middle of a run: the loss jumps after each resume. A loss scale or a schedule that begins anew each time
    never gets where it should.

    Diagnosis: before the first step after a load print a weight beside that of the file, the optimizer's
    `state[p]["step"]`, `scheduler.last_epoch` and the sampler's epoch: they must be of one moment.

    Causes:
    - `strict=False` hides names that do not fit
    - a part of the checkpoint is not loaded: optimizer, schedule, average
    - the order is wrong: something is built, initialised or wrapped after it was loaded
    - what was kept is no copy, and changes with the model
    - an optimizer, a schedule or a loss scaler that is made in each epoch or step

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
        "optimizers, schedules or scalers that began without the state before",
        source="a second stage of training begins with a new one, once",
    )
    fires_on = Examples(
        lambda: _told("names", names=["0.weight"], number=4, others=4),
        lambda: _told("overwritten"),
        lambda: _told("optimizer", schedule="LambdaLR", calls=50),
        lambda: _told("left", others=3),
        lambda: (*steps(2), *_told("rebuilt", calls=2, steps=15)),
        lambda: _told("itself", number=4),
        lambda: _told("order", names=["0.weight"], number=4),
        lambda: _told("average", location="train.py:9"),
        lambda: _told("ended", schedule="CosineAnnealingLR", calls=40, steps=40),
    )
    silent_on = Examples(
        lambda: steps(3), lambda: _told("rebuilt", calls=1, steps=50), lambda: _told("resumed", steps=50)
    )

    def judge(self, fact: Restored) -> Fields | None:
        if (said := _SAID.get(fact.kind)) is None or (fact.kind == "rebuilt" and fact.calls < self.rebuilt_often):
            return None
        evidence: dict[str, Any] = {
            "names": {"fitted": fact.fitted, "of": fact.number, "names_that_the_model_has_not": fact.others},
            "optimizer": {
                "first_epoch" if fact.schedule is None else "calls_of_the_schedule": fact.calls,
                "steps_of_the_optimizer": 0,
            },
            "left": {"kinds_of_state_in_the_checkpoint": fact.others, "steps_of_the_optimizer": 0},
            "itself": {"parameters": fact.number},
            "order": {"parameters_with_the_state_of_another": fact.number},
            "ended": {"calls_of_the_schedule": fact.calls, "its_length": fact.steps},
            "rebuilt": {"begun_without_state": fact.calls, "steps_of_the_one_before": fact.steps},
        }.get(fact.kind, {})
        subject = fact.names[:MAX_NAMES] or (fact.class_name,)
        return {**said, "phase": fact.kind, "subject": subject, "evidence": evidence}
