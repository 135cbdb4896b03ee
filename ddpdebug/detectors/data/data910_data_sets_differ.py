"""DATA910: the ranks do not divide the same data set among themselves."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ddpdebug.detectors.comparison import MAX_NAMES, announced_at
from ddpdebug.detectors.examples import digest, step_at, steps
from ddpdebug.detectors.kinds import Detector, Examples, Facts, Fields, Finding, Findings, Severity, Step, Threshold
from ddpdebug.schema.announcements import Loader
from ddpdebug.schema.step import outvoted

#: What the samplers of one data set must have in common.
_SETTINGS = ("seed", "replicas", "length", "shuffle", "drop_last", "epoch")
#: Attributes that number labels or tokens must agree even where every rank has records of its own.
_NUMBERING = (
    *("class_to_idx", "classes", "class_names", "label_names", "label2id", "id2label", "label_map", "label_to_index"),
    *("label_to_idx", "label_encoder", "vocab", "stoi", "itos", "token_to_id", "word2idx", "categories"),
)
#: Attributes whose names contain one of these differ between ranks or nodes for good reasons.
_OWN = (
    *("rank", "seed", "rng", "generator", "random", "cache", "device", "worker", "root", "dir", "path", "folder"),
    *("prefix", "host", "node", "time", "epoch", "counter", "index_", "position", "port", "pid", "tmp"),
)
#: Records are often listed as paths; these names are lists of records for all that.
_RECORDS = ("paths", "files", "filenames", "image_paths", "file_list", "filepaths")
#: Batches of each rank that are remembered.
_HISTORY = 4096
_LOADER: dict[str, Any] = {
    "sampler": "DistributedSampler",
    "distributed": True,
    "replicas": 2,
    "seed": 0,
    "epoch": 0,
    "shuffle": True,
    "drop_last": False,
    "length": 800,
    "iterations": 1,
    "attributes": {"dataset.samples": "a", "dataset.class_to_idx": "c"},
    "indices": None,
}
_PLAIN: dict[str, Any] = {
    **_LOADER,
    "distributed": False,
    "replicas": None,
    "seed": None,
    "epoch": None,
    "shuffle": None,
}


def _facts(**odd: Any) -> Facts:
    return Facts(topic="loader:0", values={0: _LOADER, 1: {**_LOADER, **odd}})


def _shifted(number: int) -> Step:
    """One rank reads what the other one read two steps ago."""
    own = {rank: {"record_digest": digest(60, number - 2 * rank)} for rank in range(2)}
    return step_at(number, world=2, odd=own)


class DataSetsDiffer(Detector):
    """The ranks disagree about the data set that they divide: sampler settings, records, split or label numbering.

    Impact: with different seeds or lists the shards overlap, some samples are seen several times and others never;
    with different splits validation data leaks into training; with different label numbers the ranks contradict
    each other.

    Diagnosis: the subject names the setting or attribute. Print it on every rank after the data set is built; for
    lists print the length and the first five entries, or a hash of the whole.

    Causes:
    - `DistributedSampler(seed=...)` or `random_split` under a seed that contains the rank
    - a file listing without `sorted`: `os.listdir`, `glob` and `set` have no fixed order
    - class or vocabulary numbers built from a `set`, or from what this rank has seen
    - data sets of different length on the nodes: a download or a filter that did not finish everywhere
    - `set_epoch` called on some ranks only

    Remedy:
    - give samplers and splits the same seed on all ranks; only their `rank` may differ
    - sort listings and classes: `sorted(os.listdir(root))`, `{c: i for i, c in enumerate(sorted(names))}`
    - build vocabularies and splits once, on rank 0, and broadcast or save them
    """

    code = "DATA910"
    severity = Severity.ERROR
    title = "ranks disagree about the data set"
    incident = ("subject", "phase")
    topics = ("loader",)
    overlap_batches = Threshold(
        3,
        "batches of one rank that turn up on another one in the same pass over the data",
        source="DistributedSampler's padding repeats single samples, no batches",
    )
    fires_on = Examples(
        lambda: _facts(seed=1),
        lambda: _facts(attributes={"dataset.samples": "b", "dataset.class_to_idx": "c"}),
        lambda: Facts(topic="loader:0", values={0: _PLAIN, 1: {**_PLAIN, "attributes": {"dataset.class_to_idx": "d"}}}),
        lambda: (Facts(topic="loader:0", values={0: _PLAIN, 1: _PLAIN}), *(_shifted(n) for n in range(6))),
    )
    silent_on = Examples(
        _facts,
        lambda: _facts(rank=1, batch_size=4),
        lambda: _facts(attributes={"dataset.samples": "a", "dataset.class_to_idx": "c", "dataset.cache_dir": "z"}),
        lambda: Facts(
            topic="loader:0", values={0: _PLAIN, 1: {**_PLAIN, "length": 700, "attributes": {"dataset.x": "q"}}}
        ),
        lambda: (Facts(topic="loader:0", values={0: _PLAIN, 1: _PLAIN}), *steps(8, world=2)),
        lambda: (Facts(topic="loader:0", values={0: _PLAIN, 1: _PLAIN}), *steps(8, world=2, record_digest=5)),
    )

    def __init__(self, config: Fields | None = None) -> None:
        super().__init__(config)
        self._next = 0
        self._epoch = 0  # passes over loaders announced so far
        self._seen: dict[int, tuple[int, list[int]]] = {}  # fingerprint -> (epoch, ranks that had it, the first first)
        self._overlaps: list[tuple[int, int, int]] = []  # (step, rank, rank that had it first)

    def compare(self, topic: str, facts: Mapping[int, Loader]) -> Findings:
        told = dict(sorted(facts.items()))
        self._epoch += 1
        self._overlaps.clear()
        if len(told) < 2:
            return
        distributed = all(fact.distributed for fact in told.values())
        differing = _attributes(told, everything=distributed)
        if distributed:
            differing = {**_settings(told), **_indices(told), **differing}
        if differing:
            first = next(iter(differing))
            yield self.finding(
                step=announced_at(facts, self._next),
                ranks=outvoted(differing[first]),
                subject=tuple(differing)[:MAX_NAMES],
                phase="loader",
                evidence={"loader": topic, "values": {str(rank): value for rank, value in differing[first].items()}},
            )

    def detect(self, step: Step) -> Findings:
        self._next = max(self._next, step.step + 1)
        if step.optimizer or len(step.rows) < 2 or not self._epoch:
            return
        name = next((n for n in ("record_digest", "batch_digest") if step.known(n)), None)
        if name is None:
            return
        shown = {rank: int(getattr(row, name)) for rank, row in step.rows.items()}
        for rank, value in shown.items():
            epoch, ranks = self._seen.get(value, (-1, []))
            # what a rank itself has again is no sign of shards that overlap: equal samples (DATA906)
            if epoch == self._epoch and rank not in ranks and not any(shown.get(other) == value for other in ranks):
                self._overlaps.append((step.step, rank, ranks[0]))
        for rank, value in shown.items():
            epoch, ranks = self._seen.get(value, (-1, []))
            if epoch != self._epoch:
                ranks = []
                self._seen[value] = self._epoch, ranks
            if rank not in ranks:
                ranks.append(rank)
        while len(self._seen) > _HISTORY * len(step.rows):
            del self._seen[next(iter(self._seen))]
        if len(self._overlaps) >= self.overlap_batches:
            yield self._overlapping(step)

    def _overlapping(self, step: Step) -> Finding:
        pairs = sorted({(min(a, b), max(a, b)) for _, a, b in self._overlaps})
        first, count = self._overlaps[0][0], len(self._overlaps)
        self._overlaps = self._overlaps[-int(self.overlap_batches) :][1:]
        return self.finding(
            step,
            step=first,
            ranks=tuple(sorted({rank for pair in pairs for rank in pair})),
            subject=("shards",),
            phase="overlap",
            evidence={"same_batches_on": [list(pair) for pair in pairs], "overlaps": count},
        )


def _settings(told: Mapping[int, Loader]) -> dict[str, dict[int, Any]]:
    return _parted({key: {rank: getattr(fact, key) for rank, fact in told.items()} for key in _SETTINGS})


def _indices(told: Mapping[int, Loader]) -> dict[str, dict[int, Any]]:
    """Return the subset's indices where they differ: ranks that share a sampler must hold the same subset."""
    digests = {rank: None if fact.indices is None else fact.indices.digest for rank, fact in told.items()}
    return _parted({"indices": digests}) if all(digests.values()) else {}


def _attributes(told: Mapping[int, Loader], *, everything: bool) -> dict[str, dict[int, Any]]:
    """Return attributes of the data sets that differ and should not; label numbering only unless `everything`."""
    tables = {rank: fact.attributes for rank, fact in told.items()}
    names = sorted(name for name in next(iter(tables.values())) if all(name in table for table in tables.values()))
    chosen = [name for name in names if _numbering(name) or (everything and not _own(name))]
    found = _parted({name: {rank: table[name] for rank, table in tables.items()} for name in chosen})
    return dict(sorted(found.items(), key=lambda item: (not _numbering(item[0]), item[0])))


def _numbering(name: str) -> bool:
    return name.rpartition(".")[2].lower().strip("_") in _NUMBERING


def _own(name: str) -> bool:
    last = name.rpartition(".")[2].lower()
    return last not in _RECORDS and any(part in last for part in _OWN)


def _parted(columns: Mapping[str, dict[int, Any]]) -> dict[str, dict[int, Any]]:
    return {name: values for name, values in columns.items() if len({repr(value) for value in values.values()}) > 1}
