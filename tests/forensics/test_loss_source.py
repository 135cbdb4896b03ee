"""The line of an operation of the loss is read from the source, and nothing of it runs."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import CodeType
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from ddpdebug.forensics.loss.loss_graph import explain_loss, watch_backward
from ddpdebug.forensics.loss.loss_source import Place, best_fits, place_of
from ddpdebug.isolation.guard import Guard
from ddpdebug.isolation.user_code import location, user_frame
from ddpdebug.probes.forward_capture import ForwardCaptures

GUARD = Guard(lambda part, message: pytest.fail(f"{part}: {message}"))

_LINES = Path(__file__).read_text(encoding="utf-8").splitlines()


class Model(nn.Module):
    """Has operations of its own, which are not the loss's."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(self.linear(x)).sqrt().clamp_min(1e-3).log().exp()


class Loss:
    """Stands for a loss tensor: `backward` says where its bad operation stands."""

    def __init__(self, value: torch.Tensor, case: Case) -> None:
        self._value, self._case = value, case

    def backward(self) -> None:
        frame = user_frame(sys._getframe(1))
        capture = self._case.captures.current[-1]

        def tell(found: dict[str, Any]) -> None:
            self._case.node = found["node"]
            at = self._case.called_at
            models, caller = [self._case.model], self._case.caller
            self._case.place = place_of(frame, found["nodes"], found["index"], models, at, caller)

        found = explain_loss(self._value, capture.after)
        if found is not None:
            tell(found)
        else:
            watch_backward(self._value, capture.after, Guard(lambda *text: pytest.fail(str(text))), tell)
            self._value.backward()


