"""What is told of a data set and of what loaders deliver: order, labels, splits, and the items behind indices."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Sampler, Subset, TensorDataset, random_split

from ddpdebug import fingerprint
from ddpdebug.detectors.data.data910_data_sets_differ import DataSetsDiffer
from ddpdebug.instrument.probes import Probes
from ddpdebug.isolation.guard import Guard
from ddpdebug.probes import delivered_items
from ddpdebug.probes.datasets import Splits, held_by
from ddpdebug.probes.delivered_items import DeliveredItems
from ddpdebug.probes.optimizers import OptimizerWatch
from ddpdebug.probes.step_state import StepState
from ddpdebug.probes.training_events import BatchDelivered, Bus, EpochEnded, IndicesDrawn, WorkersBegan
from ddpdebug.schema.announcements import IndexList, Items, Loader, RepeatedOrder
from ddpdebug.schema.details import hex_digest

COUNT = 40
FORWARD, BACKWARD = list(range(COUNT)), list(range(COUNT))[::-1]


@dataclass
class Entry:
    """A record of the script's own."""

    name: str
    kind: int


class Own(Dataset[Any]):
    """Holds one attribute; its code must not run."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> Any:
        pytest.fail("an item was read")


def told(dataset: Any) -> Loader:
    """Return what a loader over a data set says of it."""
    held = dict(held_by(dataset))
    return Loader(
        sampler="DistributedSampler",
        distributed=True,
        length=COUNT,
        replicas=2,
        attributes={path: hex_digest(found.digest) for path, found in held.items()},
        content={path: found.content for path, found in held.items() if found.content is not None},
        indices=Splits().of(dataset),
    )


def differs(one: Any, other: Any) -> str | None:
    """Return which part of two ranks' data sets differs, None where none does."""
    found = list(DataSetsDiffer().compare("loader:0", {0: told(one), 1: told(other)}))
    return found[0].evidence["differs"].removeprefix("the ").partition(" of ")[0] if found else None


KINDS: dict[str, Callable[[Sequence[int]], Any]] = {
    "texts": lambda order: [f"record {i}" for i in order],
    "paths": lambda order: [Path("/data/images") / f"{i}.png" for i in order],
    "pairs": lambda order: [(f"/data/{i}.png", i % 3) for i in order],
    "dicts": lambda order: [{"text": f"{i}", "label": i % 3} for i in order],
    "entries": lambda order: [Entry(f"{i}", i % 3) for i in order],
    "tensors of one shape": lambda order: torch.arange(COUNT * 3.0).view(COUNT, 3)[list(order)],
    "arrays": lambda order: np.arange(COUNT * 3.0).reshape(COUNT, 3)[list(order)],
    "arrays of texts": lambda order: np.array([f"{i}" for i in order]),
    "samples": lambda order: [(torch.full((2,), float(i)), i % 3) for i in order],
}


@pytest.mark.parametrize("kind", KINDS)
def test_order_and_records(kind: str) -> None:
    """The same records in another order are told from other records, and equal ones from both."""
    make = KINDS[kind]
    others = [*FORWARD[:-1], COUNT]
    assert differs(Own(make(FORWARD)), Own(make(FORWARD))) is None
    assert differs(Own(make(FORWARD)), Own(make(BACKWARD))) == "order"
    changed = make(FORWARD) + 1 if kind in {"tensors of one shape", "arrays"} else make(others)
    assert differs(Own(make(FORWARD)), Own(changed)) == "records"


def test_labels() -> None:
    """Labels alone: the last column of pairs, a tensor of a table, a list of that name beside equal records."""
    moved = {0: 2, 1: 0, 2: 1}
    pairs = KINDS["pairs"](FORWARD)
    assert differs(Own(pairs), Own([(name, moved[kind]) for name, kind in pairs])) == "labels"
    inputs, kinds = torch.randn(COUNT, 3), torch.arange(COUNT) % 3
    assert differs(TensorDataset(inputs, kinds), TensorDataset(inputs, kinds.flip(0))) == "labels"
    one, other = Own(KINDS["texts"](FORWARD)), Own(KINDS["texts"](FORWARD))
    one.labels, other.labels = FORWARD, BACKWARD  # type: ignore[attr-defined]
    assert differs(one, other) == "labels"
    first = Own([(torch.ones(2), 1)] * COUNT)
    assert differs(first, Own([(torch.ones(2), 2)] * COUNT)) == "labels"


