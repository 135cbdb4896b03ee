"""DATA904: batches hold a single class."""

from __future__ import annotations

from typing import Any

from ddpdebug.detectors.examples import step_at, steps
from ddpdebug.detectors.kinds import Detector, Examples, Fields, Findings, Severity, Step, Threshold
from ddpdebug.schema.details import Recipe
from ddpdebug.schema.row import Flag

#: The class is asked for in one of so many steps.
_EVERY = 4


def _label(number: int, labels: int = 4) -> dict[int, Any]:
    return {r: {"label": number, "labels": labels} for r in range(4)}


class SingleClassBatches(Detector):
    """The batches of this window hold one class each, and the class changes from time to time.

    Impact: gradients point to one class after the other, the loss oscillates, and BatchNorm's statistics depend on
    the class; training accuracy can look high because the last class is always right.

    Diagnosis: print `labels.unique(return_counts=True)` for some consecutive batches on every rank, and the first
    labels of the data set in order. Check the sampler in use: `type(loader.sampler)` and its `shuffle`. With a
    shuffle buffer compare its size with the length of the runs of one class.

    Causes:
    - `shuffle=False` (also in `DistributedSampler`) on data that are sorted by class
    - one folder or shard per class, read in sequence, with a shuffle buffer that is too small
    - contiguous shards per rank: each rank sees some classes only
    - a batch sampler that groups by class on purpose (metric learning)

    Remedy:
    - `DistributedSampler(shuffle=True)` with `set_epoch(epoch)`
    - for streams shuffle once when writing the shards, mix several shards, and make the buffer many times larger
      than a class's run
    - shard by stride instead of by block
    """

    code = "DATA904"
    severity = Severity.WARNING
    title = "batches hold a single class"
    reads = (Flag.SINGLE_CLASS,)
    wants = ("recipe",)
    single_class_border = Threshold(
        3,
        "batches of one class for each batch with two, where classes follow one another",
        source="classes of three batches and more; shuffled batches of several samples have no such runs",
    )
    single_class_labels = Threshold(
        4, "labels that say something about a batch's classes", source="chosen: fewer are alike too often"
    )
    single_class_steps = Threshold(
        16, "steps in a row of one class each", source="two balanced classes in batches of four do so once in 1e14"
    )
    fires_on = Examples(
        lambda: (
            *steps(12, flags=Flag.SINGLE_CLASS, recipe=_label(0)),
            *steps(12, start=12, flags=Flag.SINGLE_CLASS, recipe=_label(1)),
        ),
        lambda: tuple(step_at(n, flags=Flag.SINGLE_CLASS, recipe=_label(n % 3)) for n in range(16)),
        lambda: tuple(  # sorted data: every eighth batch lies over a border
            step_at(n, flags=Flag.SINGLE_CLASS if n % 8 != 7 else 0, recipe=_label(n // 8)) for n in range(20)
        ),
    )
    silent_on = Examples(
        lambda: steps(21),
        lambda: steps(21, flags=Flag.SINGLE_CLASS, recipe=_label(0)),  # the positive pair stands in column 0
        lambda: tuple(step_at(n, flags=Flag.SINGLE_CLASS, recipe=_label(n % 3, labels=3)) for n in range(21)),
        lambda: tuple(step_at(n, flags=Flag.SINGLE_CLASS if n % 2 else 0, recipe=_label(n % 3)) for n in range(21)),
    )

    def __init__(self, config: Fields | None = None) -> None:
        super().__init__(config)
        #: optimizer -> (first step, steps of one class each, others in between)
        self._runs: dict[int, tuple[int, int, int]] = {}
        self._seen: dict[int, set[int]] = {}  # optimizer -> classes

    def suspects(self, step: Step) -> bool:
        number = self._runs.get(step.optimizer, (0, 0, 0))[1]
        return step.all(Flag.SINGLE_CLASS) and number % _EVERY == _EVERY - 1

    @property
    def awake(self) -> bool:
        return bool(self._runs)

    def detect(self, step: Step) -> Findings:
        first, number, mixed = self._runs.get(step.optimizer, (step.step, 0, 0))
        if not step.all(Flag.SINGLE_CLASS):
            self._runs[step.optimizer] = first, number, mixed + 1
            if self.single_class_border * (mixed + 1) > number:
                self._runs.pop(step.optimizer)
                self._seen.pop(step.optimizer, None)
            return
        self._runs[step.optimizer] = first, number + 1, mixed
        seen = self._seen.setdefault(step.optimizer, set())
        for recipe in step.answers(Recipe).values():
            # older versions said it of enough labels only
            if recipe.label is not None and (recipe.labels is None or recipe.labels >= self.single_class_labels):
                seen.add(recipe.label)
        if number + 1 >= self.single_class_steps and len(seen) > 1:
            evidence = {
                "batches_of_one_class": number + 1,
                "batches_of_several": mixed,
                "classes_seen": sorted(seen)[:20],
            }
            yield self.finding(step, step=first, evidence=evidence)
