"""Dropout that runs in eval mode is found where it is called, and what looks for it leaves no trace."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.functional import dropout as imported

from ddpdebug.detectors.rcp.rcp820_eval_not_deterministic import EvalNotDeterministic
from ddpdebug.isolation.guard import Guard
from ddpdebug.probes.recipe.chance import FORWARDS, Chance

GUARD = Guard(lambda part, message: pytest.fail(f"{part}: {message}"))


class Net(nn.Module):
    """A layer whose output goes through what a test gives."""

    def __init__(self, inside: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.drop, self.inside = nn.Linear(4, 4), nn.Dropout(0.5), inside

    def forward(self, x: Tensor) -> Tensor:
        kept = x
        x = self.inside(self, self.layer(x))
        return x + kept.sum()


def evaluate(net: nn.Module, times: int = 4) -> list[dict[str, Any]]:
    """Return what is told of some forwards; each gives what it gives without us."""
    chance, told = Chance(GUARD), []
    x = torch.randn(3, 4)
    for seed in range(times):
        torch.manual_seed(seed)
        expected = net(x), torch.default_generator.get_state()
        torch.manual_seed(seed)
        chance.begin(net)
        got = net(x)
        told += chance.end(net)
        assert torch.equal(got, expected[0])
        assert torch.equal(torch.default_generator.get_state(), expected[1])
        assert sys.getprofile() is None
    return told


def attention(_: nn.Module, x: Tensor) -> Tensor:
    return functional.scaled_dot_product_attention(x[None], x[None], x[None], dropout_p=0.3)[0]


@pytest.mark.parametrize(
    "inside, function, p",
    [
        (lambda _, x: functional.dropout(x, 0.2), "dropout", 0.2),
        (lambda _, x: imported(x), "dropout", 0.5),
        (lambda _, x: functional.dropout1d(x[None], p=0.25)[0], "dropout1d", 0.25),
        (lambda _, x: functional.alpha_dropout(x, 0.1, training=True), "alpha_dropout", 0.1),
        (attention, "scaled_dot_product_attention", None),
    ],
)
def test_active_functions_are_named(inside: Any, function: str, p: float | None) -> None:
    """Whatever name it was imported by, the function is told with the module and the line that call it."""
    first = evaluate(Net(inside).eval())[0]
    assert (first["function"], first["p"], first["module"]) == (function, p, "(model)")
    assert first["location"].startswith("tests/probes/test_recipe_chance.py:")


def test_the_innermost_module_is_named() -> None:
    """The path is that of the module whose forward makes the call, through helper functions."""
    net = nn.Sequential(nn.Linear(4, 4), Net(lambda _, x: functional.dropout(x, 0.2))).eval()
    assert evaluate(net)[0]["module"] == "1"


@pytest.mark.parametrize(
    "inside",
    [
        lambda self, x: functional.dropout(x, 0.2, self.training),
        lambda self, x: functional.dropout(x, 0.0),
        lambda self, x: self.drop(x),
        lambda self, x: x + torch.rand_like(x),  # a model that samples
        lambda self, x: functional.alpha_dropout(x),  # its default is False
    ],
)
def test_what_is_right_is_let_pass(inside: Any) -> None:
    """Functions that are told the mode, modules, and other draws are no finding."""
    assert evaluate(Net(inside).eval(), FORWARDS + 2) == []


def test_monte_carlo_dropout_is_let_pass() -> None:
    """A dropout module that was put into train mode alone draws on purpose."""
    net = Net(lambda self, x: self.drop(x)).eval()  # type: ignore[operator]
    net.drop.train()
    assert evaluate(net) == []


def broken(_: nn.Module, x: Tensor) -> Tensor:
    functional.dropout(x)
    raise RuntimeError("no")


def test_nothing_stays_behind_when_forward_raises() -> None:
    """The profile function is taken away; one of the user's is never replaced."""
    chance, net, fail = Chance(GUARD), Net(lambda _, x: functional.dropout(x)).eval(), [False]
    inside, net.inside = net.inside, lambda self, x: broken(self, x) if fail[0] else inside(self, x)
    chance.begin(net)
    net(torch.zeros(2, 4))
    chance.end(net)
    fail[0] = True
    chance.begin(net)
    assert sys.getprofile() is not None
    with pytest.raises(RuntimeError, match="no"):
        net(torch.zeros(2, 4))
    chance.release()
    assert sys.getprofile() is None


@pytest.fixture
def profiled() -> Iterator[Any]:
    def own(*_: Any) -> None:
        return None

    sys.setprofile(own)
    yield own
    sys.setprofile(None)


def test_a_profiler_of_the_user_is_left_in_place(profiled: Any) -> None:
    """While the user profiles nothing is followed."""
    chance, net = Chance(GUARD), Net(lambda _, x: functional.dropout(x)).eval()
    for _ in range(3):
        chance.begin(net)
        net(torch.zeros(2, 4))
        assert chance.end(net) == []
        assert sys.getprofile() is profiled


def test_a_profiler_that_hides_is_left_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """That of yappi is not seen by `sys.getprofile`, and would see nothing any more."""
    running = [True]
    monkeypatch.setitem(sys.modules, "yappi", SimpleNamespace(is_running=lambda: running[0]))
    chance, net = Chance(GUARD), Net(lambda _, x: functional.dropout(x)).eval()
    for _ in range(3):
        chance.begin(net)
        assert sys.getprofile() is None
        net(torch.zeros(2, 4))
        assert chance.end(net) == []
    running[0] = False
    chance.begin(net)
    net(torch.zeros(2, 4))
    assert chance.end(net) != []


def test_the_finding_names_every_call() -> None:
    """Who mends one line would meet the next in the next run."""
    fact = {"step": 4, "function": "dropout", "location": "m.py:3", "module": "a", "others": ["dropout at m.py:9"]}
    (finding,) = EvalNotDeterministic().compare("alone:chance", {0: fact})
    assert finding.evidence["others"] == ["dropout at m.py:9"]