def test_the_folder_of_a_node_does_not_count() -> None:
    """Paths are compared from the folder on that all have in common."""
    one, other = ([(f"/local/{node}/images/{i % 4}/{i}.png", i % 4) for i in range(COUNT)] for node in (1, 22))
    assert differs(Own(one), Own(other)) is None
    assert differs(Own(one), Own(other[::-1])) == "order"


def test_sets_have_no_order() -> None:
    """They are equal whatever they were made in."""
    names = [f"name {i}" for i in range(30)]
    assert differs(Own(set(names)), Own({*reversed(names)})) is None
    assert differs(Own(set(names)), Own(set(names[1:]))) == "records"


def test_lists_are_data_sets_too() -> None:
    """A loader takes anything with items."""
    assert differs(list(FORWARD), list(BACKWARD)) == "order"
    base = KINDS["pairs"](FORWARD)
    assert differs(Subset(base, [1, 2, 3]), Subset(base, [1, 2, 3])) is None
    assert differs(Subset(base, [1, 2, 3]), Subset(base, [3, 2, 1])) == "order"
    assert differs(Subset(base, [1, 2, 3]), Subset(base, [1, 2, 4])) == "split"


def test_what_is_no_plain_data_is_left_alone() -> None:
    """No code of a class of the script runs, and what holds such objects is not compared."""

    class Mute:
        def __repr__(self) -> str:
            pytest.fail("a representation was asked for")

        __iter__ = __len__ = __getitem__ = __eq__ = __hash__ = __repr__  # type: ignore[assignment]

    for value in (Mute(), [Mute()], [(1, Mute())], {"a": Mute()}, np.array([Mute()], dtype=object)):
        assert dict(held_by(Own(value))) == {}


def test_large_lists_are_sampled() -> None:
    """What is read of a data set is bounded, and nothing is said of the order of what is not read whole."""
    held = dict(held_by(Own([f"{i}" for i in range(300_000)])))["dataset.value"]
    assert held.content is None
    assert held.size < 1 << 20


def test_a_data_set_stays_what_it_is() -> None:
    """Nothing is drawn, and an array that must not be written to is read."""
    array = np.arange(6.0)
    array.flags.writeable = False
    before = torch.get_rng_state(), random.getstate(), str(np.random.get_state())  # noqa: NPY002 - the job's
    data = Own(array)
    assert set(dict(held_by(data))) == {"dataset.value"}
    after = torch.get_rng_state(), random.getstate(), str(np.random.get_state())  # noqa: NPY002 - likewise
    assert torch.equal(before[0], after[0])
    assert before[1:] == after[1:]
    assert set(vars(data)) == {"value"}


def test_the_line_and_the_seed_of_a_split() -> None:
    """Which generator has drawn it, and where; a subset made by hand has a line only."""
    splits, made = Splits(), []
    with watch_subsets(splits):
        torch.manual_seed(77)
        made += random_split(TensorDataset(torch.arange(10)), [8, 2])
        made += random_split(TensorDataset(torch.arange(10)), [8, 2], generator=torch.Generator().manual_seed(5))
        made.append(Subset(TensorDataset(torch.arange(10)), [1]))
    found = [splits.of(subset) for subset in made]
    assert [(f.drawn, f.seed) for f in found if f is not None] == [
        ("default", 77), ("default", 77), ("own", 5), ("own", 5), (None, None),
    ]  # fmt: skip
    other = splits.of(Subset(TensorDataset(torch.arange(10)), [1]))
    assert other is not None
    assert (other.location, other.drawn) == (None, None)


