"""The search names who keeps tensors, and runs nothing of the user's."""

from __future__ import annotations

import sys
import weakref
from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from ddpdebug.forensics.memory import holders
from ddpdebug.forensics.memory.holders import MAX_VISITS, search
from ddpdebug.schema.wire import to_json

_ON_MODULE: list[torch.Tensor] = []


@pytest.fixture(autouse=True)
def _one_script(monkeypatch: pytest.MonkeyPatch) -> None:
    """What other test modules hold is no part of the job that is searched."""
    monkeypatch.setattr(holders, "sys", SimpleNamespace(modules={__name__: sys.modules[__name__]}))


def _graph() -> torch.Tensor:
    return torch.ones(3, requires_grad=True) * 2


def _best(known: set[int] | None = None) -> dict[str, Any]:
    found = to_json(search(known or set(), sys._getframe(1)))["holders"]
    assert found
    return found[0]  # its JSON: pytest looks at the variables of a function that asserts about attributes


def test_a_list_in_a_function() -> None:
    """Its name, size and function, and the line that fills it."""
    losses = []
    for _ in range(20):
        losses.append(_graph())  # noqa: PERF401
    line = sys._getframe().f_lineno - 1
    found = _best()
    assert (found["name"], found["kind"], found["entries"]) == ("losses", "list", 20)
    assert found["function"] == "test_a_list_in_a_function"
    assert found["location"].endswith(f"test_holders.py:{line}")
    assert found["tensors"] == 20


def test_a_sum() -> None:
    """One tensor keeps the graphs of all the passes that went into it."""
    layer, total = nn.Linear(3, 1), torch.zeros(())
    for _ in range(15):
        total = total + layer(torch.ones(2, 3)).sum()
    line = sys._getframe().f_lineno - 1
    found = _best({id(p) for p in layer.parameters()})
    assert (found["name"], found["kind"], found["graphs"]) == ("total", "Tensor", 15)
    assert found["location"].endswith(f":{line}")


def test_a_dictionary_of_lists() -> None:
    """The key is part of the name."""
    metrics: dict[str, list[torch.Tensor]] = {"loss": [], "accuracy": []}
    for _ in range(9):
        metrics["loss"].append(_graph())
    assert _best()["name"] == "metrics['loss']"


class _Trainer:
    def __init__(self) -> None:
        self.history: deque[Any] = deque()

    def log(self, value: torch.Tensor) -> None:
        self.history.append((0, {"value": value}))

    @property
    def trap(self) -> None:
        raise AssertionError("a property must not run")

    def __len__(self) -> int:
        raise AssertionError("nothing of the class may run")


def test_an_attribute() -> None:
    """Found below the object, at the line of the method that fills it, through tuples and dictionaries."""
    trainer = _Trainer()
    for _ in range(12):
        trainer.log(_graph())
    found = _best()
    assert (found["name"], found["kind"], found["entries"]) == ("trainer.history", "deque", 12)
    assert found["location"].endswith(f":{_Trainer.log.__code__.co_firstlineno + 1}")


def test_the_closure_of_a_hook() -> None:
    """A hook's variable that no running function has."""
    model = nn.Linear(3, 3)

    def watch() -> None:
        features = []
        model.register_forward_hook(lambda module, inputs, output: features.append(output))

    watch()
    for _ in range(10):
        model(torch.ones(2, 3))
    found = _best({id(p) for p in model.parameters()})
    assert found["name"] == "features"
    assert found["tensors"] == 10


def test_a_kept_exception() -> None:
    """Its traceback keeps the variables of the function that raised."""
    errors = []

    def fail() -> None:
        outputs = _graph()
        raise ValueError(len(outputs))

    for _ in range(8):
        try:
            fail()
        except ValueError as error:
            errors.append(error)
    found = _best()
    assert (found["name"], found["tensors"]) == ("errors (tracebacks)", 8)


def test_a_global() -> None:
    """Of the user's modules."""
    _ON_MODULE.extend(_graph() for _ in range(30))
    try:
        assert _best()["name"] == "_ON_MODULE"
    finally:
        _ON_MODULE.clear()


def test_known_tensors_are_left_out() -> None:
    """Parameters and their like are meant to stay."""
    parameters = [_graph() for _ in range(10)]
    names = [holder["name"] for holder in to_json(search(set(map(id, parameters)), sys._getframe()))["holders"]]
    assert "parameters" not in names


@pytest.mark.smoke
def test_a_million_objects() -> None:
    """The holder is found behind them, and the number of visits is bounded."""

    def job() -> tuple[dict[str, Any], int]:  # no `assert` in it: pytest writes `locals()` there
        records = [{"number": [i]} for i in range(333_000)]
        store = {"records": records, "losses": [_graph() for _ in range(3000)]}
        return to_json(search(set(), sys._getframe())), len(store["records"])

    result, count = job()
    assert count == 333_000
    assert result["visits"] <= MAX_VISITS
    assert result["holders"][0]["name"] == "store['losses']"
    assert result["holders"][0]["entries"] == 3000


def test_the_search_keeps_nothing_alive() -> None:
    """Reading a function's variables does not make them live longer."""

    class Thing:
        pass

    thing = Thing()
    gone = weakref.ref(thing)
    search(set(), sys._getframe())
    del thing
    assert gone() is None
