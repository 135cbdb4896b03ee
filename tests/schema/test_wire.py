"""What ranks tell each other is written and read alike, and what is damaged is read as far as it holds.

Round trips of all that a real run says are in `tests/contract`.
"""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

import pytest

from ddpdebug.schema.announcements import (
    TOPICS,
    AllocationFailure,
    Announcement,
    DeclaredGrowth,
    Device,
    End,
    ExpectedGrowth,
    Failure,
    InitialLoss,
    Loader,
    MemoryState,
    Place,
    Scope,
    Structure,
    UnusedSchedule,
    kinds_of,
    read_announcement,
    scope_of,
    topic_text,
)
from ddpdebug.schema.details import (
    DETAILS,
    Clip,
    Contract,
    HyperParameters,
    LayerStatistics,
    Modes,
    ModuleCall,
    NonfiniteLoss,
    NonfiniteParameters,
    Numerics,
    Parameters,
    Recipe,
    ScheduledElsewhere,
    read_detail,
)
from ddpdebug.schema.finding import Finding, Severity
from ddpdebug.schema.wire import Struct, from_json, to_json

CALL = {"module": "net", "class": "Linear", "dtype": "float32", "kinds": ["NaN"], "range": [-1.0, 2.0]}


@pytest.mark.parametrize("kind", [*DETAILS.values(), *(kind for some in TOPICS.values() for kind in some)])
def test_all_are_data(kind: type[Struct]) -> None:
    """Frozen, without room for anything else, and never mistaken by place."""
    assert kind.__dataclass_params__.frozen  # type: ignore[attr-defined]
    assert "__slots__" in vars(kind)
    assert all(f.kw_only for f in dataclasses.fields(kind))


def test_what_is_absent_is_not_written() -> None:
    """A key that today is left out stays out; one that is null stays null."""
    assert to_json(Recipe(lr=(0.1, None))) == {"lr": [0.1, None]}
    elsewhere = ScheduledElsewhere(kind="attribute", class_name="SGD")
    written = {"elsewhere": {"kind": "attribute", "class": "SGD", "location": None}, "lr": []}
    assert to_json(Recipe(elsewhere=elsewhere)) == written
    loss = NonfiniteLoss(value=1.0)
    assert {"location", "candidates", "line_found"}.isdisjoint(to_json(loss))
    several = to_json(dataclasses.replace(loss, candidates=("a.py:1", "a.py:2")))
    assert (several["location"], several["candidates"]) == (None, ["a.py:1", "a.py:2"])


@pytest.mark.parametrize(
    ("kind", "full"), [(Numerics, {"parameters": NonfiniteParameters()}), (LayerStatistics, {"order": ()})]
)
def test_nothing_seen_is_empty(kind: type[Struct], full: dict[str, Any]) -> None:
    """`{}` means that there was nothing to look at; looked at without a result is something else."""
    assert to_json(kind()) == {}
    assert from_json(kind, {}) == kind()
    seen = kind(**full)
    assert set(to_json(seen)) == {f.name for f in dataclasses.fields(kind)}
    assert from_json(kind, to_json(seen)) == seen


@pytest.mark.parametrize(
    ("value", "json_value"),
    [
        (HyperParameters(groups=({"lr": 0.1, "betas": [0.9, 0.99]},)), [{"lr": 0.1, "betas": [0.9, 0.99]}]),
        (Modes(training={"0": True}), {"0": True}),
        (DeclaredGrowth(declared=(ExpectedGrowth(what="buffer"),)), [{"what": "buffer", "bytes": None}]),
    ],
)
def test_what_has_no_keys_of_its_own(value: Struct, json_value: Any) -> None:
    """A table of names, or a list, is the JSON itself."""
    assert to_json(value) == json_value
    assert from_json(type(value), json_value) == value
    assert from_json(type(value), 3) is None


def test_numbers_that_json_lacks() -> None:
    """They come as numbers from a rank, and as texts from a file."""
    for value in (math.inf, "inf"):
        assert from_json(Clip, {"norm": value, "max": 1.0}) == Clip(norm=math.inf, max=1.0)
    found = from_json(Clip, {"norm": "nan", "max": 1})
    assert found is not None
    assert math.isnan(found.norm)
    assert from_json(Clip, {"norm": "large", "max": 1.0}) is None
    assert from_json(Parameters, {"order": ["nan"]}) == Parameters(order=("nan",))


def test_unknown_keys_are_dropped() -> None:
    """A later version may say more."""
    assert from_json(ModuleCall, {**CALL, "temperature": 3}) == from_json(ModuleCall, CALL)


