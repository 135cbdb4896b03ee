"""What is told of tensors in plain attributes."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.fx
from torch import nn

from ddpdebug.probes.constants import Settings
from ddpdebug.schema.announcements import Constants, Numbers, Precision


class Embedding(nn.Module):
    """Computes with a table that is no buffer, and keeps what it made last."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.linspace(0, 1, 8).view(2, 4)
        self.steps = torch.arange(4)
        self.scales = [torch.ones(3), 2.0]
        self.register_buffer("mean", torch.zeros(2))
        self.last = torch.zeros(2, 4)
        self.count = torch.zeros(2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.last = x @ self.table
        self.count += 1
        return self.last * self.scales[1] if self.scales else self.last


def told(model: nn.Module, forwards: int) -> Mapping[str, str]:
    """Return the constants that are announced over some forwards, after the precision."""
    settings, facts = Settings(model), []
    for _ in range(forwards):
        facts += settings.at_forward(model)
        model(torch.ones(3, 2))
    precision, constants = [fact for fact in facts if not isinstance(fact, Numbers)]
    assert isinstance(precision, Precision)
    assert isinstance(constants, Constants)
    return constants.tensors


def test_only_what_forward_leaves_alone_is_a_constant() -> None:
    """Buffers, integers, results and running values are no constants; the table and the list's tensor are."""
    assert set(told(nn.Sequential(Embedding()), 12)) == {"0.table", "0.scales[0]"}


@pytest.mark.parametrize("same", [True, False])
def test_equal_tables_look_equal(same: bool) -> None:
    """What is told depends on the values, not on where they are."""
    models = Embedding(), Embedding()
    if not same:
        models[1].table[0, 0] += 1
    tables = [told(model, 9)["table"] for model in models]
    assert (tables[0] == tables[1]) is same


def test_a_forward_that_changed_its_table_ends_the_comparison() -> None:
    """A table written once after wrapping is none of the constants any more."""
    model = Embedding()
    settings = Settings(model)
    model.table.mul_(2)
    _, constants = [fact for _ in range(9) for fact in settings.at_forward(model)]
    assert isinstance(constants, Constants)
    assert set(constants.tensors) == {"scales[0]", "last", "count"}


class Loud(torch.Tensor):
    """A tensor that runs the user's code for whatever it is asked."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise RuntimeError


def test_what_is_not_looked_at() -> None:
    """Other classes of tensor, what has no name that the ranks share, and what is too long."""
    model = Embedding()
    model.forward = lambda x: (model.loud, model.by_object, model.vocabulary, model.scales, x @ model.table)  # type: ignore[method-assign, assignment, return-value]
    model.loud = torch.ones(2).as_subclass(Loud)  # type: ignore[assignment]
    model.by_object = {object(): torch.ones(2), "key": torch.ones(2)}  # type: ignore[assignment]
    model.vocabulary = [torch.ones(2)] * 2000  # type: ignore[assignment]
    assert set(told(model, 9)) == {"table", "scales[0]", "by_object['key']"}


def scaled(model: Pictures, x: torch.Tensor) -> torch.Tensor:
    """Compute with an attribute of a model, outside of its class."""
    return x * model.scale


class Pictures(nn.Module):
    """Has tensors that training never reads, and some that it reads in every way but by a computed name."""

    def __init__(self) -> None:
        super().__init__()
        self.validation_z = torch.randn(3, 2)  # only an evaluation reads it
        self.scale, self.bias, self.mask, self.gain = torch.ones(2), torch.ones(2), torch.ones(2), torch.ones(2)

    @property
    def shift(self) -> torch.Tensor:
        """Read by way of a property."""
        return self.bias

    def _masked(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([t * self.mask for t in x])

    @torch.no_grad()
    def _gained(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.gain

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._gained(self._masked(scaled(self, x)) + self.shift)

    def on_validation_end(self) -> torch.Tensor:
        """Draw pictures."""
        return self(self.validation_z)


def test_a_tensor_that_training_does_not_read_is_none_of_the_constants() -> None:
    """Whichever way the forward reads one; where it computes names, each counts as read."""
    assert set(told(Pictures(), 9)) == {"scale", "bias", "mask", "gain"}
    model = Pictures()
    forward = model.forward
    model.forward = lambda x: getattr(model, "ga" + "in") * forward(x)  # type: ignore[method-assign]
    assert "validation_z" in told(model, 9)


class Derived(Embedding):
    """Reads by way of `super`, of a cached property, and of a method with a decorator."""

    def __init__(self) -> None:
        super().__init__()
        self.seed, self.more, self.never = torch.ones(2), torch.ones(2), torch.ones(2)

    @functools.cached_property
    def shift(self) -> torch.Tensor:
        """Made once."""
        return 2 * self.seed

    @functools.lru_cache(maxsize=1)  # noqa: B019 - as people do
    def _more(self) -> torch.Tensor:
        return self.more

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x + self.shift + self._more())


def test_what_is_inherited_and_what_is_cached_is_read() -> None:
    """The forward of a base class is one of them."""
    assert set(told(Derived(), 9)) == {"table", "scales[0]", "seed", "more"}


def test_code_that_belongs_to_no_module() -> None:
    """What torch.fx makes has no name of a module; it is followed like any other."""
    model = nn.Sequential(torch.fx.symbolic_trace(nn.Linear(2, 2)))
    model[0].offset = torch.ones(2)
    assert told(model, 9) == {}


def test_a_forward_that_leads_to_another_method() -> None:
    """As trainers do who run a whole training step inside of the wrapper's forward."""

    class Inner(Pictures):
        def on_validation_end(self) -> torch.Tensor:
            return self.validation_z

    model = Inner()
    inside = model.on_validation_end
    model.forward = lambda x: (inside(), x)[1]  # type: ignore[method-assign]
    assert set(told(model, 9)) == {"validation_z"}


class Answering(dict[str, Any]):
    """What configurations are kept in: whatever it is asked for is there from then on."""

    def __getattr__(self, name: str) -> Any:
        return self.setdefault(name, Answering())

    @property
    def __class__(self) -> Any:
        """As a proxy has it."""
        return type(self.setdefault("class", Answering()))

    @__class__.setter
    def __class__(self, kind: Any) -> None:
        raise TypeError(kind)


CONFIGURATION = Answering(width=2)


class Configured(nn.Module):
    """Reads an object that is none of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale * CONFIGURATION["width"]


def test_nothing_of_the_users_objects_runs() -> None:
    """What the code of a forward names is looked at from outside."""
    model = Configured()
    for name in set(dict.keys(CONFIGURATION)) - {"width"}:  # whoever collects tests has asked for these
        del CONFIGURATION[name]
    settings, found = Settings(model), []
    for number in range(16):
        model.scale = 1.0 + (number > 4)
        found += [fact.changes for fact in settings.at_forward(model, number) if isinstance(fact, Numbers)]
    assert any("scale" in changes for changes in found)
    assert set(dict.keys(CONFIGURATION)) == {"width"}


class Scored(nn.Module):
    """Computes with numbers: of the class, of the object, of a layer of torch; notes others as it runs."""

    slope = 2.0

    def __init__(self) -> None:
        super().__init__()
        self.temperature, self.shown, self.calls, self.largest = 0.5, 1.0, 0, 0.0
        self.drop = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.largest = max(self.largest, float(x.max()))
        return self.drop(x) * self.slope / self.temperature + self.largest * 0


def test_numbers_that_a_forward_reads_and_others_set_are_told_with_the_step_of_their_change() -> None:
    """What the forward writes itself, and what it does not read, is none of these."""
    model = Scored()
    settings, found = Settings(model), []
    for number in range(32):
        if number == 11:
            model.temperature, model.slope, model.drop.p, model.shown = 0.1, 3.0, 0.4, 7.0
        facts = settings.at_forward(model, number)
        found += [fact.changes for fact in facts if isinstance(fact, Numbers)]
        model(torch.rand(3, 2))
    changes = [own for own in found if own]
    assert len(found) > len(changes) == 1
    told = {name: (change.was, change.value, change.step, change.times) for name, change in changes[0].items()}
    assert told == {
        "temperature": (0.5, 0.1, 11, 1),
        "slope": (2.0, 3.0, 11, 1),
        "drop.p": (0.1, 0.4, 11, 1),
    }


class _OfDecorators(nn.Module):
    """Its forward leads to a function that refers to itself, and to a second one of the same code."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.ones(2)
        self.other = torch.ones(2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _twice(self, _again(x))


def _calling(function: Any) -> Any:
    def call(*args: Any) -> Any:
        return function(*args) if args else call

    return call


_again = _calling(lambda x: x)
_twice = _calling(lambda module, x: x * module.table)


@pytest.mark.timeout(60)
def test_functions_that_refer_to_themselves_come_to_an_end() -> None:
    """A closure in a circle is read once; of two functions with one code both are."""
    assert set(told(_OfDecorators(), 12)) == {"table"}