class Case:
    """A model that has run, and what its loss is told."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.captures, self.model = ForwardCaptures(GUARD), Model()
        self.place: Place | None = None
        self.node = ""
        self.called_at: tuple[str, int] | None = None
        self.caller: tuple[CodeType, dict[str, Any]] | None = None

    def run(self) -> torch.Tensor:
        x = torch.randn(5, 4)
        self.captures.begin(self.model, (x,), {}, 0)
        output: torch.Tensor = self.model(x)
        self.captures.end(self.model, output)
        return output

    def lines(self) -> list[str]:
        """Return the marks of the lines that were found: each case marks its own with a comment."""
        assert self.place is not None
        numbers = [int(line.rpartition(":")[2]) for line in self.place.lines]
        return [_LINES[number - 1].rpartition("# ")[2] for number in numbers]


def entropy(p: torch.Tensor) -> torch.Tensor:
    """Is called by others."""
    return -(p * p.log()).sum(1)  # log of entropy


def two_logs(output: torch.Tensor) -> torch.Tensor:
    """Is fine in its first logarithm and not in its second."""
    first = output.log().mean()  # first log
    rest = (output - output).abs()
    return first + rest.log().sum()  # second log


class Criterion(nn.Module):
    """Has a part of torch's and a helper."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleDict({"nll": nn.CrossEntropyLoss(reduction="none")})

    @property
    def danger(self) -> float:
        raise AssertionError("this must not run")

    def forward(self, output: torch.Tensor, target: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        nats = self.parts["nll"](output, target)
        return self.mean(nats, weights) / 4

    @staticmethod
    def mean(nats: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return (nats * weights).sum() / weights.sum()  # weighted mean


class Straight(torch.autograd.Function):
    """Has a backward that divides by zero."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return gradient / 0


def in_a_helper(case: Case) -> None:
    """One function deep."""
    output = case.run()
    loss = Loss(entropy(output * 0).mean(), case)
    loss.backward()


def the_second_of_two(case: Case) -> None:
    """Both have the same node."""
    loss = Loss(two_logs(case.run()), case)
    loss.backward()


def in_a_module(case: Case) -> None:
    """Found through the module's tables, its property untouched."""
    criterion = Criterion()
    output, target = case.run(), torch.tensor([0, 1, 2, 0, 1])
    loss = Loss(criterion(output, target, torch.zeros(5)), case)
    loss.backward()


def in_a_statement_before(case: Case) -> None:
    """The assignment of the loss only adds up."""
    for _ in range(2):
        output = case.run()
        nothing = output[output > 1e9].mean()  # mean of nothing
        scale = output.square().mean()
        loss = Loss(nothing + scale, case)
        loss.backward()


def handed_in(case: Case) -> None:
    """The backward is called by a helper."""

    def step(loss: Loss) -> None:
        loss.backward()

    output = case.run()
    step(Loss(functional.cross_entropy(output, torch.full((5,), -100)), case))  # everything ignored


def bad_gradient(case: Case) -> None:
    """The loss is finite."""
    output = case.run()
    squared = (output - output.detach()).pow(2).sum(1)
    distance = squared.sqrt()  # root of zero
    loss = Loss(distance.mean() + squared.sum(), case)
    loss.backward()


def own_function(case: Case) -> None:
    """A custom function is named by its class."""
    output = case.run()
    straight = Straight.apply(output.sum())  # type: ignore[no-untyped-call]  # own function
    loss = Loss(straight * 2, case)
    loss.backward()


def partly_bound(case: Case) -> None:
    """A partial has its function inside."""
    criterion = partial(entropy)
    loss = Loss(criterion(case.run() * 0).mean(), case)
    loss.backward()


def in_a_loop(case: Case) -> None:
    """Sample by sample; what comes after the loop divides as well."""
    output, total, empty = case.run(), torch.zeros(()), torch.zeros((), dtype=torch.long)
    for number, row in enumerate(output):
        count = empty if number == 3 else len(row)
        total = total + row.exp().sum() / count  # one that is empty
    total = total / len(output)
    loss = Loss(total, case)
    loss.backward()


def beside_an_optimizer(case: Case) -> None:
    """Optimizers multiply as well, and so may what follows on the line of backward."""
    output = case.run()
    optimizer = torch.optim.SGD(case.model.parameters(), 0.1)
    loss = output.square().mean()
    if output.numel():
        loss = loss * float("nan")  # not a number
    optimizer.zero_grad(), Loss(loss, case).backward(), optimizer.step(), loss * 2  # type: ignore[func-returns-value]


def in_a_trainers_step(case: Case) -> None:
    """The loss is returned to a trainer, which calls backward; the user's code only calls the trainer."""
    trainer: dict[str, Any] = {"Loss": Loss}
    exec(compile("def train(step, case): Loss(step() / 2, case).backward()", "<a trainer's>", "exec"), trainer)

    def compute_loss() -> torch.Tensor:
        before = torch.ones(3).log()
        frame = sys._getframe()
        case.called_at, case.caller = (frame.f_code.co_filename, frame.f_lineno), (frame.f_code, frame.f_globals)
        kept = case.run().sum(1) * 0
        total = kept.log().sum()  # log of nothing
        return total + before.sum()

    unlike = torch.ones(3).log()
    trainer["train"](compute_loss, case)
    assert unlike.sum() == 0


@pytest.mark.parametrize(
    ("make", "node", "line"),
    [
        (in_a_helper, "LogBackward0", "log of entropy"),
        (the_second_of_two, "LogBackward0", "second log"),
        (in_a_module, "DivBackward0", "weighted mean"),
        (in_a_statement_before, "MeanBackward0", "mean of nothing"),
        (handed_in, "NllLossBackward0", "everything ignored"),
        (bad_gradient, "SqrtBackward0", "root of zero"),
        (own_function, "StraightBackward", "own function"),
        (partly_bound, "LogBackward0", "log of entropy"),
        (in_a_loop, "DivBackward0", "one that is empty"),
        (beside_an_optimizer, "MulBackward0", "not a number"),
        (in_a_trainers_step, "LogBackward0", "log of nothing"),
    ],
)
def test_line(make: Callable[[Case], None], node: str, line: str) -> None:
    """One line fits, and it is the right one."""
    case = Case()
    make(case)
    assert (case.node, case.lines()) == (node, [line])
    assert case.place is not None
    assert case.place.fields()["location"] == case.place.lines[0]


def test_several_lines_that_fit_are_all_named() -> None:
    """Which branch ran is not guessed."""
    case = Case()
    output = case.run()
    entry = (
        (output * 0).log().sum()  # one branch
        if output.numel() > 1
        else torch.log(0 * output).sum()  # other branch
    )
    loss = Loss(entry, case)
    loss.backward()
    assert case.lines() == ["one branch", "other branch"]
    assert case.place is not None
    assert case.place.fields() == {"location": None, "candidates": case.place.lines}


def test_an_operation_in_code_that_cannot_be_read_is_not_taken_for_another() -> None:
    """Most of the graph comes from elsewhere: the only logarithm in sight is a candidate, not the place."""
    case = Case()
    output = case.run()
    known: dict[str, Any] = {"log": torch.log}
    exec("def far(x): return (log((x * 0)) * 2 + 1).sigmoid().tanh().mean().exp()", known)
    safe = output.detach().log().sum()
    loss = Loss(known["far"](output) + safe, case)
    loss.backward()
    assert case.node == "LogBackward0"
    assert case.place is not None
    assert case.place.fields()["location"] is None


def test_without_source_nothing_is_said() -> None:
    """A notebook cell that is gone, a frozen program."""
    names: dict[str, Any] = {"case": Case(), "Loss": Loss}
    exec(compile("loss = Loss((case.run() * 0).log().sum(), case)\nloss.backward()", "nowhere.py", "exec"), names)
    assert names["case"].node == "LogBackward0"
    assert names["case"].place is None


@pytest.mark.parametrize(
    ("written", "nodes", "bad", "fits"),
    [
        ([{"log"}, {"mean"}], ["log", "mean"], 0, [0]),
        ([{"log"}, {"exp"}, {"log"}, {"mean"}], ["exp", "log", "mean"], 1, [2]),
        ([{"log"}, {"mean"}], ["sqrt"], 0, []),
        ([{"log"}, {"log"}], ["log"], 0, [0, 1]),
        ([], ["log"], 0, []),
    ],
)
def test_best_fits(written: list[set[str]], nodes: list[str], bad: int, fits: list[int]) -> None:
    """What stands around an operation tells which of several it is."""
    assert best_fits(written, nodes, bad)[0] == fits


def test_hooks_change_no_gradient() -> None:
    """The gradients are the same bit for bit, and the hooks are asked only until something is found."""
    case = Case()
    output = case.run()
    parameters = list(case.model.parameters())
    plain = torch.autograd.grad((output.log() / output.exp()).sum(), parameters, retain_graph=True)
    loss = (output.log() / output.exp()).sum()
    told: list[dict[str, Any]] = []
    watch_backward(loss, case.captures.current[-1].after, Guard(lambda *text: pytest.fail(str(text))), told.append)
    watched = torch.autograd.grad(loss, parameters)
    assert told == []
    assert all(torch.equal(a, b) for a, b in zip(plain, watched, strict=True))


def test_places_are_short() -> None:
    """A file below the current directory is named from there."""
    assert location(str(Path.cwd() / "a" / "train.py"), 3) == str(Path("a", "train.py")) + ":3"
