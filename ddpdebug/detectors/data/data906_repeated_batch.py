"""DATA906: the same batch comes again and again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ddpdebug.detectors.examples import digest, step_at, steps
from ddpdebug.detectors.kinds import Detector, Examples, Facts, Fields, Findings, Severity, Step, Threshold
from ddpdebug.schema.announcements import RepeatedDeliveries
from ddpdebug.schema.row import Flag

_OWN = {rank: {"record_digest": digest(90, rank)} for rank in range(4)}
_FEW: Fields = {
    "title": "a few samples of the data set are trained on again and again",
    "phase": "few samples",
    "causes": (
        "`WeightedRandomSampler` with the weights of the classes, where it wants one for each sample",
        "a list of positions in another list, of classes, or a debug setting in the place of the data set's indices",
    ),
    "actions": (
        "print `len(set(sampler))` beside `len(dataset)`",
        "give a sampler as many weights as there are samples",
    ),
}
_INSIDE: dict[str, Fields] = {
    "rows": {
        "phase": "equal samples",
        "title": "all samples of a batch are the same",
        "causes": (
            "a list or replay memory keeps references to one array that is written anew each time: `copy()` is missing",
            "an index that does not change, a constant in the place of the features",
            "intended: one sample, seen with other noise",
        ),
        "actions": ("print two rows of a batch side by side", "store `observation.copy()`, or `tensor.clone()`"),
    },
    "views": {
        "phase": "equal views",
        "title": "both augmented views of each sample are equal",
        "causes": (
            "both views are drawn from generators with the same seed, or from one that is put back in between",
            "the transform runs once, and its result is used twice",
        ),
        "actions": ("call the transform twice, with one generator that goes on",),
    },
}


def _again(number: int) -> Step:
    return step_at(number, odd=_OWN)


class RepeatedBatch(Detector):
    """A rank was given bitwise the same batch step after step.

    Or all that its loader draws are a few samples of many, or samples of a batch, or its two views, are the same. Or it
    delivers each batch several times in a row, as workers do that all read the whole of a stream.

    Impact: the model memorises a few samples: training loss falls fast, validation does not follow.

    Diagnosis: print the sample indices of consecutive batches. See whether the iterator is made inside the loop,
    and whether a debug option that limits the data is still on. Compare `len(dataset)` with the expectation. A
    single-batch overfit test is of course intended.

    Causes:
    - `workers`: a stream that starts from the same position in each worker
    - `next(iter(loader))` inside the training loop, which starts from the beginning every time, or one batch that is
      kept and used in each step
    - a debug setting left on: overfit one batch, limited samples
    - a data set that is much smaller than believed: a wrong path, a filter, a cached subset
    - a stream that starts again from the same position after each resume
    - an index bug in `__getitem__` or in a cache key

    Remedy:
    - `workers`: in an `IterableDataset` split by `get_worker_info()` as well as by rank
    - create the iterator once per epoch and loop over it
    - assert the number of samples at the start
    - save the position of the stream in the checkpoint
    """

    code = "DATA906"
    severity = Severity.WARNING
    title = "the same batch comes again and again"
    reads = ("record_digest",)
    topics = ("alone",)
    repeated_batch_steps = Threshold(
        12,
        "steps in a row with the same records from the DataLoader",
        source="chosen: several steps on one batch, as policy optimisation takes them, are fewer",
    )
    repeated_share = Threshold(
        0.4,
        "share of a loader's first batches that are the one before again",
        source="with two workers that read the same it is a half, with more of them more",
    )
    fires_on = Examples(
        lambda: tuple(_again(n) for n in range(12)),
        lambda: (*steps(3), *(_again(n) for n in range(3, 15))),
        lambda: Facts(topic="alone:deliveries", values={0: {"step": 16, "batches": 16, "again": 8, "workers": 2}}),
        lambda: Facts(
            topic="alone:deliveries",
            values={0: {"step": 9, "batches": 0, "again": 0, "drawn": 128, "different": 5, "length": 640}},
        ),
    )
    silent_on = Examples(
        lambda: steps(12),
        lambda: tuple(_again(n) for n in range(11)),
        lambda: tuple(step_at(n, batch_digest=digest(5)) for n in range(12)),  # a constant input, other labels
        lambda: tuple(step_at(n, batch_digest=digest(5), record_digest=0) for n in range(12)),  # all data at once
        lambda: tuple(step_at(n, odd=_OWN, flags=Flag.CLOSURE) for n in range(12)),
        lambda: Facts(topic="alone:deliveries", values={0: {"step": 16, "batches": 16, "again": 6}}),
    )

    def __init__(self, config: Fields | None = None) -> None:
        super().__init__(config)
        self._runs: dict[tuple[int, int], tuple[int, int, int]] = {}  # (optimizer, rank) -> (digest, first step, steps)

    def compare(self, topic: str, facts: Mapping[int, Any]) -> Findings:
        told = {rank: fact for rank, fact in sorted(facts.items()) if isinstance(fact, RepeatedDeliveries)}
        for what, said in _INSIDE.items():
            if same := {rank: fact for rank, fact in told.items() if fact.inside == what}:
                evidence = {"first_batches": next(iter(same.values())).batches}
                yield self.finding(step=0, ranks=tuple(same), evidence=evidence, **said)
        if few := {rank: fact for rank, fact in told.items() if fact.drawn}:
            one = next(iter(few.values()))
            drawn: dict[str, Any] = {"samples_drawn": one.drawn, "different": one.different, "of": one.length}
            yield self.finding(step=one.step, ranks=tuple(few), location=one.location, evidence=drawn, **_FEW)
        again = {
            r: fact for r, fact in told.items() if fact.again > 0 and fact.again >= self.repeated_share * fact.batches
        }
        if again:
            one = next(iter(again.values()))
            evidence = {"batches_that_were_the_one_before": one.again, "of": one.batches, "workers": one.workers}
            yield self.finding(step=one.step, ranks=tuple(again), location=one.location, evidence=evidence)

    @property
    def awake(self) -> bool:
        return bool(self._runs)

    def detect(self, step: Step) -> Findings:
        if step.any(Flag.CLOSURE):
            return
        again, enough = {}, self.repeated_batch_steps
        for rank, row in step.rows.items():
            key, value = (step.optimizer, rank), int(row.record_digest)
            before, first, number = self._runs.pop(key, (0, 0, 0))
            if not value:
                continue
            same = value == before and first + number == step.step  # no batch in between that was not seen
            self._runs[key] = (value, first if same else step.step, number + 1 if same else 1)
            if same and number + 1 >= enough:
                again[rank] = self._runs[key]
        if again:
            first = min(first for _, first, _ in again.values())
            evidence = {"steps_with_the_same_batch": max(number for _, _, number in again.values())}
            yield self.finding(step, step=first, ranks=tuple(again), evidence=evidence)
