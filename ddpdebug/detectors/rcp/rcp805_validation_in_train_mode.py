"""RCP805: a validation forward runs in train mode."""

from __future__ import annotations

from ddpdebug.detectors.examples import steps
from ddpdebug.detectors.kinds import EventRule, Examples, Facts, Fields, Severity, Threshold
from ddpdebug.schema.announcements import TrainModeValidation

_FACT = {"step": 20, "forwards": 8, "since": 20, "location": "train.py:88"}
_COLLECTED: Fields = {
    "severity": Severity.INFO,
    "title": "training data are collected in train mode",
    "phase": "collection",
    "causes": (
        "what was collected is trained on next (rollouts): dropout and batch statistics take part in the choices",
    ),
    "actions": (
        "if intended, nothing",
        "else `model.eval()` while data are collected, so that ratios of probabilities begin at 1",
    ),
}
_BESIDE: dict[str, Fields] = {
    "frozen": {
        "title": "a frozen part of the model is in train mode: its running statistics still change",
        "phase": "frozen part",
        "causes": (
            "`model.train()` at the start of an epoch has put the part back that was in eval mode",
            "`requires_grad_(False)` was thought to be enough: it does not keep BatchNorm from counting",
            "intended: statistics that adapt to other data while the weights stay",
        ),
        "actions": ("call `eval()` on the part after each `model.train()`, best in an own `train()` of the model",),
    },
    "last": {
        "title": "running statistics follow the last batch alone: BatchNorm momentum is close to 1",
        "phase": "momentum",
        "causes": ("`momentum` as other libraries have it: torch's is the share of the newest batch, 0.1 as a rule",),
        "actions": ("give `1 - momentum`: 0.01 for what is 0.99 elsewhere",),
    },
    "stays": {
        "title": "a frozen model (teacher, reference) runs in train mode",
        "phase": "train mode",
        "causes": (
            "a teacher, reference, reward or feature model that was made, or copied from one, in train mode",
            "`requires_grad_(False)` and `no_grad()` were thought to be enough",
            "intended: noise in the targets",
        ),
        "actions": ("call `eval()` on it once, and again after a `train()` of what holds it",),
    },
    "never": {
        "title": "a copy of the model is evaluated, but training has never changed it",
        "phase": "never updated",
        "causes": (
            "the average (EMA, SWA) is made and evaluated, and its update is not called, or is given another model",
            "the update lies behind a condition (start step, interval) that this run does not reach",
            "intended: a baseline that training is compared with",
        ),
        "actions": ("call the update after each `optimizer.step()`: `average.update_parameters(model)`",),
    },
    "follows": {
        "title": "averaged weights are evaluated with BatchNorm statistics that are not averaged",
        "phase": "statistics",
        "causes": (
            "the average is taken of `parameters()` alone: BatchNorm's running statistics are buffers",
            "`update_bn` was not called on the average before it is evaluated",
        ),
        "actions": (
            "copy the buffers with each update, or `AveragedModel(model, use_buffers=True)`",
            "or `torch.optim.swa_utils.update_bn(loader, average)` before evaluating it",
        ),
    },
}


class ValidationInTrainMode(EventRule):
    """Several forwards without gradients in a row, which are no part of every step, ran in train mode.

    Of the wrapper, or of the inner module where torch's loss functions were called after them. Or a model beside the
    trained one runs in the wrong state: one that stays as it is in train mode, or an average that stays, or whose
    statistics do.
    Or the statistics of the trained one are wrong: a frozen part is in train mode, or they hold the last batch alone.

    Impact: the metric is measured with dropout and batch statistics, depends on batch size and composition, and
    BatchNorm's running statistics absorb validation data.

    Diagnosis: print `model.training` at the start of the evaluation loop, and whether `torch.is_grad_enabled()` is
    false. `torch.no_grad()` does not change the mode. Evaluate the same batch twice: different results mean active
    dropout. Forwards without gradient inside training (a target network, Monte Carlo dropout, a warm-up of
    statistics) may be intended.

    Causes:
    - `model.eval()` is missing, `no_grad` was thought to be enough
    - `eval()` was called on another object, or only on a submodule
    - a callback or a sampling function calls `train()` in the middle of evaluation
    - a teacher or reference model that was never put into eval mode
    - an average that leaves buffers out, or that nothing updates
    - dropout or batch statistics in evaluation on purpose
    - none of these: forwards that collect data for training (reinforcement learning), which dropout disturbs as well;
      a hint where their inputs are seen to be trained on next

    Remedy:
    - `model.eval()` with `torch.no_grad()` or `torch.inference_mode()` around evaluation, `model.train()` after it
    - evaluate every rank on its shard and all-reduce sums and counts rather than means
    """

    code = "RCP805"
    severity = Severity.WARNING
    title = "a validation forward runs in train mode"
    events = ("validation",)
    evaluation_apart = Threshold(
        5,
        "steps between evaluations; more frequent forwards belong to the training step",
        source="a target network or a second view is evaluated in every step or every other",
    )
    fires_on = Examples(
        lambda: Facts(topic="alone:validation", values={0: _FACT, 1: _FACT}),
        lambda: (*steps(2), Facts(topic="alone:validation", values={1: {**_FACT, "forwards": 40}})),
        lambda: Facts(topic="alone:validation", values={0: {**_FACT, "collected": True}}),  # a hint
        lambda: Facts(topic="alone:validation", values={0: {"beside": "stays", "forwards": 8, "names": ["Net", "1"]}}),
        lambda: Facts(topic="alone:validation", values={0: {"beside": "follows", "forwards": 1, "names": ["Net"]}}),
        lambda: Facts(topic="alone:validation", values={0: {"beside": "never", "forwards": 2, "names": ["Net"]}}),
        lambda: Facts(topic="alone:validation", values={0: {"beside": "frozen", "forwards": 8, "names": ["body.1"]}}),
    )
    silent_on = Examples(
        lambda: steps(3),
        lambda: Facts(topic="alone:validation", values={0: {**_FACT, "since": 1}}),  # a part of each step
    )

    def judge(self, fact: TrainModeValidation) -> Fields | None:
        if fact.beside is not None:
            return {**_BESIDE[fact.beside], "subject": fact.names, "evidence": {"forwards": fact.forwards}}
        if fact.since < self.evaluation_apart:
            return None
        evidence = {"forwards_without_gradient_in_train_mode": fact.forwards}
        return {"evidence": evidence, **(_COLLECTED if fact.collected else {})}
