"""DATA905: ranks have different numbers of batches."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ddpdebug.detectors.examples import step_at, steps
from ddpdebug.detectors.kinds import Detector, Examples, Facts, Fields, Finding, Findings, Severity, Step
from ddpdebug.schema.announcements import Announcement, Failure, Loader, StreamEnded
from ddpdebug.schema.row import Flag

#: What a rank ends with when another one has no more work.
LEFT_ALONE = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Timed out waiting",
    "timed out",
    "Socket closed",
)
#: What the loaders of all ranks have in common when they are the same one.
_SAME = ("batch_size", "iterations", "dataset", "workers")
_CLOSED = "exception: RuntimeError: Connection closed by peer [127.0.0.1]:4321"


def _pass(number: int, *starts: int, batches: tuple[int, int] = (10, 12)) -> Facts:
    shared = {"batch_size": 4, "iterations": number, "dataset": None, "workers": 0}
    return Facts(
        topic="loader:0",
        values={rank: {**shared, "step": starts[rank], "batches": batches[rank]} for rank in range(2)},
    )


def _stream(number: int) -> Facts:
    shared = {"batch_size": 4, "iterations": number, "dataset": None, "workers": 0, "batches": None, "step": 0}
    return Facts(topic="loader:0", values=dict.fromkeys((0, 1), shared))


def _over(rank: int, step: int) -> Facts:
    told = {"loader": 0, "iterations": 1, "batches": step, "began": 0, "step": step}
    return Facts(topic="alone:stream", values={rank: told})


def _left(rank: int, step: int, phase: str = "backward") -> Facts:
    told = {"reason": _CLOSED, "step": step - 1, "raised_in": step, "phase": phase}
    return Facts(topic="alone:failure", values={rank: told})


class UnequalBatches(Detector):
    """The ranks' loaders yield different numbers of batches in the same epoch.

    Impact: the rank that ends first leaves the others waiting in a collective (HANG503), or is one step ahead, and
    evaluation and training run against each other.

    Diagnosis: compare `len(loader)` and the counted batches of every rank. For iterable data sets the length is
    what the stream gives: count, do not trust `len`. Look for filters and dropped samples that depend on content.

    Causes:
    - shards of unequal size without a sampler that evens them out
    - an `IterableDataset` split by files or by hash
    - bucketing or packing by length, or a token budget per batch, whose batch count depends on content
    - samples filtered or skipped in collate on some ranks
    - `drop_last` or batch size that differs between ranks

    Remedy:
    - use `DistributedSampler`: it evens out by repetition, or with `drop_last=True` by dropping
    - For streams agree on the smallest count (an all-reduce with MIN) or on a fixed number of steps, and repeat the
      short ones
    - Where uneven input is wanted train under `with model.join():`; it covers DDP's own collectives, not those of
      SyncBatchNorm or of your code
    """

    code = "DATA905"
    severity = Severity.ERROR
    title = "ranks have different numbers of batches"
    reads = (Flag.IN_JOIN | Flag.LOCAL_ONLY | Flag.NO_DDP,)
    of_several = True
    topics = ("loader", "alone")
    fires_on = Examples(
        lambda: (_pass(1, 0, 0), *steps(3, world=2), _pass(2, 10, 12)),
        lambda: (
            _pass(1, 0, 0),
            *steps(3, world=2),
            Facts(topic="alone:failure", values={1: {"reason": _CLOSED, "step": 10}}),
        ),
        lambda: (_stream(1), _over(0, 10), _left(1, 10)),
    )
    silent_on = Examples(
        lambda: (_stream(1), _over(0, 10), _over(1, 10), _left(1, 10)),
        lambda: (_stream(1), _over(0, 10), _left(1, 7)),  # the other has gone for a reason of its own
        lambda: (_stream(2), _over(0, 10), _left(1, 10)),  # an earlier pass
        lambda: (_stream(1), _over(0, 10), _left(1, 10, phase="between")),
        lambda: (_pass(1, 0, 0), *steps(3, world=2), _pass(2, 10, 10)),  # ended together all the same
        lambda: (_pass(1, 0, 0), step_at(0, world=2, flags=Flag.IN_JOIN), _pass(2, 10, 12)),
        lambda: (_pass(1, 0, 0), Facts(topic="alone:failure", values={1: {"reason": "exception: KeyError: 3"}})),
        lambda: (_pass(1, 0, 0, batches=(10, 10)), Facts(topic="alone:failure", values={1: {"reason": _CLOSED}})),
    )

    def __init__(self, config: Fields | None = None) -> None:
        super().__init__(config)
        self._batches: dict[str, dict[int, int | None]] = {}
        self._iterations: dict[str, dict[int, int]] = {}
        self._ended: dict[str, dict[int, StreamEnded]] = {}  # the newest of each rank
        self._loose = False

    def detect(self, step: Step) -> Findings:
        self._loose = self._loose or step.any(Flag.IN_JOIN | Flag.LOCAL_ONLY | Flag.NO_DDP)
        yield from ()

    def compare(self, topic: str, facts: Mapping[int, Announcement]) -> Findings:
        if topic.startswith("loader"):
            told = {rank: fact for rank, fact in sorted(facts.items()) if isinstance(fact, Loader)}
            alike = {tuple(repr(getattr(fact, key)) for key in _SAME) for fact in told.values()}
            if len(told) < 2 or len(alike) > 1:
                return
            self._iterations[topic] = {rank: fact.iterations for rank, fact in told.items()}
            self._batches[topic] = {rank: fact.batches for rank, fact in told.items()}
            starts = {rank: fact.step or 0 for rank, fact in told.items()}
            uneven = min(starts.values()) > 0 and len(set(starts.values())) > 1
            if uneven and next(iter(told.values())).iterations == 2 and not self._loose:
                yield self._report(topic, min(starts.values()), {"steps_before_the_second_pass": starts})
            return
        rank, failure = next(iter(facts.items()))
        if isinstance(failure, StreamEnded):
            self._ended.setdefault(f"loader:{failure.loader}", {})[rank] = failure
        if not isinstance(failure, Failure) or self._loose:
            return
        if any(message in failure.reason for message in LEFT_ALONE):
            for name, batches in self._batches.items():
                if None not in batches.values() and len(set(batches.values())) > 1:
                    yield self._report(name, failure.step, {"ended_with": failure.reason[:200]})

            yield from self._streams(rank, failure)

    def _streams(self, rank: int, failure: Failure) -> Findings:
        """Look for streams that have ended on other ranks, just where this one wanted to go on."""
        for name, iterations in self._iterations.items():
            ended = self._ended.get(name, {})
            now = iterations.get(rank)
            over = {r: fact for r, fact in ended.items() if fact.iterations == now}
            if rank in over or not over or not any(self._stopped(fact, failure) for fact in over.values()):
                continue
            yield self.finding(
                step=failure.step,
                ranks=tuple(sorted(over)),
                subject=(name,),
                evidence={
                    "batches": {str(r): fact.batches for r, fact in sorted(over.items())},
                    "not_at_its_end": [rank],
                    "ended_with": failure.reason[:200],
                },
            )

    @staticmethod
    def _stopped(ended: StreamEnded, failure: Failure) -> bool:
        """Return whether a stream that was trained on ended at the step for which another rank still had a batch."""
        trained = ended.step is not None and ended.step > ended.began
        return trained and failure.raised_in == ended.step and failure.phase in {"forward", "backward"}

    def _report(self, topic: str, step: int | None, more: Mapping[str, Any]) -> Finding:
        batches = self._batches[topic]
        known = {rank: number for rank, number in batches.items() if number is not None}
        ranks = (
            tuple(rank for rank in known if known[rank] == min(known.values())) if len(set(known.values())) > 1 else ()
        )
        evidence = {"batches": {str(rank): number for rank, number in batches.items()}, **more}
        return self.finding(step=step, ranks=ranks or tuple(batches), subject=(topic,), evidence=evidence)
