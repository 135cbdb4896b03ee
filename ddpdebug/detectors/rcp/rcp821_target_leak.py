"""RCP821: the target leaks into the input."""

from __future__ import annotations

from typing import Any

from ddpdebug.detectors.base import runbook
from ddpdebug.detectors.examples import steps
from ddpdebug.detectors.kinds import EventRule, Examples, Facts, Fields, Severity, Threshold
from ddpdebug.schema.announcements import TokenChange

_FACT = {
    "step": 40,
    "targets": "moved",
    "before": 0.6,
    "here": 0.7,
    "behind": 0.0,
    "summary": 0.0,
    "module": "blocks.0.attention",
    "position": 31,
    "length": 32,
    "first_loss": 4.2,
    "loss": 0.1,
}
_SAME = {**_FACT, "targets": "same", "before": 0.0, "behind": 0.6, "module": None}
_TWICE: Fields = {
    "title": "language model targets are shifted twice: by two positions",
    "phase": "twice",
    "ranks": (),
    "subject": ("targets",),
    "causes": (
        "the loop or the collator moves the labels, and the model's own loss moves them again",
        "intended: a head that predicts the token after the next",
    ),
    "actions": ("give a model that moves its labels itself `labels=tokens`", "or move them outside, and only there"),
}
_TRAINED: Fields = {
    "title": "evaluation uses the training data only",
    "phase": "training data",
    "subject": ("validation data",),
    "causes": (
        "the validation loader is made of the training set: a copied line, a split that is not used",
        "two splits of one data set that were drawn with different seeds (after a resume, or on each rank)",
        "intended: the loss over the training data is what is wanted",
    ),
    "actions": ("make the loader of the other split", "split once, with a fixed seed, and keep the indices in a file"),
}
_UNMOVED = "the targets are the input tokens, not moved by one: the model learns to copy the token that it is given"


def _told(fact: dict[str, Any], **more: Any) -> tuple[Facts]:
    return (Facts(topic="alone:leak", values={0: {**fact, **more}}),)


class TargetLeak(EventRule):
    """The model is given what it shall predict: a later token changes earlier outputs, or the target is the input.

    Or the targets of a language model are moved by two positions, not by one; or an evaluation is of training data.

    While training the model is asked once: when the loss has fallen below a tenth of what it was and the targets are
    the input tokens, moved by one position; in the first steps where they were not moved; and in the first steps under
    `check`. One rank runs the last forward twice more, in eval mode, with another token. Compiled models, models whose
    forward communicates, and those that sum a text up on the way (auto-encoders) are not asked; `ddpdebug preflight
    --causal` asks before training.

    Impact: training and validation look excellent, and the model fails when the target is not there.

    Diagnosis: the probe: take the output at position t, call backward on it and look at the gradient on the input
    embeddings at positions after t, which must be exactly 0; or change token t + 1 and compare the outputs up to t.
    Print one example as input, mask and target side by side. For tables look for a feature that alone predicts the
    label.

    Causes:
    - the causal mask is missing, transposed or inverted
    - a boolean mask of the wrong sense: True shows in `scaled_dot_product_attention`, hides in `nn.MultiheadAttention`
    - targets not shifted by one, or shifted although the model shifts them itself
    - mixing over positions elsewhere: BatchNorm or a mean over time, a convolution padded on both sides
    - a feature derived from the label, or duplicates between the splits

    Remedy:
    - `F.scaled_dot_product_attention(q, k, v, is_causal=True)`; in `nn.MultiheadAttention` `is_causal` is a hint and
      needs `attn_mask` as well; pad convolutions on the left only
    - use `logits[:, :-1]` with `tokens[:, 1:]`, once
    - keep the gradient probe as a unit test of the model
    - split by group or by time after removing duplicates
    """

    code = "RCP821"
    severity = Severity.WARNING
    title = "the target leaks into the input"
    events = ("leak",)
    leak_change = Threshold(
        1e-4,
        "change of outputs by another token, as a share of the largest output, above which the model sees it",
        source="kernels compute each row alike: what sees no other token changes by nothing at all",
    )
    fires_on = Examples(
        lambda: _told(_FACT),
        lambda: _told(_FACT, before=0.0029),  # attention to 32 tokens that has learned nothing yet
        lambda: (*steps(2), *_told(_SAME)),
        lambda: _told({"step": 5, "targets": "twice", "length": 23}),
        lambda: _told({"step": 20, "targets": "trained", "length": 512}),
        lambda: _told(_SAME, behind=0.0011, loss=4.1, location="train.py:40"),
    )
    silent_on = Examples(
        lambda: steps(3),
        lambda: _told(_FACT, before=1e-4),
        lambda: _told(_FACT, here=0.0),  # what it is asked for does not depend on the token that was changed
        lambda: _told(_FACT, summary=0.001),  # an auto-encoder tells its decoder about the whole text on purpose
        lambda: _told(_SAME, behind=1e-4),  # a model of single tokens
        lambda: _told(_SAME, here=0.0),  # the model moves its inputs itself
        lambda: _told(_SAME, before=1e-6),  # a model that sees everything reconstructs
        lambda: Facts(topic="alone:audit", values={0: {"kind": "frozen", "step": 1, "share": 0.9}}),
    )

    def judge(self, fact: TokenChange) -> Fields | None:
        if fact.targets == "twice":
            return {**_TWICE, "evidence": {"targets": "the inputs moved by two", "of": fact.length}}
        if fact.targets == "trained":
            return {**_TRAINED, "evidence": {"samples": fact.length}}
        moved = fact.targets == "moved"
        if moved:
            change = fact.before if fact.summary == 0 < max(fact.here, fact.behind) else 0.0
        else:
            change = min(fact.here, fact.behind) if fact.before == 0 else 0.0
        if change <= self.leak_change:
            return None
        evidence = {
            "changed_token": fact.position,
            "of": fact.length,
            "change_of_earlier_outputs" if moved else "change_of_later_outputs": round(change, 4),
            "targets": "the inputs moved by one" if moved else "the inputs themselves",
            "first_loss": round(fact.first_loss, 4),
            "loss": round(fact.loss, 4),
        }
        # every rank trains the same model; the one that was asked is no culprit
        subject = (fact.module,) if moved and fact.module is not None else ()
        if moved:
            return {"ranks": (), "subject": subject, "evidence": evidence}
        prose = runbook(type(self))
        shift = [text for text in prose["remedy"] if "tokens[:, 1:]" in text]
        return {
            "ranks": (),
            "title": "language model targets are not shifted by one position",
            "subject": ("targets",),
            "evidence": evidence,
            "causes": [_UNMOVED, *prose["causes"]],
            "actions": list(dict.fromkeys([*shift, *prose["remedy"]])),
        }
