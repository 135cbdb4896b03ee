"""Nested containers are read without their classes' code, and made anew with other values."""

from __future__ import annotations

import collections
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

from ddpdebug.nested import cloned, mapped, parts_of, tensors_in, tensors_in_objects


class Pair(NamedTuple):
    """Two values."""

    one: Any
    other: Any


@dataclass
class Batch:
    """Named values."""

    x: Any
    y: Any = None


@dataclass(slots=True)
class Slotted:
    """Named values without a dictionary."""

    x: Any


class Output(collections.OrderedDict):  # type: ignore[type-arg]  # of anything
    """As `transformers` returns it: a dictionary that is a data class as well."""

    __dataclass_fields__ = {"logits": None, "loss": None}  # noqa: RUF012 - as the decorator makes it


class Refusing(dict):  # type: ignore[type-arg]  # of anything
    """Lets nobody iterate."""

    def __iter__(self) -> Any:
        raise RuntimeError("not for you")

    keys = values = items = __len__ = __iter__


def t(value: float) -> torch.Tensor:
    return torch.tensor(value)


def numbers(tensors: Any) -> list[float]:
    return [float(tensor) for tensor in tensors]


def test_tensors_are_found_in_order() -> None:
    """In every kind of container, and nowhere else."""
    value = {"a": [t(1), (t(2), "text", Pair(t(3), None))], "b": Batch(t(4), {"c": Slotted(t(5))}), 3: None}
    assert numbers(tensors_in(value)) == numbers(tensors_in_objects(value)) == [1, 2, 3, 4, 5]
    output = Output()
    output.logits = t(6)
    assert numbers(tensors_in([output])) == [6]
    assert tensors_in(SimpleNamespace(x=t(1))) == []
    assert numbers(tensors_in_objects((SimpleNamespace(x=t(1), y=[t(2)]), slice(t(3), None)))) == [1, 2, 3]
    assert list(tensors_in_objects(torch.nn.Linear(1, 1))) == []


def test_no_code_of_a_container_runs() -> None:
    """What refuses to be iterated is read all the same."""
    value = Refusing(a=t(1), b=[t(2)])
    assert numbers(tensors_in(value)) == numbers(tensors_in_objects([value])) == [1, 2]
    assert [place for place, _ in parts_of(value) or ()] == ["['a']", "['b']"]


def test_a_container_that_holds_itself() -> None:
    """The walk ends."""
    value: list[Any] = [t(1)]
    value.append(value)
    assert set(numbers(tensors_in(value))) == set(numbers(tensors_in_objects(value))) == {1}
    assert numbers(tensors_in(mapped(value, lambda item: item))) == numbers(tensors_in(value))


def test_places_are_written_as_in_python() -> None:
    """Keys that are objects are left out of the text."""
    assert [place for place, _ in parts_of({"a": 1, object(): 2}) or ()] == ["['a']", "[...]"]
    assert [place for place, _ in parts_of(Pair(1, 2)) or ()] == [".one", ".other"]
    assert [place for place, _ in parts_of(Batch(1)) or ()] == [".x", ".y"]
    assert parts_of("text") is None


def test_values_are_replaced() -> None:
    """Containers keep their kinds; those of other classes are values, unless they are asked for."""

    def double(item: Any) -> Any:
        return 2 * item if isinstance(item, int) else item

    value = {"a": [1, (2,)], "b": Pair(3, collections.OrderedDict(c=4))}
    assert mapped(value, double) == {"a": [2, (4,)], "b": Pair(6, collections.OrderedDict(c=4))}
    found = mapped((value, slice(1, 5), torch.Size([3])), double, kinds=True)
    assert found == ({"a": [2, (4,)], "b": Pair(6, {"c": 8})}, slice(2, 10), torch.Size([3]))
    assert type(found[0]["b"].other) is collections.OrderedDict


def test_a_class_whose_constructor_takes_something_else() -> None:
    """Its values come in a plain dictionary."""

    class Own(dict):  # type: ignore[type-arg]  # of anything
        def __init__(self, *, size: int) -> None:
            super().__init__(x=size)

    assert mapped(Own(size=3), lambda item: item + 1, kinds=True) == {"x": 4}


@pytest.mark.parametrize("wanted", [True, False])
def test_copies_want_gradients_as_before(wanted: bool) -> None:
    """And are on memory of their own, without a graph."""
    leaf = torch.ones(2, requires_grad=wanted)
    found = cloned([leaf, (leaf * 2,)])
    assert found[0].requires_grad == wanted
    assert found[1][0].grad_fn is None
    assert torch.equal(found[0], leaf)
    assert found[0].data_ptr() != leaf.data_ptr()