@pytest.mark.parametrize(
    ("damage", "found"),
    [
        ({"class": 3}, None),
        ({"class": None}, None),
        ({"range": [1.0]}, ("range", None)),
        ({"range": [1.0, "x"]}, ("range", None)),
        ({"kinds": "NaN"}, ("kinds", ())),
        ({"kinds": ["NaN", 3]}, ("kinds", ())),
        ({"call": True}, ("call", 0)),
        ({"call": 1.0}, ("call", 0)),
        ({"usual": 1}, ("usual", False)),
    ],
)
def test_a_wrong_type_counts_as_missing(damage: dict[str, Any], found: tuple[str, Any] | None) -> None:
    """The field's default where it has one, nothing at all where it has none."""
    read = from_json(ModuleCall, {**CALL, **damage})
    if found is None:
        assert read is None
    else:
        assert read is not None
        assert getattr(read, found[0]) == found[1]
        assert read.module == "net"


@pytest.mark.parametrize("value", [None, 3, "x", [], [[]], [{}]])
def test_no_table_is_no_detail(value: Any) -> None:
    """And nothing raises."""
    assert from_json(Contract, value) is None
    assert read_detail("contract", value) is None
    assert read_announcement("end", value) is None


def test_endless_nesting_is_not_followed() -> None:
    """JSON may be nested as deeply as somebody likes."""
    text = '{"replay": ' + '{"a": ' * 400 + "1" + "}" * 401
    read = read_detail("numerics", json.loads(text))
    assert isinstance(read, Numerics)
    deep: Any = []
    for _ in range(10_000):
        deep = [deep]
    assert read_announcement("structure:0", {"entries": deep, "digest": "a"}) == Structure(digest="a")


def test_what_is_in_part_damaged_keeps_the_rest() -> None:
    """One bad clip takes the clips with it, not the contract."""
    read = read_detail("contract", {"world": 2, "clips": [{"norm": 1.0, "max": 1.0}, {"norm": None}], "hook": "m.f"})
    assert read == Contract(world=2, hook="m.f")


def test_a_topic_has_the_class_that_fits() -> None:
    """Kinds of one topic are told apart by what they say."""
    assert read_announcement("place", {"node": "a", "local_rank": 1, "metrics": None}) == Place(node="a", local_rank=1)
    assert read_announcement("place", {"gpu_uuid": "GPU-1"}) == Device(gpu_uuid="GPU-1")
    initial = {"step": 0, "kind": "initial", "classes": 10, "loss": 2.3, "location": None}
    assert read_announcement("alone:loss", initial) == InitialLoss(step=0, classes=10, loss=2.3)
    assert read_announcement("alone:loss", {**initial, "kind": "final"}) is None
    assert type(read_announcement("alone:memory", {"failed": True})) is AllocationFailure
    assert type(read_announcement("alone:memory", {"failed": False})) is MemoryState
    assert read_announcement("alone:memory", {"failed": 1}) is None


def test_topics_are_numbered() -> None:
    """On the wire the number stands behind the topic."""
    loader = Loader(sampler="RandomSampler")
    assert topic_text(loader, 3) == "loader:3"
    assert topic_text(loader) == "loader"
    assert read_announcement("loader:3", to_json(loader)) == loader
    assert kinds_of("loader:x") == kinds_of("unknown:1") == kinds_of("unknown") == ()
    assert [scope_of(topic) for topic in ("loader:3", "alone:loss", "alone:failure", "unknown")] == [
        Scope.ALL_RANKS,
        Scope.SHARED,
        Scope.ALONE,
        Scope.ALL_RANKS,
    ]


@pytest.mark.parametrize("topic", TOPICS)
def test_one_topic_one_scope(topic: str) -> None:
    """A value that cannot be read is compared like any other of its topic."""
    assert len({kind.scope for kind in TOPICS[topic]}) == 1
    assert all(issubclass(kind, Announcement) for kind in TOPICS[topic])


def test_what_older_versions_wrote() -> None:
    """Keys that were not there yet have a default."""
    assert read_announcement("end", {"steps": {"0": 3}, "reason": "finished"}) == End(steps={"0": 3}, reason="finished")
    assert read_announcement("alone:failure", {"reason": "exception: X"}) == Failure(reason="exception: X")
    assert read_detail("parameters", {"before": {"w": "a"}}) == Parameters(before={"w": "a"})


def test_evidence_may_hold_them() -> None:
    """A finding is written with their JSON: keys that Python lacks, what has no keys of its own, numbers JSON lacks."""
    held = {
        "modes": Modes(training={"a": True}),
        "hyper": (HyperParameters(groups=({"lr": 0.1},)),),
        "clip": Clip(norm=math.nan, max=1.0),
        "late": UnusedSchedule(class_name="StepLR", length=3),
    }
    found = Finding(code="NUM301", title="t", severity=Severity.ERROR, evidence=held)
    assert json.loads(found.to_json())["evidence"] == {
        "modes": {"a": True},
        "hyper": [[{"lr": 0.1}]],
        "clip": {"norm": "nan", "max": 1.0, "before_sync": False, "location": None},
        "late": {
            "step": None,
            "class": "StepLR",
            "steps": 0,
            "calls": 0,
            "length": 3,
            "left": 0.0,
            "passes": 0,
            "world": None,
            "begins_again": False,
            "cuts": 0,
            "measures": [],
            "location": None,
        },
    }
