"""DATA910: the ranks do not divide the same data set among themselves."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import combinations
from types import MappingProxyType
from typing import Any

from ddpdebug.detectors.base import runbook
from ddpdebug.detectors.comparison import MAX_NAMES, announced_at
from ddpdebug.detectors.examples import digest, step_at, steps
from ddpdebug.detectors.kinds import Detector, Examples, Facts, Fields, Finding, Findings, Severity, Step, Threshold
from ddpdebug.schema.announcements import Items, Loader
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
    *("prefix", "host", "node", "time", "epoch", "counter", "index_", "position", "port", "pid", "tmp", "fingerprint"),
)
#: ... these of lists as well, which may be as long as the data set.
_OWN_LISTS = ("rank", "seed", "rng", "generator", "random", "cache", "device", "worker", "counter")
#: Attributes, and keys of records, that hold labels.
_LABELS = (
    "label",
    "labels",
    "target",
    "targets",
    "class_id",
    "class_ids",
    "category",
    "categories",
    "annotations",
    "y",
)
#: Records are often listed as paths; these names are lists of records for all that.
_RECORDS = ("paths", "files", "filenames", "image_paths", "file_list", "filepaths")
#: What differs, in the words of the title.
_SAID = {
    "settings": "the settings of the sampler",
    "split": "the split",
    "numbering": "the numbers of the labels",
    "order": "the order of the records",
    "labels": "the labels",
    "records": "the records",
}
#: Batches of each rank that are remembered.
_HISTORY = 4096
#: Passes that have begun and whose steps may not all have been judged.
_PASSES = 64
_OVERLAP = (
    "a sampler of the script's own whose parts overlap: an offset by another number than the length of a part",
    "a resume that restored the list of one rank, and dealt out anew on the others",
    "lists that each rank draws by itself, with a seed of its own",
)
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


_BASE = {"dataset.dataset.tensors": "a"}
_CONTENT = {"dataset.dataset.tensors": {"length": 1000, "unordered": "b", "columns": {}}}
_Columns = Mapping[str, dict[int, Any]]


def _split(seed: int) -> dict[str, Any]:
    """Return what a rank tells of four fifths of a data set."""
    sketch = sorted(number for number in range(80) if (number * 7 + seed * 11) % 5)[:64]
    about = {"location": "train.py:12", "drawn": "default", "seed": 100 + seed}
    return {"digest": f"{seed}", "members": f"{seed}", "length": 800, "sketch": sketch, **about}


def _delivered(
    item: Callable[[int, int], tuple[str, str]],
    loader: Mapping[str, Any] = MappingProxyType({}),
    again: str = "",
    **more: Any,
) -> tuple[Facts, ...]:
    """Return three epochs of two ranks; `again`: "y" or "x" is another one in each."""

    def found(rank: int, index: int, epoch: int) -> list[str]:
        label, record = item(rank, index)
        return [label + f"{epoch}" * (again == "y"), record + f"{epoch}" * (again == "x")]

    usual = {**_LOADER, **loader, "location": "train.py:30"}
    told = [Facts(topic="loader:0", values={0: usual, 1: usual})]
    for epoch in range(3):
        values = {
            rank: {"items": {str(i): found(rank, i, epoch) for i in range(6)}, "exact": True, "step": 9, **more}
            for rank in range(2)
        }
        told.append(Facts(topic="items:0", values=values))
    return tuple(told)


def _shares(first: range, second: range, again: int = 0, **loader: Any) -> tuple[Facts, ...]:
    """Return two epochs of two ranks, each of which is given these indices; `again`: others in the second epoch."""
    usual = {**_PLAIN, **loader}
    told = [Facts(topic="loader:0", values={0: usual, 1: usual})]
    for epoch in range(2):
        given = [[str(i + epoch * again) for i in part] for part in (first, second)]
        values = {rank: {"items": {i: ["a", "b"] for i in part}, "step": 9} for rank, part in enumerate(given)}
        told.append(Facts(topic="items:0", values=values))
    return tuple(told)


def _shard(rank: int) -> dict[str, Any]:
    return {**_split(rank), "sketch": list(range(rank, 128, 2))}


def _plain(more: Callable[[int], dict[str, Any]]) -> Facts:
    return Facts(topic="loader:0", values={rank: {**_PLAIN, **more(rank)} for rank in range(2)})


def _facts(**odd: Any) -> Facts:
    return Facts(topic="loader:0", values={0: _LOADER, 1: {**_LOADER, **odd}})


def _shifted(number: int) -> Step:
    """One rank reads what the other one read two steps ago."""
    own = {rank: {"record_digest": digest(60, number - 2 * rank)} for rank in range(2)}
    return step_at(number, world=2, odd=own)


def _dealt_anew(number: int) -> Step:
    """Two passes of six steps; in the second each rank reads what the other one has read in the first."""
    own = {rank: {"record_digest": digest(60, number % 6 * 2 + (rank + number // 6) % 2)} for rank in range(2)}
    return step_at(number, world=2, odd=own)


class _Delivered:
    """What one loader has delivered on all ranks, for the indices that are followed."""

    def __init__(self) -> None:
        self.items: dict[str, dict[int, tuple[str, str]]] = {}  # index -> rank -> labels, record
        self.repeats: dict[int, int] = {}  # rank -> deliveries of what it had before
        self.changing = [False, False]  # labels, records: a rank was given another one for the same index
        self.exact = self.whole = True
        self.labelled = False
        self.shares: dict[int, frozenset[str]] = {}  # rank -> what it was given of them in its newest epoch
        self.same = False  # ... and in the one before, all ranks

    def begin(self, facts: Mapping[int, Items]) -> None:
        """Take an epoch of all ranks: which part of the indices each was given."""
        shares = {rank: frozenset(fact.items) for rank, fact in facts.items()}
        self.same, self.shares = shares == self.shares, shares

    def overlaps(self) -> list[tuple[int, int]]:
        """Return the pairs of ranks whose parts, the same in each epoch, have something in common, and not all."""
        pairs = combinations(sorted(self.shares), 2) if self.same else ()
        parts = [(a, b, self.shares[a], self.shares[b]) for a, b in pairs]
        return [(a, b) for a, b, one, other in parts if one & other and one - other and other - one]

    def doubled(self) -> int:
        """Return how often an index was given to one rank more."""
        return sum(map(len, self.shares.values())) - len(frozenset().union(*self.shares.values()))

    def add(self, rank: int, fact: Items) -> None:
        """Take an epoch of a rank."""
        self.exact, self.whole = self.exact and fact.exact, self.whole and fact.whole
        for index, item in fact.items.items():
            before = self.items.setdefault(index, {}).setdefault(rank, item)
            self.labelled = self.labelled or bool(item[0])
            if before is not item:
                self.repeats[rank] = self.repeats.get(rank, 0) + 1
                self.changing = [flag or before[i] != item[i] for i, flag in enumerate(self.changing)]

    def unlike(self, kind: int, ranks: Collection[int]) -> dict[str, dict[int, str]]:
        """Return index -> rank -> what it was given, where that differs."""
        shown = {i: {r: item[kind] for r, item in found.items() if r in ranks} for i, found in self.items.items()}
        return {i: v for i, v in sorted(shown.items(), key=lambda pair: int(pair[0])) if len(set(v.values())) > 1}

    def compared(self, ranks: Collection[int]) -> int:
        """Return how many indices more than one of the ranks was given."""
        return sum(len(set(found) & set(ranks)) > 1 for found in self.items.values())


class DataSetsDiffer(Detector):
    """The ranks disagree about the data set that they divide: sampler settings, split, records, labels, their numbers.

    The title says which of these it is. Compared are samplers, the indices of a `Subset`, and what the data set holds
    in plain attributes (lists, tensors, arrays; nothing of its code is run). Or the parts that they are given, the
    same ones in each epoch, have samples in common.

    Impact: with different seeds or lists the shards overlap, some samples are seen several times and others never;
    with different splits validation data leaks into training; with different label numbers the ranks contradict
    each other.

    Diagnosis: the subject names the setting or attribute. Print it on every rank after the data set is built; for
    lists print the length and the first five entries, or a hash of the whole.

    Causes:
    - `the split`: `random_split` or a shuffled list under a seed that contains the rank, or without any seed
    - `settings of the sampler`: `DistributedSampler(seed=...)` with a seed that contains the rank, or `set_epoch`
      called on some ranks only
    - `order of the records`, `records of the same indices`: a file listing without `sorted` (`os.listdir`, `glob` and
      `set` have no fixed order), or shuffled on each rank
    - `numbers of the labels`, `labels of the same indices`: class or vocabulary numbers built from a `set`, or from
      what this rank has seen
    - `the labels`: labels from another file, or in another order than the records
    - `the records`: another version of a file on a node: a download or a filter that did not finish everywhere

    Remedy:
    - give samplers and splits the same seed on all ranks; only their `rank` may
      differ
    - `the split`: `random_split(data, sizes, generator=torch.Generator().manual_seed(0))` on all ranks
    - `order of the records`, `records of the same indices`: sort listings: `sorted(os.listdir(root))`
    - `numbers of the labels`, `labels of the same indices`: number classes from a sorted list: `{c: i for i, c in
      enumerate(sorted(names))}`
    - `the labels`, `the records`: compare sizes and checksums of the files on all nodes
    - build vocabularies and splits once, on rank 0, and broadcast or save them
    """

    code = "DATA910"
    all_ranks = True
    severity = Severity.ERROR
    title = "ranks disagree about the data set"
    incident = ("subject", "phase")
    reads = ("record_digest", "batch_digest")
    of_several = True
    topics = ("loader", "items")
    overlap_items = Threshold(
        3,
        "followed samples beyond a rank's share that it is given in each epoch",
        source="chosen: shards that were dealt out share none, but for what a sampler pads with",
    )
    overlap_batches = Threshold(
        3,
        "batches of one rank that come on another one in the same epoch",
        source="DistributedSampler's padding repeats single samples, no batches",
    )
    split_overlap = Threshold(
        0.5,
        "indices in both splits as a share of those in either, above which they are no shards",
        source="calculated: two independent splits of 67 % or more share that; shards of a data set share none",
    )
    split_overlap_drawn = Threshold(
        0.05,
        "the same where `random_split` has made both",
        source="calculated: 4 of 64 hashes; its parts share none where the ranks draw alike, independent tenths 0.053",
    )
    same_item_repeats = Threshold(
        4,
        "equal repeated deliveries of an index after which a rank's items are fixed",
        source="chosen: what is augmented or drawn differs each time",
    )
    same_item_repeats_collated = Threshold(
        16,
        "the same where a collate function of the script may have reordered the items",
        source="calculated: labels of two classes agree 16 times by chance once in 65,536",
    )
    other_items = Threshold(2, "indices under which ranks have other items", source="chosen: one may be a defect")
    fires_on = Examples(
        lambda: _shares(range(16), range(12, 28)),
        lambda: _delivered(lambda rank, index: (f"y{index}{rank % 2}", f"x{index}")),
        lambda: _delivered(lambda rank, index: (f"y{(index + rank) % 5}", f"x{index + rank}")),
        lambda: _delivered(lambda rank, index: ("", f"x{index + rank}"), whole=True),
        lambda: _facts(seed=1),
        lambda: Facts(topic="loader:0", values={rank: {**_LOADER, "indices": _split(rank)} for rank in range(2)}),
        lambda: _plain(lambda rank: {"attributes": _BASE, "content": _CONTENT, "indices": _split(rank)}),
        lambda: _facts(attributes={"dataset.samples": "b", "dataset.class_to_idx": "c"}),
        lambda: Facts(topic="loader:0", values={0: _PLAIN, 1: {**_PLAIN, "attributes": {"dataset.class_to_idx": "d"}}}),
        lambda: (Facts(topic="loader:0", values={0: _PLAIN, 1: _PLAIN}), *(_shifted(n) for n in range(6))),
    )
    silent_on = Examples(
        lambda: (
            _shares(range(16), range(16, 32)),
            _shares(range(16), range(12, 28), again=1),  # drawn anew
            _shares(range(32), range(32)),  # all samples on each rank
            _shares(range(16), range(14, 30)),
        ),
        _facts,
        lambda: _delivered(lambda rank, index: (f"y{index % 5}", f"x{index}")),
        # other pixels, fixed on a rank; other pixels each time; each rank its own records, without a common sampler
        lambda: _delivered(lambda rank, index: (f"y{index % 5}", f"x{index}{rank}")),
        lambda: _delivered(lambda rank, index: (f"y{index % 5}", ""), again="x"),
        lambda: _delivered(lambda rank, index: (f"y{index}{rank}", f"x{index}{rank}"), _PLAIN),
        # labels that are drawn; a collate function that sorts
        lambda: _delivered(lambda rank, index: (f"y{index}{rank}", f"x{index}"), again="y"),
        lambda: _delivered(lambda rank, index: (f"y{index}{rank}", f"x{index}"), exact=False),
        lambda: _delivered(lambda rank, index: ("", f"x{index + rank}")),
        lambda: _facts(rank=1, batch_size=4),
        # each rank its own records, of which its sampler is the only replica
        lambda: Facts(
            topic="loader:0",
            values={
                rank: {**_LOADER, "replicas": 1, "attributes": {"dataset.samples": f"{rank}"}} for rank in range(2)
            },
        ),
        # shards dealt out by hand; splits of shards; splits of what nobody knows to be the same
        lambda: _plain(lambda rank: {"attributes": _BASE, "content": _CONTENT, "indices": _shard(rank)}),
        lambda: _plain(
            lambda rank: {"attributes": {"dataset.dataset": f"{rank}"}, "content": _CONTENT, "indices": _split(rank)}
        ),
        lambda: _plain(lambda rank: {"indices": _split(rank), "attributes": {}}),
        lambda: _plain(lambda rank: {"attributes": _BASE, "content": _CONTENT, "indices": _split(0)}),
        lambda: _facts(attributes={"dataset.samples": "a", "dataset.class_to_idx": "c", "dataset.cache_dir": "z"}),
        lambda: Facts(
            topic="loader:0", values={0: _PLAIN, 1: {**_PLAIN, "length": 700, "attributes": {"dataset.x": "q"}}}
        ),
        lambda: (Facts(topic="loader:0", values={0: _PLAIN, 1: _PLAIN}), *steps(8, world=2)),
        lambda: (
            *(Facts(topic="loader:0", values={r: {**_PLAIN, "step": at} for r in range(2)}) for at in (0, 6)),
            *(_dealt_anew(n) for n in range(12)),
        ),
        lambda: (Facts(topic="loader:0", values={0: _PLAIN, 1: _PLAIN}), *steps(8, world=2, record_digest=5)),
    )

    def __init__(self, config: Fields | None = None) -> None:
        super().__init__(config)
        #: Rank -> step at which it has begun a pass over a loader, and the number of the pass; the newest ones.
        self._begun_at: dict[int, list[tuple[int, int]]] = {}
        self._seen: dict[int, tuple[int, list[int]]] = {}  # fingerprint -> (epoch, ranks that had it, the first first)
        self._overlaps: list[tuple[int, int, int]] = []  # (step, rank, rank that had it first)
        self._loaders: dict[str, Mapping[int, Loader]] = {}  # number -> what was told of it last
        self._told: set[str] = set()  # numbers of loaders whose data sets are known to differ
        self._items: dict[str, _Delivered] = {}  # number of the loader -> what it has delivered

    def explained_by(self, finding: Finding, cause: Finding) -> bool:
        # a draw with replacement that comes again is the same share in each epoch
        return cause.code != "DATA902" or finding.phase == "overlap"

    def compare(self, topic: str, facts: Mapping[int, Loader | Items]) -> Findings:
        loaders = {rank: fact for rank, fact in sorted(facts.items()) if isinstance(fact, Loader)}
        number = topic.partition(":")[2]
        if loaders:
            self._loaders[number] = loaders
            yield from self._begun(topic, loaders)
            return
        items = {rank: fact for rank, fact in sorted(facts.items()) if isinstance(fact, Items)}
        seen = self._items.setdefault(number, _Delivered())
        seen.begin(items)
        for rank, fact in items.items():
            seen.add(rank, fact)
        yield from self._samples(topic, seen, self._loaders.get(number, {}), announced_at(items, self.next_step))
        yield from self._unlike(topic, seen, self._loaders.get(number, {}), announced_at(items, self.next_step))

    def _samples(self, topic: str, seen: _Delivered, told: Mapping[int, Loader], step: int) -> Findings:
        """Find shards that overlap by samples: a sampler that pads gives some to two ranks, fewer than there are."""
        padded = len(told) if any(fact.distributed for fact in told.values()) else 0
        pairs, doubled = seen.overlaps(), seen.doubled()
        if not pairs or doubled < max(self.overlap_items, padded):
            return
        one = next(iter(told.values()), None)
        yield self.finding(
            severity=Severity.WARNING,  # draws with replacement look alike where they come again
            title="ranks train on the same samples: their shards overlap",
            step=step,
            ranks=tuple(sorted({rank for pair in pairs for rank in pair})),
            subject=("shards",),
            phase="overlap",
            location=None if one is None else one.location,
            evidence={
                "loader": topic.replace("items", "loader"),
                "same_samples_on": [list(pair) for pair in pairs],
                "given_twice": f"{doubled} of {len(frozenset().union(*seen.shares.values()))} samples",
            },
            causes=_OVERLAP,
        )

    def _unlike(self, topic: str, seen: _Delivered, told: Mapping[int, Loader], step: int) -> Findings:
        """Compare what the ranks were given for the same indices."""
        least = self.same_item_repeats if seen.exact else self.same_item_repeats_collated
        fixed = {rank for rank, times in seen.repeats.items() if times >= least}
        labels, records = (seen.unlike(kind, fixed) for kind in (0, 1))
        shared = _is_divided(told)
        if len(labels) >= self.other_items and not seen.changing[0]:
            contradict = not seen.changing[1] and not set(labels) & set(records)
            part = "labels" if contradict or seen.changing[1] else "records"
            known = contradict or shared
            odd = labels
        else:
            # numbers alone: pictures and sounds may be altered in a way that is fixed on a rank
            part, odd = "records", records
            known = shared and seen.whole and not seen.labelled and not seen.changing[1]
        if not known or len(odd) < self.other_items or topic.partition(":")[2] in self._told:
            return
        index, values = next(iter(odd.items()))
        one = next(iter(told.values()), None)
        yield self.finding(
            title=f"{self.title}: {_SAID[part]} of the same indices",
            step=step,
            ranks=_odd_ones(odd),
            subject=("items",),
            phase="items",
            location=None if one is None else one.location,
            evidence={
                "loader": topic.replace("items", "loader"),
                "differs": f"{_SAID[part]} of the same indices",
                "indices": [int(i) for i in list(odd)[:MAX_NAMES]],
                "indices_that_differ": f"{len(odd)} of {seen.compared(fixed)} compared",
                "values": {str(rank): f"index {index}: {value}" for rank, value in values.items()},
                **({} if one is None or one.dataset is None else {"dataset": one.dataset}),
            },
        )

    def _begun(self, topic: str, facts: Mapping[int, Loader]) -> Findings:
        told = dict(facts)
        for rank, fact in told.items():  # which comes before the steps of the pass, and before some of the last one
            known = self._begun_at.setdefault(rank, [])
            self._begun_at[rank] = [*known[-_PASSES:], (fact.step or 0, known[-1][1] + 1 if known else 1)]
        self._overlaps.clear()
        if len(told) < 2:
            return
        divided = _is_divided(told)
        differing = _attributes(told, everything=divided)
        if divided or self._splits_overlap(told):
            differing = {**_settings(told, divided=divided), **_indices(told), **differing}
        if differing:
            first = next(iter(differing))
            self._told.add(topic.partition(":")[2])
            yield self._differing(topic, told, differing, announced_at(facts, self.next_step), _part(first, told))

    def _differing(self, topic: str, told: Mapping[int, Loader], differing: _Columns, step: int, part: str) -> Finding:
        """Say what differs."""
        first = next(iter(differing))
        one = next(iter(told.values()))
        split = one.indices if first == "indices" else None
        causes: list[str] = runbook(type(self))["causes"]
        values = {str(rank): value for rank, value in differing[first].items()}
        evidence: dict[str, Any] = {"loader": topic, "differs": _SAID[part], "values": values, "dataset": one.dataset}
        if split is not None and split.drawn is not None:
            seeds = {str(rank): fact.indices.seed for rank, fact in told.items() if fact.indices is not None}
            causes = [f"`the split`: {_cause_of_split(split.drawn, list(seeds.values()))}", *causes]
            evidence |= {"seeds": seeds}
        return self.finding(
            title=f"{self.title}: {_SAID[part]}",
            step=step,
            ranks=outvoted(differing[first]),
            subject=tuple(differing)[:MAX_NAMES],
            phase="loader",
            location=one.location if split is None else split.location,
            evidence={key: value for key, value in evidence.items() if value is not None},
            causes=causes,
        )

    def _splits_overlap(self, told: Mapping[int, Loader]) -> bool:
        """Return whether ranks without a common sampler have drawn splits of one data set, each its own.

        Shards that a script deals out by hand do not overlap; what `random_split` has drawn once on each rank does.
        """
        splits = [fact.indices for fact in told.values() if fact.indices is not None]
        if len(splits) < len(told) or len({split.length for split in splits}) > 1 or not _same_base(told):
            return False
        drawn = all(split.drawn is not None for split in splits)
        least = self.split_overlap_drawn if drawn else self.split_overlap
        return any(
            one.members != other.members and _overlap(one.sketch, other.sketch) >= least
            for one, other in combinations(splits, 2)
        )

    def detect(self, step: Step) -> Findings:
        if step.optimizer or len(step.rows) < 2 or not self._begun_at:
            return
        name = next((n for n in ("record_digest", "batch_digest") if step.known(n)), None)
        if name is None:
            return
        shown = {rank: int(getattr(row, name)) for rank, row in step.rows.items()}
        begun = {rank: [n for at, n in self._begun_at.get(rank, ()) if at <= step.step] for rank in shown}
        now = {rank: max(numbers, default=0) for rank, numbers in begun.items()}
        for rank, value in shown.items():
            epoch, ranks = self._seen.get(value, (-1, []))
            # what a rank itself has again is no sign of shards that overlap: equal samples (DATA906)
            if epoch == now[rank] and rank not in ranks and not any(shown.get(other) == value for other in ranks):
                self._overlaps.append((step.step, rank, ranks[0]))
        for rank, value in shown.items():
            epoch, ranks = self._seen.get(value, (-1, []))
            if epoch != now[rank]:
                ranks = []
                self._seen[value] = now[rank], ranks
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


def _odd_ones(odd: Mapping[str, Mapping[int, str]]) -> tuple[int, ...]:
    """Return the one rank without which the others agree; all that disagree where there is no such rank."""
    ranks = sorted({rank for values in odd.values() for rank in values})
    alone = [r for r in ranks if all(len({v for o, v in found.items() if o != r}) == 1 for found in odd.values())]
    return tuple(alone) if len(alone) == 1 else tuple(ranks)


def _is_divided(told: Mapping[int, Loader]) -> bool:
    """Whether samplers deal one data set out to the ranks: not where each of several deals out the whole of its own."""
    if not told or not all(fact.distributed for fact in told.values()):
        return False
    places: dict[str, set[tuple[Any, Any]]] = {}  # what a rank has -> (place, replicas) of the samplers that have it
    for fact in told.values():
        held = {name: value for name, value in fact.attributes.items() if not _own(name)}
        places.setdefault(repr((held, fact.indices and fact.indices.digest)), set()).add((fact.rank, fact.replicas))
    whole = all(len(own) == replicas for own in places.values() for _, replicas in own)
    return not whole or (len(places) == 1 and any(fact.replicas != 1 for fact in told.values()))


def _settings(told: Mapping[int, Loader], *, divided: bool) -> dict[str, dict[int, Any]]:
    names = _SETTINGS if divided else ()
    return _parted({key: {rank: getattr(fact, key) for rank, fact in told.items()} for key in names})


def _indices(told: Mapping[int, Loader]) -> dict[str, dict[int, Any]]:
    """Return the subset's indices where they differ: ranks that share a sampler must hold the same subset."""
    digests = {rank: None if fact.indices is None else fact.indices.digest for rank, fact in told.items()}
    return _parted({"indices": digests}) if all(digests.values()) else {}


