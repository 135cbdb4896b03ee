"""Duplicate samples: inside a batch, across batches, and on several ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from ddpdebug.preflight.capture.digests import of_inputs
from ddpdebug.preflight.observe import Seen
from ddpdebug.preflight.output.results import Check, Status
from ddpdebug.preflight.subject import Subject

#: A sample of fewer numbers may be met twice by chance; 16 whole numbers count as one.
_ELEMENTS = 4
#: Share of samples that are there twice from which on it is no chance and no oversampling.
_MANY = 0.5


def check(subject: Subject, seen: list[Seen]) -> Iterator[Check]:
    """Compare fingerprints of the model's inputs."""
    by_rank: Mapping[int, Any] = {int(rank): r for rank, r in subject.facts.get("ranks", {}).items() if r}
    own = by_rank[min(by_rank)]["batches"] if by_rank else [of_inputs(s.inputs) for s in seen if s.inputs]
    if not own or any(batch["elements"] < _ELEMENTS for batch in own):
        yield Check(Status.SKIPPED, "the samples are too small to tell a repetition from a coincidence")
        return
    yield _within(own, subject)
    if len(by_rank) > 1:
        yield _across({rank: r["batches"] for rank, r in by_rank.items()})
    elif int(subject.facts.get("world", 1)) > 1:
        yield Check(Status.SKIPPED, "what the other ranks saw did not arrive", name="duplicates on the ranks")


def _within(batches: list[dict[str, Any]], subject: Subject) -> Check:
    distinct = len({batch["batch"] for batch in batches})
    if distinct == 1 and len(batches) > 1:
        # optimizing over the whole data set at once is a method; a loader with more than one batch says that it is not
        known = any(loader["trains"] for loader in subject.facts.get("loaders", ()))
        return Check(
            Status.WARN if known else Status.INFO,
            f"all {len(batches)} batches are the same one",
            code="DATA906" if known else "",
            hypotheses=("`next(iter(loader))` inside the loop starts the loader anew in each step", "a cached batch")
            if known
            else (),
            actions=("iterate over the loader: `for batch in loader`",) if known else (),
        )
    if distinct < len(batches):  # a closure evaluates the same batch several times
        batches = list({batch["batch"]: batch for batch in batches}.values())
    counts = Counter(sample for batch in batches for sample in batch["samples"])
    total = sum(counts.values())
    again = total - len(counts)
    inside = sum(len(batch["samples"]) - len(set(batch["samples"])) for batch in batches)
    bad = again > _MANY * total and total > 1
    return Check(
        Status.WARN if bad else Status.INFO if again else Status.PASS,
        f"{again} of {total} samples in {len(batches)} batches are repetitions, {inside} within one batch",
        code="DATA906" if bad else "",
        hypotheses=("a data set whose __getitem__ ignores its index", "sampling with replacement") if bad else (),
    )


def _across(by_rank: Mapping[int, list[dict[str, Any]]]) -> Check:
    first, rest = min(by_rank), sorted(by_rank)[1:]
    own = [batch["batch"] for batch in by_rank[first]]
    same = [rank for rank in rest if [batch["batch"] for batch in by_rank[rank]] == own]
    samples = {sample for batch in by_rank[first] for sample in batch["samples"]}
    shared = {
        rank: len(samples & {sample for batch in by_rank[rank] for sample in batch["samples"]}) / max(1, len(samples))
        for rank in rest
    }
    most = max(shared.values(), default=0.0)
    bad, some = bool(same) and len(samples) > 1, most > _MANY
    return Check(
        Status.FAIL if bad else Status.WARN if some else Status.PASS,
        f"ranks {', '.join(map(str, [first, *same]))} get the same batches"
        if bad
        else f"rank {first} shares at most {100 * most:.0f} % of its samples with another rank",
        name="duplicates on the ranks",
        code="DATA901" if bad or some else "",
        evidence={"shared": {str(rank): round(share, 3) for rank, share in shared.items()}},
        hypotheses=("the loader has no DistributedSampler", "the sampler was given rank 0 on all ranks") if bad else (),
        actions=("`DataLoader(data, sampler=DistributedSampler(data))`",) if bad or some else (),
    )
