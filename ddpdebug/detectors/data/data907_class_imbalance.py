"""DATA907: the classes that the ranks have seen are strongly imbalanced."""

from __future__ import annotations

from ddpdebug.detectors.examples import steps
from ddpdebug.detectors.kinds import EventRule, Examples, Facts, Fields, Severity, Threshold
from ddpdebug.schema.announcements import LabelCounts

_FACT = {
    "kind": "labels",
    "step": 60,
    "classes": 2,
    "seen": 1920,
    "present": 2,
    "largest": 0,
    "share": 0.97,
    "weighted": False,
}
_PADDING: Fields = {
    "title": "padding counts in the loss",
    "phase": "padding",
    "subject": ("targets",),
    "causes": (
        "the loss does not know what padding is: its `ignore_index` is not the `padding_idx` of the embedding",
        "targets are the inputs moved by one, and were not masked where rows end",
    ),
    "actions": (
        "`F.cross_entropy(..., ignore_index=padding_idx)`, or -100 in the targets where a row has ended",
        "if one token stands for padding and for the end of a text: mask all but the first behind the text",
    ),
}


class ClassImbalance(EventRule):
    """One class makes up nearly all the labels that the losses of this rank have seen.

    Or labels are what the model's embedding takes for padding (`padding_idx`), several in a row.

    Impact: the model may predict the frequent class and still show a good accuracy and a low loss; rare classes are
    not learned.

    Diagnosis: compare the seen counts with the data set's own: equal means that the data are imbalanced, unequal
    means that sampling is. Compare the ranks with each other. Watch metrics per class (recall, balanced accuracy)
    and not the total. Next token prediction is imbalanced by nature.

    Causes:
    - the data are imbalanced
    - unshuffled or partial reading: the window has not reached the other classes yet
    - a filter, a broken label map or a failing loader that removes classes
    - shards by class, so that ranks see different classes

    Remedy:
    - if the data are so: report metrics per class, start the output bias at the log frequencies, and consider
      `weight=` in `F.cross_entropy`, `pos_weight=` in `F.binary_cross_entropy_with_logits`, or a sampler by class
    - `WeightedRandomSampler` does not shard by rank: give each rank its own generator, or wrap it
    - recalibrate probabilities after reweighting
    """

    code = "DATA907"
    severity = Severity.WARNING
    title = "the classes that the ranks have seen are strongly imbalanced"
    events = ("loss:labels",)
    imbalance_labels = Threshold(
        500, "labels that must have been seen", source="the standard error of a share of 95 % is then 1 %"
    )
    imbalance_share = Threshold(
        0.95, "share of one class among all labels", source="a model that always says this class is right in 95 %"
    )
    fires_on = Examples(
        lambda: Facts(topic="alone:loss", values={0: {**_FACT, "share": 0.3, "padding": 0, "padded": 600}}),
        lambda: Facts(topic="alone:loss", values={0: _FACT, 1: _FACT}),
        lambda: (*steps(2), Facts(topic="alone:loss", values={1: {**_FACT, "share": 0.99, "classes": 20}})),
    )
    silent_on = Examples(
        lambda: Facts(topic="alone:loss", values={0: {**_FACT, "share": 0.3, "padding": 0}}),
        lambda: steps(3),
        lambda: Facts(topic="alone:loss", values={0: {**_FACT, "share": 0.8}}),
        lambda: Facts(topic="alone:loss", values={0: {**_FACT, "weighted": True}}),  # known, and dealt with
        lambda: Facts(
            topic="alone:loss", values={0: {**_FACT, "present": 1, "share": 1.0}}
        ),  # the first column is right
        lambda: Facts(topic="alone:loss", values={0: {**_FACT, "seen": 100}}),
    )

    def judge(self, fact: LabelCounts) -> Fields | None:
        if fact.padded:
            evidence = {
                "share_of_padding": round(fact.padded / fact.seen, 4),
                "labels": fact.seen,
                "padding_idx": fact.padding,
            }
            return {**_PADDING, "step": 0, "last_step": fact.step, "evidence": evidence}
        enough = fact.seen >= self.imbalance_labels and fact.share >= self.imbalance_share
        if fact.weighted or fact.present < 2 or not enough:
            return None
        return {
            "step": 0,
            "last_step": fact.step,
            "subject": (f"class {fact.largest}",),
            "evidence": {"share_of_the_labels": round(fact.share, 4), "labels": fact.seen, "classes": fact.classes},
        }
