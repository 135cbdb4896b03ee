"""Contracts 3 and 4: loads of state dicts, and samples: which ones, how often, on which rank. Torch-free."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

from ddpdebug.facts.fact import Fact, about, how_much, how_often, middle
from ddpdebug.facts.seen import Said, Seen
from ddpdebug.schema.announcements import (
    Gathered,
    InputStatistics,
    Items,
    LabelCounts,
    Loader,
    RepeatedOrder,
    StreamEnded,
    Targets,
    TokenChange,
)
from ddpdebug.schema.details import Parameters
from ddpdebug.schema.row import Flag
from ddpdebug.schema.step import Step

#: What samples show varies with the seed; more than by these factors it does not.
_CHANCE, _SHARE, _STATISTIC, _SIZE = 1.5, 2.0, 2.0, 1.3


def facts(seen: Seen) -> Iterator[Fact]:
    """Yield facts about loads and samples."""
    for optimizer, steps in seen.steps.items():
        loads = ((step.step, step.any(Flag.LOADED)) for step in steps)
        yield from how_often(about(3, f"optimizer {optimizer}", "something is loaded before its step"), loads)
    for _, step, known in seen.details(Parameters):
        for load in known.loads:
            yield seen.fact(3, load.what, "is loaded", "yes", step, place=load.location)
    yield from _loaders(seen)
    if seen.steps:
        yield from _batches(max(seen.steps.values(), key=len), seen.world)
    yield from _targets(seen)
    yield from _inputs(seen)


def _loaders(seen: Seen) -> Iterator[Fact]:
    loaders = defaultdict[int, list[Said[Loader]]](list)
    for one in seen.of(Loader):
        loaders[one.number].append(one)
    newest = max((said[0].step for said in loaders.values()), default=0)
    yield seen.fact(4, "DataLoaders", "number", str(len(loaders)), newest)
    for number, said in loaders.items():
        yield from _loader(f"DataLoader {number}", said, seen)
    orders = seen.of(RepeatedOrder)
    first, place = (orders[0].step, orders[0].value.location) if orders else (0, None)
    yield seen.fact(4, "a sampler", "draws the order of a pass again", "yes" if orders else "no", first, place=place)
    ends = {one.rank: one.value.batches for one in seen.of(StreamEnded) if one.value.iterations == 1}
    if len(ends) > 1:
        alike = "yes" if len(set(ends.values())) == 1 else "no"
        yield seen.fact(4, "streams", "are equally long on all ranks", alike, seen.last, of_world=True)
    items = defaultdict[tuple[int, str], set[tuple[str, str]]](set)
    shown = dict[int, int]()
    for told in seen.of(Items):
        shown[told.number] = told.step
        for index, digests in told.value.items.items():
            items[told.number, index].add(digests)
    for number, step in shown.items():
        for i, what in enumerate(("numbers of an item", "tensors of an item")):
            same = all(len({one[i] for one in found}) == 1 for (of, _), found in items.items() if of == number)
            yield seen.fact(4, f"DataLoader {number}: {what}", "are alike on all ranks", _yes(same), step)


def _loader(name: str, said: Sequence[Said[Loader]], seen: Seen) -> Iterator[Fact]:
    first, step = said[0].value, said[0].step
    own = [one for one in said if one.rank == said[0].rank]
    for statement, value in (
        ("sampler", first.sampler or "none"),
        ("data set has", first.length),
        ("batch size", first.batch_size),
        ("shuffles", first.shuffle),
        ("drops the last batch", first.drop_last),
        ("class of the data set", (first.dataset or "").partition(" at ")[0]),
        ("has workers", _yes(first.workers > 0)),
    ):
        if value is not None and value != "":
            yield seen.fact(4, name, statement, str(value), step)
    if first.distributed:
        takes_own = all(one.value.rank == one.rank for one in said)
        yield seen.fact(4, name, "takes the part of its own rank", _yes(takes_own), step)
        parts = "as many as ranks" if first.replicas == seen.world else str(first.replicas)
        yield seen.fact(4, name, "data set is divided into parts", parts, step)
        drawn = {(one.value.iterations, one.value.seed, one.value.epoch) for one in said}
        alike = len(drawn) == len({(one.value.iterations, one.value.seed, one.value.epoch) for one in own})
        yield seen.fact(4, name, "seed and epoch are alike on all ranks", _yes(alike), step)
        if len(own) > 1:
            knows = len({one.value.epoch for one in own}) > 1
            yield seen.fact(4, name, "the sampler is told the epoch", _yes(knows), own[1].step, of_world=True)
    digests = defaultdict[str, set[str]](set)
    for one in said:
        for key, digest in one.value.attributes.items():
            digests[key].add(digest)
        for key, content in one.value.content.items():
            digests[f"records in {key}"].add(content.unordered)
        if one.value.indices is not None:
            digests["indices of its Subset"].add(one.value.indices.digest)
    for key, found in digests.items():
        yield seen.fact(4, f"{name}: {key}", "alike on all ranks", _yes(len(found) == 1), step)


def _batches(steps: Sequence[Step], world: int) -> Iterator[Fact]:
    """Yield how often batches come again, and to whom; those of the loader where there is one, else the inputs."""
    name = "record_digest" if any(row.record_digest for step in steps for row in step.rows.values()) else "batch_digest"
    every = ((step.step, {rank: getattr(row, name) for rank, row in step.rows.items()}) for step in steps)
    known = [(step, digests) for step, digests in every if all(digests.values())]
    had, last = defaultdict[int, set[int]](set), dict[int, int]()
    again, before, shared, others = (list[tuple[int, bool]]() for _ in range(4))
    for step, digests in known:
        again.append((step, any(digest in had[rank] for rank, digest in digests.items())))
        before.append((step, any(last.get(rank) == digest for rank, digest in digests.items())))
        shared.append((step, len(set(digests.values())) < len(digests)))
        others.append((step, any(digest in had[o] for rank, digest in digests.items() for o in digests if o != rank)))
        for rank, digest in digests.items():
            had[rank].add(digest)
            last[rank] = digest
    yield from how_much(about(4, "a batch", "comes again to the same rank", of_world=True), again[1:])
    yield from how_much(about(4, "a batch", "is the one before once more"), before[1:])
    if world > 1:
        yield from how_much(about(4, "a batch", "is that of another rank in the same step"), shared)
        yield from how_much(about(4, "a batch", "was that of another rank before", of_world=True), others[1:])
        sizes = ((s.step, len({row.batch_elements for row in s.rows.values()}) > 1) for s in steps)
        yield from how_often(about(4, "inputs", "have another size on some rank"), sizes)


def _targets(seen: Seen) -> Iterator[Fact]:
    for one in seen.first_rank(Targets)[:1]:
        targets, at = one.value, one.step
        yield seen.fact(4, "targets", "loss function", targets.loss, at)
        yield seen.fact(4, "targets", "classes", str(targets.classes), at)
        yield seen.fact(4, "targets", "are the same in each step", _yes(targets.fixed), at)
        if targets.chance is not None and targets.chance > 0:
            yield seen.fact(4, "targets", "loss of the best constant answer", targets.chance, at, within=_CHANCE)
        if targets.counts:
            share = max(targets.counts) / max(1, sum(targets.counts))
            yield seen.fact(4, "targets", "share of the most frequent class", share, at, within=_SHARE)
        if (mean := middle(number for number in targets.numbers if number)) is not None:
            yield seen.fact(
                4, "targets", "numbers that a loss is the mean of", mean, at, within=_STATISTIC, of_world=True
            )
    for counted in seen.first_rank(LabelCounts)[:1]:
        share = counted.value.share
        yield seen.fact(4, "labels", "share of the most frequent class, in all", share, counted.step, within=_CHANCE)
    changes = [one for one in seen.of(TokenChange) if max(one.value.before, one.value.summary, one.value.here) > 0]
    for change in changes[:1]:
        seeing = "some, in front of it" if change.value.before or change.value.summary else "its own"
        yield seen.fact(4, "outputs", "that see a token as target", seeing, change.step, place=change.value.location)
    if not changes:
        yield seen.fact(4, "outputs", "that see a token as target", "none")


def _inputs(seen: Seen) -> Iterator[Fact]:
    spreads = defaultdict[int, list[float]](list)
    for one in seen.of(InputStatistics):
        spreads[one.number].append(one.value.std)
    for one in seen.first_rank(InputStatistics):
        name = "input of the first layer" + (f" of ddp{one.number}" if one.number else "")
        yield seen.fact(4, name, "deviation", one.value.std, one.step, within=_STATISTIC)
        yield seen.fact(4, name, "class of the layer", one.value.layer, one.step)
        far = abs(one.value.mean) > 2 * one.value.std
        yield seen.fact(4, name, "mean", "far from 0" if far else "about 0", one.step)
        found = spreads[one.number]
        if len(found) > 1:
            alike = max(found) <= _STATISTIC * min(found)
            yield seen.fact(4, name, "deviation is about alike on all ranks", _yes(alike), one.step)
    lines = {one.value.location: one.step for one in seen.of(Gathered)}
    count = str(len(lines))
    yield seen.fact(
        8,
        "",
        "lines that gather without a gradient",
        count,
        max(lines.values(), default=0),
        place=next(iter(lines), None),
    )


def _yes(fact: bool) -> str:  # noqa: FBT001 - the value itself
    return "yes" if fact else "no"
