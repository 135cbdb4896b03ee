"""DATA901: several ranks train on the same batches."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ddpdebug.detectors.comparison import averaging_groups, groups_beside, replica_groups
from ddpdebug.detectors.examples import digest, step_at, steps
from ddpdebug.detectors.kinds import Detector, Examples, Facts, Fields, Finding, Findings, Severity, Step, Threshold
from ddpdebug.schema.announcements import Loader, Precision
from ddpdebug.schema.row import Flag

_SAMPLER: dict[str, Any] = {"distributed": True, "replicas": 4, "shuffle": True, "seed": 0, "iterations": 1}


def _same(number: int, **fields: Any) -> Step:
    return step_at(number, batch_digest=digest(40, number), record_digest=digest(41, number), **fields)


def _pairs(group: Callable[[int], Mapping[str, Any]]) -> tuple[Any, ...]:
    """Return steps in which ranks 0 and 1 share a batch, and 2 and 3; `group` is what a rank tells of its groups."""
    told = Facts(topic="group:0", values={rank: group(rank) for rank in range(4)})
    odd = [
        {r: {"record_digest": digest(41, n, r // 2), "batch_digest": digest(40, n, r // 2)} for r in range(4)}
        for n in range(6)
    ]
    return (told, *(replace(step_at(n, odd=odd[n]), facts={"group:0": told.values}) for n in range(6)))


def _on_mesh(batch: Callable[[int], int], averages: Sequence[Sequence[int]], *, beside: bool = False) -> Any:
    """Return steps of four ranks that read the same records; `batch` numbers what each feeds its model."""
    places: dict[int, Any] = {
        rank: {
            "averages": next(iter([ranks for ranks in averages if rank in ranks]), []),
            "beside": [[rank // 2 * 2, rank // 2 * 2 + 1], [rank % 2, rank % 2 + 2]] if beside else [],
        }
        for rank in range(4)
    }
    told = Facts(topic="mesh:0", values=places)
    fed = [
        {r: {"record_digest": digest(41, n), "batch_digest": digest(40, n, batch(r))} for r in range(4)}
        for n in (0, 1, 2)
    ]
    return (
        told,
        *(replace(step_at(n, odd=fed[n], flags=Flag.SHARDED), facts={"mesh:0": told.values}) for n in (0, 1, 2)),
    )


class SameBatches(Detector):
    """Two or more ranks receive the same batches, step after step.

    Impact: the ranks do the same work several times. The effective batch is smaller than it looks, an epoch takes as
    long as on fewer ranks, and the gain of more devices is nothing but electricity.

    Diagnosis: print the first sample's id (or the batch's sum) per rank and step. Then print `type(loader.sampler)`
    and, if it is a `DistributedSampler`, its `rank` and `num_replicas`.

    Causes:
    - no `DistributedSampler`: `DataLoader(shuffle=True)` under one seed gives every rank the same order
    - a sampler made with the same `rank` on several ranks (local rank, or before the process group was there)
    - an iterable data set that does not split by rank
    - the shard chosen from an environment variable that is the same on all ranks

    Remedy:
    - `DataLoader(ds, sampler=DistributedSampler(ds))`, and `sampler.set_epoch(epoch)` at the start of each epoch
    - pass global numbers: `DistributedSampler(ds, num_replicas=dist.get_world_size(), rank=dist.get_rank())`
    - in an `IterableDataset` take every world-th record, or a file list per rank
    """

    code = "DATA901"
    severity = Severity.ERROR
    title = "ranks receive the same batches"
    reads = ("record_digest", "batch_digest")
    of_several = True
    topics = ("loader", "precision")
    same_batches_steps = Threshold(
        3,
        "steps in a row in which the same ranks had equal batches, each time other ones",
        source="independent draws from 1,000 batches agree three times in a row once in 1e9",
    )
    fires_on = Examples(
        lambda: tuple(_same(n) for n in range(3)),
        lambda: tuple(step_at(n, odd={1: {"record_digest": digest(3, 0, n)}}) for n in range(3)),
        lambda: Facts(topic="loader:0", values={rank: {**_SAMPLER, "rank": 0} for rank in range(4)}),
        lambda: _pairs(lambda rank: {"ranks": [0, 1, 2, 3]}),
        # groups that have nothing to do with it
        lambda: _pairs(lambda rank: {"ranks": [0, 1, 2, 3], "beside": [[rank % 2, rank % 2 + 2]]}),
        # parameters are sharded: all ranks average, or 0 and 2 do, and 1 and 3
        lambda: _on_mesh(lambda _: 0, averages=[[0, 1, 2, 3]]),
        lambda: _on_mesh(lambda _: 0, averages=[[0, 2], [1, 3]], beside=True),
    )
    silent_on = Examples(
        lambda: steps(6),
        lambda: tuple(_same(n) for n in range(2)),
        lambda: steps(6, batch_digest=digest(1), record_digest=digest(2)),  # one batch again and again: an overfit test
        lambda: steps(6, batch_digest=digest(1)),  # a constant input, records differ
        lambda: Facts(topic="loader:0", values={rank: {**_SAMPLER, "rank": rank} for rank in range(4)}),
        lambda: (_same(0), step_at(1), _same(2), step_at(3), _same(4)),
        # tensor parallel: the pairs 0-1 and 2-3 hold one model each, 0 and 2 average, and 1 and 3
        lambda: _pairs(lambda rank: {"ranks": [rank % 2, rank % 2 + 2]}),
        # FSDP2 over tensor parallelism: the pairs 0-1 and 2-3 compute together, 0 and 2 average, and 1 and 3
        lambda: _on_mesh(lambda rank: rank // 2, averages=[[0, 2], [1, 3]]),
        lambda: _on_mesh(lambda rank: rank // 2, averages=[[0, 1, 2, 3]], beside=True),
        # parts of parameters, and nobody says who averages
        lambda: _on_mesh(lambda _: 0, averages=[]),
        # the same sequences, of which each takes its part
        lambda: _on_mesh(lambda rank: rank, averages=[[0, 1, 2, 3]]),
        # sequence parallel: all average, and the pairs have a group to exchange keys and values in
        lambda: _pairs(lambda rank: {"ranks": [0, 1, 2, 3], "beside": [[rank // 2 * 2, rank // 2 * 2 + 1]]}),
    )

    def __init__(self, config: Fields | None = None) -> None:
        super().__init__(config)
        self._runs: dict[tuple[int, tuple[int, ...]], list[tuple[int, Hashable]]] = {}  # -> (step, digests)
        self._loader: str | None = None  # the line that iterates over the loader that was begun last
        self._forward: str | None = None  # the line that calls the model

    def can_show(self, step: Step) -> bool:
        return bool(_fingerprints(step))

    def wants_all(self, step: Step) -> bool:
        shown = _fingerprints(step)
        return len({*shown.values()}) < len(shown)

    def detect(self, step: Step) -> Findings:
        shown = _fingerprints(step)
        if not shown:
            return
        if step.chosen:  # who is fed alike is asked for (`wants_all`); who is not is seen here
            self._runs = {key: run for key, run in self._runs.items() if not _unlike(key, step.optimizer, shown)}
            return
        alike: dict[Hashable, list[int]] = {}
        for rank, value in shown.items():
            alike.setdefault(value, []).append(rank)
        # Stages of a pipeline and slices of one model or one sequence are fed the same records on purpose.
        families = _families(step) if len(alike) < len(shown) else []
        parts = [(value, tuple(sorted(family & set(ranks)))) for value, ranks in alike.items() for family in families]
        beside = groups_beside(step) - {tuple(sorted(family)) for family in families} if parts else set()
        groups = {ranks: value for value, ranks in parts if len(ranks) > 1 and ranks not in beside}
        enough = int(self.same_batches_steps)
        runs = {key: run for key, run in self._runs.items() if key[0] != step.optimizer}
        for ranks, value in groups.items():
            key = (step.optimizer, ranks)
            runs[key] = [*self._runs.get(key, []), (step.step, value)][-enough:]
        self._runs = runs
        full = {ranks: runs[step.optimizer, ranks] for ranks in groups}
        full = {r: run for r, run in full.items() if len({value for _, value in run}) == enough}
        if full:
            first = min(run[0][0] for run in full.values())
            place = self._loader if step.known("record_digest") else self._forward
            yield self._report(first, step.step, [list(ranks) for ranks in full], "batches", place or self._forward)

    def _report(self, first: int, last: int, groups: list[list[int]], what: str, location: str | None) -> Finding:
        ranks = tuple(sorted(rank for group in groups for rank in group))
        evidence = {"groups": groups, "equal": what, "share_of_the_work_wasted": 1 - len(groups) / len(ranks)}
        return self.finding(
            step=first, last_step=last, ranks=ranks, subject=("model input",), location=location, evidence=evidence
        )

    def compare(self, topic: str, facts: Mapping[int, Loader | Precision]) -> Findings:
        if topic.startswith("precision"):
            self._forward = self._forward or next((fact.location for fact in facts.values()), None)
        elif topic.startswith("loader"):
            loaders = {rank: fact for rank, fact in facts.items() if isinstance(fact, Loader)}
            self._loader = next((fact.location for fact in loaders.values()), None)
            yield from self._places(loaders)

    def _places(self, facts: Mapping[int, Loader]) -> Findings:
        """Compare what samplers take for their ranks."""
        told = {r: f for r, f in sorted(facts.items()) if f.distributed}
        places: dict[tuple[str, ...], list[int]] = {}
        for rank, fact in told.items():
            replicas = fact.replicas or 1
            if fact.rank is not None and not isinstance(replicas, str) and replicas >= len(facts):
                keys = ("rank", "replicas", "seed", "shuffle", "epoch", "length")
                places.setdefault(tuple(repr(getattr(fact, key)) for key in keys), []).append(rank)
        groups = [ranks for ranks in places.values() if len(ranks) > 1]
        if groups and len(facts) > 1:
            yield self._report(self.next_step, self.next_step, groups, "place in the sampler", self._loader)


def _unlike(key: tuple[int, tuple[int, ...]], optimizer: int, shown: Mapping[int, Hashable]) -> bool:
    """Return whether some of the ranks of a run were fed differently."""
    return key[0] == optimizer and len({shown[rank] for rank in key[1] if rank in shown}) > 1


def _families(step: Step) -> list[set[int]]:
    """Return the sets of ranks that train the same model together."""
    together = averaging_groups(step)
    return list(map(set, sorted({tuple(sorted({*f} & {*g})) for f in replica_groups(step) for g in together})))


def _fingerprints(step: Step) -> dict[int, Hashable]:
    """Return rank -> fingerprint of what it was fed: the records where all ranks have them, else the model's inputs.

    Both, where parts of parameters are shared: ranks may read the same sequences, and take other parts of them each.
    """
    known = [name for name in ("record_digest", "batch_digest") if len(step.rows) > 1 and step.known(name)]
    names = known if step.any(Flag.SHARDED) else known[:1]
    return {rank: tuple(int(getattr(row, name)) for name in names) for rank, row in step.rows.items()} if names else {}