class watch_subsets:  # noqa: N801 - reads as a function
    """Tells `splits` of subsets that are made inside."""

    def __init__(self, splits: Splits) -> None:
        self.splits = splits

    def __enter__(self) -> None:
        self.made = Subset.__init__

        def make(subset: Any, *args: Any, **kwargs: Any) -> None:
            self.made(subset, *args, **kwargs)
            self.splits.note(subset, "here:1")

        Subset.__init__ = make  # type: ignore[method-assign]

    def __exit__(self, *_: object) -> None:
        Subset.__init__ = self.made  # type: ignore[method-assign]


def test_the_sketch_tells_shards_from_splits() -> None:
    """The same hashes where indices are the same, whatever their order."""

    def of(indices: Sequence[int]) -> IndexList:
        found = Splits().of(Subset(TensorDataset(torch.arange(1000)), list(indices)))
        assert found is not None
        return found

    one, other = of(range(0, 1000, 2)), of(range(1, 1000, 2))
    assert not set(one.sketch) & set(other.sketch)
    assert len(one.sketch) == 64
    again = of(list(range(0, 1000, 2))[::-1])
    assert (again.sketch, again.members) == (one.sketch, one.members)
    assert again.digest != one.digest


# --- fingerprints of rows ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64, torch.uint8, torch.bool, torch.bfloat16])
def test_rows_have_hashes_of_their_own(dtype: torch.dtype) -> None:
    """Equal rows have equal ones, a moved element another one, and the table's does not ask for the order."""
    table = torch.arange(24).remainder(7).reshape(6, 4).to(dtype)
    hashes = fingerprint.rows(table)
    assert hashes.shape == (6,)
    assert fingerprint.unordered([hashes]) == fingerprint.unordered([fingerprint.rows(table[torch.randperm(6)])])
    if dtype is not torch.bool:
        assert fingerprint.unordered([hashes]) != fingerprint.unordered([fingerprint.rows(table.flip(1))])
    assert fingerprint.unordered([hashes, hashes.flip(0)]) != fingerprint.unordered([hashes, hashes])


def test_rows_in_several_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A large table is read in parts, with the same result."""
    table = torch.randn(50, 3)
    whole = fingerprint.rows(table)
    monkeypatch.setattr(fingerprint, "CHUNK_WORDS", 8)
    assert torch.equal(fingerprint.rows(table), whole)


# --- what is delivered ------------------------------------------------------------------------------------------------


class Epochs:
    """A rank whose loaders are read by hand, as the wrappers would tell it."""

    def __init__(self) -> None:
        self.told: list[Any] = []
        self.bus, self.state = Bus(Guard(lambda part, message: pytest.fail(f"{part}: {message}"))), StepState()
        self.state.world = 2
        self.items = DeliveredItems(self.bus, self.state, lambda fact, number=None: self.told.append(fact))

    def read(self, loader: DataLoader[Any], stop: int = 1 << 30) -> None:
        """Go through one epoch, or the first `stop` batches of it."""
        self.items.begin(loader, 0, len(loader.dataset))  # type: ignore[arg-type]
        iterator = iter(loader)
        next_index = iterator._next_index  # type: ignore[attr-defined]
        if ahead := getattr(iterator, "_task_info", None):  # drawn before this could look
            for number in ahead:
                self.bus.emit(IndicesDrawn(iterator, list(range(4 * number, 4 * number + 4))))

        def drawn() -> Any:
            indices = next_index()
            self.bus.emit(IndicesDrawn(iterator, indices))
            return indices

        iterator._next_index = drawn  # type: ignore[attr-defined]
        self.bus.emit(WorkersBegan(iterator))
        for _ in range(stop):
            try:
                batch = next(iterator)
            except ValueError:
                self.bus.emit(EpochEnded(iterator, failed=True))
                continue
            except StopIteration:
                self.bus.emit(EpochEnded(iterator))
                return
            self.bus.emit(BatchDelivered(batch, iterator))


def pairs() -> TensorDataset:
    return TensorDataset(torch.arange(3.0 * COUNT).view(COUNT, 3), torch.arange(COUNT) % 5)


def test_the_same_index_has_the_same_digests() -> None:
    """Whatever the order of an epoch; labels and records apart."""
    rank, loader = Epochs(), DataLoader(pairs(), 4, shuffle=True)
    rank.read(loader)
    rank.read(loader)
    assert len(rank.told) == 2
    assert rank.told[0].items == rank.told[1].items
    assert len(rank.told[0].items) == len(delivered_items._followed(COUNT))
    assert rank.told[0].exact
    by_label: dict[int, set[str]] = {}
    for index, (label, _) in rank.told[0].items.items():
        by_label.setdefault(int(index) % 5, set()).add(label)
    assert all(len(digests) == 1 for digests in by_label.values())
    assert len({record for _, record in rank.told[0].items.values()}) == len(rank.told[0].items)


class Shuffled(Sampler[int]):
    """A sampler of the user's, that shuffles by its epoch, or stores its order."""

    def __init__(self, order: list[int] | None = None) -> None:
        self.epoch, self.order = 0, order

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Any:
        generator = torch.Generator().manual_seed(self.epoch)
        return iter(torch.randperm(COUNT, generator=generator).tolist() if self.order is None else self.order)

    def __len__(self) -> int:
        return COUNT


