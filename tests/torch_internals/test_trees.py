"""Tables of modules and optimizers, read past what the user's classes make of asking."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ddpdebug import torch_internals as internals


class _Refuses(dict[str, Any]):
    def __getitem__(self, key: str) -> Any:
        raise AssertionError(key)

    get = items = __iter__ = __getitem__  # type: ignore[assignment]


class _Model(nn.Linear):
    def __getattr__(self, name: str) -> Any:
        raise AssertionError(name)

    def __bool__(self) -> bool:
        raise AssertionError


class _Asked(torch.optim.SGD):
    def __getattribute__(self, name: str) -> Any:
        if name in {"param_groups", "state"}:
            raise AssertionError(name)
        return super().__getattribute__(name)


def test_groups_and_state_of_an_optimizer() -> None:
    """They are the optimizer's own; a group of a class of the user's comes as a plain dictionary."""
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    groups, state = optimizer.param_groups, optimizer.state
    assert internals.groups(optimizer)[0] is groups[0]
    groups[0] = _Refuses(groups[0])
    optimizer.__class__ = _Asked
    assert [type(group) for group in internals.groups(optimizer)] == [dict]
    assert [p is own for p, own in zip(internals.params(optimizer), model.parameters(), strict=True)] == [True, True]
    assert internals.state(optimizer) is state


class _Kept(torch.optim.Adam):
    @property
    def param_groups(self) -> Any:
        if "asks" in vars(self):
            raise AssertionError("param_groups")
        return vars(self).setdefault("own_groups", [])

    @param_groups.setter
    def param_groups(self, value: Any) -> None:
        self.own_groups = value

    @property
    def state(self) -> Any:
        if "asks" in vars(self):
            raise AssertionError("state")
        return vars(self).setdefault("own_state", {})

    @state.setter
    def state(self, value: Any) -> None:
        self.own_state = value


def test_groups_and_state_that_are_properties() -> None:
    """They are found where the optimizer, or one that it holds, has them; the property is not asked."""
    model = nn.Linear(2, 2)
    optimizer = _Kept(model.parameters(), 0.1)
    assert internals.state(optimizer) == {}
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    optimizer.asks = True  # type: ignore[attr-defined]
    around = torch.optim.SGD([torch.zeros(1)])
    del around.param_groups
    around.__dict__.update(state=None, inner=optimizer, outer=around)
    for one in (optimizer, around):
        assert [p is own for p, own in zip(internals.params(one), model.parameters(), strict=True)] == [True, True]
        assert set(map(id, internals.state(one))) == set(map(id, model.parameters()))
    del around.inner
    assert (internals.groups(around), internals.state(around)) == ([], {})


def test_the_model_inside_of_a_compiled_one() -> None:
    """No other model is asked for it, not even one whose table of children is no dictionary."""
    model, scripted = nn.Linear(2, 2), torch.jit.script(nn.Sequential(nn.Linear(2, 2)))
    compiled: Any = torch.compile(model, backend="eager")
    assert internals.unwrap_compiled(compiled) is model
    assert internals.unwrap_compiled(scripted) is scripted
    hostile = nn.Linear(2, 2)
    hostile.__class__ = _Model
    assert internals.unwrap_compiled(hostile) is hostile
    assert internals.ignored_names(hostile) == frozenset()
