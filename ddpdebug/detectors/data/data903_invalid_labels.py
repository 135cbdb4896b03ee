"""DATA903: labels are out of range or of the wrong dtype."""

from __future__ import annotations

from ddpdebug.detectors.examples import steps
from ddpdebug.detectors.kinds import EventRule, Examples, Facts, Fields, Severity
from ddpdebug.schema.announcements import Failure, TargetCases, TargetRange

#: What torch's losses raise about labels.
MESSAGES = (
    "is out of bounds.",
    "expected scalar type Long but found",
    "Expected floating point type for target with class probabilities",
    "multi-target not supported",
    "all elements of target should be between 0 and 1",
    "Class values must be",
    "target class id",
    "nll_loss_out_frame",
    "nll_loss2d_forward_out_frame",
)
#: The same of a GPU, where the text does not say of what; the line does, if the device was waited for.
_ON_DEVICE = "device-side assert triggered"
_ASSERT = {"reason": f"exception: AcceleratorError: CUDA error: {_ON_DEVICE}", "phase": "loss"}
_FACT = {
    "kind": "range",
    "step": 0,
    "loss": "BinaryCrossEntropyWithLogits",
    "low": -1.0,
    "high": 1.0,
    "location": "train.py:58",
}


_CASES = {
    "kind": "cases",
    "step": 0,
    "loss": "CosineEmbedding",
    "neither": 30,
    "targets": 64,
    "location": "train.py:58",
}


_CASES_TITLE = "targets of 0 and 1 for a loss that expects 1 and -1"
_RANGE_TITLE = "targets outside of 0 to 1 for a binary loss"


def _between(low: float, high: float) -> tuple[Facts]:
    return (Facts(topic="alone:loss", values={0: {**_FACT, "low": low, "high": high}}),)


class InvalidLabels(EventRule):
    """Labels lie outside what the loss defines, or their dtype selects another meaning of the loss.

    Impact: on cuda an index out of range ends in a device-side assert that leaves the process's cuda context
    unusable; binary cross entropy with logits accepts any target and has no lower bound; float targets of the
    logits' shape are taken as class probabilities.

    Diagnosis: print `labels.dtype, labels.min(), labels.max(), labels.unique()` beside `logits.shape`, on the CPU
    or with `CUDA_LAUNCH_BLOCKING=1`, since the assert is reported later than it occurs. Map the value back to its
    sample. Compare the label map with the size of the last layer.

    Causes:
    - `labels from`, `labels to`: targets of -1 and 1, or 0 and 255, for a binary loss, which expects 0 to 1; label maps
      resized with interpolation
    - `neither 1 nor -1`: targets of 0 and 1 for a loss that knows 1 and -1 (`cosine_embedding_loss`,
      `hinge_embedding_loss`, `soft_margin_loss`): samples of 0 get no gradient, or that of a case that does not exist
    - `Target -1`, `Target 255`: an ignore value other than -100, such as 255 in segmentation maps, without
      `ignore_index=255`
    - labels that start at 1, or an extra class (background, unknown) that the head lacks
    - a tokenizer with more entries than the embedding or the head
    - a label column of strings or floats that was converted carelessly

    Remedy:
    - `labels from`, `labels to`: bring targets to 0 and 1: `(target + 1) / 2` for -1 and 1, `target / 255` for bytes;
      resize label maps with `mode="nearest"`
    - `neither 1 nor -1`: pass `2 * target - 1`: 1 where the two belong together, -1 where they do not
    - `Target -1`, `Target 255`: pass that value as `ignore_index`
    - number classes from 0 in the dataset and convert with `.long()`; call the model's resize function for its
      embeddings after tokens were added
    - assert the range in collate, where the sample's id is still known
    """

    code = "DATA903"
    severity = Severity.ERROR
    title = "labels are out of range or of the wrong dtype"
    events = ("loss:range", "loss:cases", "failure")
    fires_on = Examples(
        lambda: Facts(topic="alone:loss", values={0: _FACT, 1: _FACT}),
        lambda: Facts(topic="alone:loss", values={0: _CASES, 1: _CASES}),
        lambda: _between(0.0, 1.001),
        lambda: _between(-0.001, 1.0),
        lambda: Facts(
            topic="alone:failure", values={1: {"reason": "exception: IndexError: Target 10 is out of bounds."}}
        ),
        lambda: Facts(topic="alone:failure", values={1: {**_ASSERT, "blocking": True}}),
    )
    silent_on = Examples(
        lambda: steps(3),
        lambda: _between(0.0, 1.0),
        lambda: _between(0.1, 0.9),
        lambda: Facts(topic="alone:loss", values={0: {**_FACT, "kind": "broadcast"}}),
        lambda: Facts(topic="alone:failure", values={1: {"reason": "exception: IndexError: list index out of range"}}),
        lambda: Facts(topic="alone:failure", values={1: _ASSERT}),  # noticed there, and may be of anything before
    )

    def judge(self, fact: TargetRange | TargetCases | Failure) -> Fields | None:
        if isinstance(fact, TargetCases):
            evidence = {"targets": fact.targets, "neither_1_nor_-1": fact.neither, "allowed": [-1, 1]}
            return {"title": _CASES_TITLE, "subject": (fact.loss,), "evidence": evidence}
        if isinstance(fact, TargetRange):
            if fact.low >= 0 and fact.high <= 1:  # a probability
                return None
            evidence = {"labels_from": fact.low, "labels_to": fact.high, "allowed": [0, 1]}
            return {"title": _RANGE_TITLE, "subject": (fact.loss,), "evidence": evidence}
        in_loss = _ON_DEVICE in fact.reason and fact.blocking and fact.phase == "loss"
        if not (in_loss or any(message in fact.reason for message in MESSAGES)):
            return None
        step = fact.step if fact.raised_in is None else fact.raised_in  # the one that FAIL1011 names
        return {"step": step, "subject": ("labels",), "evidence": {"ended_with": fact.reason[:200]}}