@pytest.mark.parametrize(
    ("case", "told"),
    [
        ("forgotten", 1),
        ("told the epoch", 0),
        ("curriculum", 0),  # it was told, and begins with the same samples
        ("evaluation", 0),  # nothing is trained on it
        ("in order", 0),
        ("blocks", 0),
        ("longest first", 0),
        ("torch's", 0),  # of which `Loader` says all
    ],
)
def test_an_order_that_comes_again_is_told_of_what_is_trained_on(case: str, told: int) -> None:
    """A fixed order by length, or as it is stored, is one on purpose."""
    rank = Epochs()
    orders = {
        "curriculum": random.Random(5).sample(range(COUNT), COUNT),
        "in order": list(range(COUNT)),
        "blocks": [*range(COUNT // 2, COUNT), *range(COUNT // 2)],
        "longest first": list(range(COUNT))[::-1],
    }
    own: Any = Shuffled(orders.get(case))
    sampler = DistributedSampler(range(COUNT), 1, 0) if case == "torch's" else own  # type: ignore[arg-type, var-annotated]
    loader = DataLoader(pairs(), 4, sampler=sampler)
    watch = OptimizerWatch(None, 0)
    rank.state.watches.append(watch)

    def steps(_: BatchDelivered) -> None:
        watch.step += case != "evaluation"

    rank.bus.on("probe:steps", BatchDelivered, steps)
    for epoch in range(4):
        if case in {"told the epoch", "curriculum"}:
            own.set_epoch(epoch)
        rank.read(loader)
    found = [fact for fact in rank.told if isinstance(fact, RepeatedOrder)]
    assert len(found) == told
    for fact in found:
        assert (fact.sampler, fact.set_epoch, fact.epoch) == ("Shuffled", True, 0)


def test_an_epoch_that_is_broken_off_is_told_at_the_next() -> None:
    """Each epoch is told once, so that the ranks' are compared one by one."""
    rank, loader = Epochs(), DataLoader(pairs(), 4)
    rank.read(loader, stop=3)
    assert rank.told == []
    rank.read(loader)
    assert len(rank.told) == 2
    assert len(rank.told[1].items) == len(delivered_items._followed(COUNT))
    assert set(rank.told[0].items) <= {str(i) for i in range(12)}


class Failing(TensorDataset):
    def __getitem__(self, index: int) -> Any:
        if index == 5:
            raise ValueError
        return super().__getitem__(index)


def test_a_batch_that_failed_moves_nothing() -> None:
    """What comes behind a batch that raised is not taken for its items."""
    whole = Epochs()
    whole.read(DataLoader(pairs(), 4))
    for workers in (0, 2):
        rank = Epochs()
        rank.read(DataLoader(Failing(*pairs().tensors), 4, num_workers=workers))
        assert rank.told[0].items
        assert rank.told[0].items.items() <= whole.told[0].items.items()


def test_loaders_whose_indices_are_not_known() -> None:
    """Batches of the script's own making, and indices that are no numbers."""
    rank = Epochs()
    rank.read(DataLoader(pairs(), batch_size=None))
    rank.read(DataLoader(Named(), batch_sampler=[["a", "b"]]))
    assert not any(fact.items for fact in rank.told)


class Named(Dataset[Any]):
    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: Any) -> Any:
        return torch.ones(2)


def test_workers_deliver_in_the_order_of_the_indices() -> None:
    """Through the wrappers, with workers that are kept over epochs and an epoch that is broken off."""
    found: list[Items] = []

    def announce(fact: Any, number: int | None = None) -> None:
        if isinstance(fact, Items):
            found.append(fact)

    guard = Guard(lambda part, message: pytest.fail(f"{part}: {message}"))
    probes = Probes(guard, lambda _: None, announce, lambda *_: False)
    probes.meet(2)
    probes.patches.install()
    try:
        for workers in (0, 2):
            loader = DataLoader(pairs(), 4, shuffle=True, num_workers=workers, persistent_workers=workers > 0)
            for stop in (100, 3, 100):
                for number, _ in enumerate(loader):
                    if number == stop:
                        break
            del loader
    finally:
        probes.remove()
        probes.release()
    assert len(found) == 6
    known: dict[str, tuple[str, str]] = {}
    for fact in found:
        for index, item in fact.items.items():
            assert known.setdefault(index, item) == item
    assert len(known) == len(delivered_items._followed(COUNT))


class Proxy:
    """Stands for a record that is loaded as soon as anything of it is asked, its class too."""

    asked = 0

    @property
    def __class__(self) -> type:  # what proxies of libraries do
        type(self).asked += 1
        return str

    @__class__.setter
    def __class__(self, kind: type) -> None:
        raise AssertionError(kind)


class Numbers(Sequence[int]):
    """Indices of the script's own class."""

    asked = 0

    def __len__(self) -> int:
        type(self).asked += 1
        return COUNT

    def __getitem__(self, index: Any) -> Any:
        type(self).asked += 1
        return range(COUNT)[index]


@pytest.mark.parametrize(
    "make",
    [
        Proxy,
        lambda: [Proxy() for _ in range(COUNT)],
        lambda: [(Proxy(), 1) for _ in range(COUNT)],
        lambda: {"records": Proxy()},
        lambda: np.array([Proxy() for _ in range(COUNT)], dtype=object),
    ],
)
def test_a_record_that_stands_for_another_one_is_not_asked_what_it_is(make: Callable[[], Any]) -> None:
    data = Own(make())
    Proxy.asked = 0
    dict(held_by(data))
    assert Proxy.asked == 0


def test_indices_of_a_class_of_the_script_are_not_gone_through() -> None:
    data = Subset(Own(3), Numbers())
    Numbers.asked = 0
    assert Splits().of(data) is None
    assert Numbers.asked == 0


@pytest.mark.parametrize("kind", [list, tuple, np.array, torch.tensor])
def test_indices_are_the_same_in_whatever_they_are_kept(kind: Callable[[Any], Any]) -> None:
    usual, other = Splits().of(Subset(Own(3), BACKWARD)), Splits().of(Subset(Own(3), kind(BACKWARD)))
    assert usual is not None
    assert usual == other


@pytest.mark.parametrize("kind", ["f4", "U3", "M8[s]", "i8,f4"])
def test_rows_of_a_large_array_are_read_of_any_kind(kind: str) -> None:
    data = np.zeros(600_000, dtype=kind)
    usual = dict(held_by(Own(data)))["dataset.value"].digest
    data[-1] = np.ones(1, dtype=kind)[0]
    assert dict(held_by(Own(data)))["dataset.value"].digest != usual
