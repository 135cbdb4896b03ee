"""DATA911: every epoch leaves out its first batches."""

from __future__ import annotations

from ddpdebug.detectors.examples import steps
from ddpdebug.detectors.kinds import EventRule, Examples, Facts, Fields, Severity
from ddpdebug.schema.announcements import LeftOut

_FACT = {"step": 22, "batches": 10, "of": 16, "location": "train.py:36"}


class BatchesLeftOut(EventRule):
    """In two epochs in a row the same number of batches was drawn first, and no step was taken with them.

    Batches that are fetched ahead are trained on later and do not count, nor do epochs that are broken off. What a
    sampler leaves out, without drawing it, is not seen.

    Impact: these samples are never trained on where the order is fixed, and fewer steps are taken than planned.

    Diagnosis: count the batches and the steps of an epoch. Look at the line for `islice`, `skip_first_batches` or a
    `continue` whose condition still holds after the epoch that was resumed.

    Causes:
    - after a resume in the middle of an epoch its batches are skipped in every later epoch as well
    - a condition on the position in the epoch (`if i < warmup: continue`) that was meant for the whole run
    - batches that are drawn for something else first, from the loader that trains

    Remedy:
    - set the number of batches to skip to 0 after the first epoch
    - save and load the loader's state (`torchdata.stateful_dataloader.StatefulDataLoader`)
    """

    code = "DATA911"
    severity = Severity.WARNING
    title = "every epoch leaves out its first batches"
    events = ("left-out",)
    fires_on = Examples(
        lambda: Facts(topic="alone:left-out", values={0: _FACT, 1: _FACT}),
        lambda: (*steps(2), Facts(topic="alone:left-out", values={1: {**_FACT, "batches": 2}})),
    )
    silent_on = Examples(lambda: steps(3), lambda: steps(40))

    def judge(self, fact: LeftOut) -> Fields | None:
        return {"subject": ("DataLoader",), "evidence": {"batches_left_out": fact.batches, "of": fact.of}}
