from __future__ import annotations

import gc
import sys

import pytest

from ddpdebug.isolation.weak_table import WeakTable


class Refusing:
    """What no dictionary takes for a key."""

    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        raise AssertionError("compared")


def test_objects_that_are_no_keys_are_told_apart() -> None:
    one, two, table = Refusing(), Refusing(), WeakTable[int]()
    table[one], table[two] = 1, 2
    table[one] = 3
    other = Refusing()
    assert table.get(one) == 3
    assert table.get(two) == 2
    assert table.get(other) is None
    assert one in table
    assert other not in table
    assert table.pop(two) == 2
    assert table.pop(two) is None
    assert table.values() == [3]
    assert [id(thing) for thing in table.things()] == [id(one)]


@pytest.mark.parametrize("in_a_circle", [False, True])
def test_an_object_takes_its_value_along_and_no_code_in_python_runs(in_a_circle: bool) -> None:
    table, calls = WeakTable[str](), list[str]()
    thing = Refusing()
    if in_a_circle:
        thing.own = thing  # type: ignore[attr-defined]
    table[thing] = "first"
    table[thing] = "second"
    gc.collect()  # what other tests have left has callbacks of its own
    sys.setprofile(lambda frame, event, _: calls.append(frame.f_code.co_name) if event == "call" else None)
    try:
        del thing
        gc.collect()
    finally:
        sys.setprofile(None)
    assert table.values() == []
    assert "pop" not in calls
    assert not [name for name in calls if "gone" in name]