def _same_base(told: Mapping[int, Loader]) -> bool:
    """Return whether subsets are known to be of one data set: all that it holds is the same, and records are there."""
    tables = [{name: value for name, value in fact.attributes.items() if not _own(name)} for fact in told.values()]
    records = any(set(fact.content) & set(table) for fact, table in zip(told.values(), tables, strict=True))
    return records and all(table == tables[0] for table in tables)


def _overlap(one: Sequence[int], other: Sequence[int]) -> float:
    """Return the share of indices that are in both of two sets, estimated from the smallest hashes of each."""
    least = sorted({*one, *other})[: min(len(one), len(other))]
    both = {*one} & {*other}
    return sum(value in both for value in least) / len(least) if least else 0.0


def _part(name: str, told: Mapping[int, Loader]) -> str:
    """Return which part of the data the ranks disagree about, by what differs first."""
    if name in _SETTINGS:
        return "settings"
    if name.rpartition(".")[2] == "indices":
        members = {fact.indices.members for fact in told.values() if fact.indices is not None}
        return "order" if name == "indices" and len(members) == 1 and None not in members else "split"
    if _numbering(name):
        return "numbering"
    held = [fact.content[name] for fact in told.values() if name in fact.content]
    if len(held) < len(told):
        return "records"
    called_so = name.rpartition(".")[2].lower().strip("_") in _LABELS
    if len({content.unordered for content in held}) == 1 and not (called_so and _others_agree(name, told)):
        return "order"
    names = list(held[0].columns)
    odd = {key for key in names if len({content.columns.get(key) for content in held}) > 1}
    of_labels = {key for key in names if key.lower() in _LABELS} or set(names[-1:])
    return "labels" if called_so or (odd and odd < set(names) and odd <= of_labels) else "records"


