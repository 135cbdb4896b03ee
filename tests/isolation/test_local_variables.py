"""Local variables are read as they are, and nothing of that shows."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterator
from types import FrameType
from typing import Any

import torch

from ddpdebug.isolation.local_variables import local_values


def _own() -> FrameType:
    return sys._getframe(1)


def _all_kinds(first: int, inner: int, *args: int, named: int = 4, **more: int) -> Any:  # no `assert`: pytest's is code
    plain = [first]

    def below(own: int) -> Any:
        inside = inner + own
        if own < 0:
            unbound = 1
        del own
        found = local_values(_own())
        return found, (inside, lambda: unbound)

    return local_values(_own()), below(1)[0], (plain, args, named, more)


def test_every_kind_of_variable_is_read() -> None:
    """Arguments, those that inner functions use, variables of outer functions; not what has no value (yet)."""
    own, below, _ = _all_kinds(1, 2, 3, named=5, other=6)
    below_it = own.pop("below")
    assert callable(below_it)
    assert own == {"first": 1, "inner": 2, "args": (3,), "named": 5, "more": {"other": 6}, "plain": [1]}
    assert below == {"inside": 3, "inner": 2}


def test_a_function_that_has_ended() -> None:
    """The variables of a traceback's functions are read, until the traceback is cleared."""

    def fail(value: int) -> None:
        twice = 2 * value
        raise ValueError(twice)

    try:
        fail(4)
    except ValueError as error:
        trace = error.__traceback__
    assert trace is not None
    assert trace.tb_next is not None
    frame = trace.tb_next.tb_frame
    assert local_values(frame) == {"value": 4, "twice": 8}
    frame.clear()
    assert local_values(frame) == {}


def test_a_generator() -> None:
    """The variables of a generator are read while it waits."""

    def count(start: int) -> Iterator[int]:
        second = start + 1
        yield start
        yield second

    generator: Any = count(3)
    assert local_values(generator.gi_frame) in ({"start": 3}, {})  # Python 3.11 has not begun it
    next(generator)
    assert local_values(generator.gi_frame) == {"start": 3, "second": 4}


def _lets_go() -> tuple[Any, list[str]]:
    tensor = torch.ones(3)
    ref = weakref.ref(tensor)
    read = list(local_values(_own()))
    del tensor
    return ref, read


def test_what_is_let_go_is_gone() -> None:
    """A tensor that a function lets go of does not live on because its variables were read."""
    ref, read = _lets_go()
    assert read == ["tensor", "ref"]
    assert ref() is None


def _keeps() -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    kept = _own().f_locals
    before = dict(kept)
    later = 1
    read = local_values(_own())
    after = dict(kept)
    kept["note"] = later
    local_values(_own())
    return before, after, {"read": set(read), "note": kept.get("note")}


def test_a_dictionary_that_somebody_has_stays_as_it_is() -> None:
    """Neither emptied nor brought up to date, as asking for it would."""
    before, after, found = _keeps()
    assert found["read"] >= {"kept", "before", "later"}
    if sys.version_info < (3, 13):  # a view from then on
        assert before == after
    assert found["note"] == 1


def test_a_trace_function_sees_nothing_of_it() -> None:
    """While something traces or profiles, variables are read as well."""

    def read(value: int) -> tuple[int, Any]:
        return value, local_values(_own())

    sys.setprofile(lambda *_: None)
    try:
        found = read(3)
    finally:
        sys.setprofile(None)
    assert found == (3, {"value": 3})


def test_a_module_has_no_variables_of_its_own() -> None:
    """Those of a module or class body are globals or attributes."""
    found: dict[str, Any] = {"local_values": local_values, "_own": _own}
    exec("value = 1\nread = local_values(_own())", found)
    assert found["read"] == {}
