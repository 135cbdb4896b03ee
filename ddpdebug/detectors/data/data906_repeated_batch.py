"""DATA906: the same batch comes again and again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ddpdebug.detectors.examples import digest, step_at, steps
from ddpdebug.detectors.kinds import Detector, Examples, Facts, Fields, Findings, Severity, Step, Threshold
from ddpdebug.schema.announcements import RepeatedDeliveries
from ddpdebug.schema.row import Flag

_OWN = {rank: {"record_digest": digest(90, rank)} for rank in range(4)}


def _again(number: int) -> Step:
    return step_at(number, odd=_OWN)


class RepeatedBatch(Detector):
    """A rank was given bitwise the same batch step after step.

    Or its loader delivers each batch several times in a row, as workers do that all read the whole of a stream.

    Impact: the model memorises a few samples: training loss falls fast, validation does not follow.

    Diagnosis: print the sample indices of consecutive batches. See whether the iterator is made inside the loop,
    and whether a debug option that limits the data is still on. Compare `len(dataset)` with the expectation. A
    single-batch overfit test is of course intended.

    Causes:
    - `next(iter(loader))` inside the training loop, which starts from the beginning every time
    - a debug setting left on: overfit one batch, limited samples
    - a data set that is much smaller than believed: a wrong path, a filter, a cached subset
    - a stream that starts again from the same position in each worker or after each resume
    - an index bug in `__getitem__` or in a cache key

    Remedy:
    - create the iterator once per epoch and loop over it
    - in an `IterableDataset` split by `get_worker_info()` as well as by rank
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
        again = {rank: fact for rank, fact in told.items() if fact.again >= self.repeated_share * fact.batches}
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