def _others_agree(name: str, told: Mapping[int, Loader]) -> bool:
    """Return whether other records, as many as these, are the same on all ranks: then these alone were moved."""
    first = next(iter(told.values()))
    alike = [n for n, held in first.content.items() if n != name and held.length == first.content[name].length]
    return any(len({fact.attributes.get(other) for fact in told.values()}) == 1 for other in alike)


def _cause_of_split(drawn: str, seeds: Sequence[int | None]) -> str:
    if drawn == "own":
        return "the generator that `random_split` is given has another seed on each rank, or was drawn from before"
    if len(set(seeds)) > 1:
        return (
            "`random_split` without a generator: it takes the default one, which nobody has seeded alike on all ranks"
        )
    return "`random_split` without a generator: the ranks had drawn differently often from the default one before"


def _attributes(told: Mapping[int, Loader], *, everything: bool) -> dict[str, dict[int, Any]]:
    """Return attributes of the data sets that differ and should not; label numbering only unless `everything`."""
    tables = {rank: fact.attributes for rank, fact in told.items()}
    names = sorted(name for name in next(iter(tables.values())) if all(name in table for table in tables.values()))
    listed = {name for name in names if all(_is_listed(name, fact) for fact in told.values())}
    chosen = [name for name in names if _numbering(name) or (everything and not _own(name, listed=name in listed))]
    found = _parted({name: {rank: table[name] for rank, table in tables.items()} for name in chosen})
    return dict(sorted(found.items(), key=lambda item: (not _numbering(item[0]), item[0])))


def _numbering(name: str) -> bool:
    return name.rpartition(".")[2].lower().strip("_") in _NUMBERING


def _is_listed(name: str, fact: Loader) -> bool:
    """Return whether an attribute has a record for each item of the data set."""
    return name in fact.content and fact.content[name].length == fact.length


def _own(name: str, *, listed: bool = False) -> bool:
    last = name.rpartition(".")[2].lower()
    return last not in _RECORDS and any(part in last for part in (_OWN_LISTS if listed else _OWN))


def _parted(columns: Mapping[str, dict[int, Any]]) -> dict[str, dict[int, Any]]:
    return {name: values for name, values in columns.items() if len({repr(value) for value in values.values()}) > 1}
