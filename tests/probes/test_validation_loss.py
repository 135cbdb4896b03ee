"""Validation losses of scripts that tell nothing: hooks of loss modules, and the code of torch's loss functions."""

from __future__ import annotations

import inspect
import math
import pickle
import warnings
from collections.abc import Callable, Iterator
from types import FunctionType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch.nn import functional
from torch.nn.modules import module as hooks

from ddpdebug import torch_internals as internals
from ddpdebug.detectors.hlth.validation import ValidationSource
from ddpdebug.isolation.guard import Guard
from ddpdebug.probes.entries import entries_of
from ddpdebug.probes.loop_calls import LoopCalls
from ddpdebug.probes.record import SinceLastStep, StepRecord, encode_row
from ddpdebug.probes.training_events import (
    Bus,
    CollectiveBegan,
    ForwardBegan,
    ModuleForwardBegan,
    StepBegan,
    StepEnded,
    Tensors,
)
from ddpdebug.probes.training_loop.validation_loss import Evaluations, loss_in
from ddpdebug.schema.announcements import ValidationLine
from ddpdebug.schema.row import Flag, Row, decode
from ddpdebug.schema.step import Step
from ddpdebug.torch_internals.loss_functions import LOSSES

X, Y, Z = torch.randn(8, 4), torch.randint(0, 4, (8,)), torch.randn(8, 4)

# --- the loss functions -----------------------------------------------------------------------------------------------


@pytest.fixture
def seen() -> Iterator[list[Any]]:
    """What the functions have returned without gradients."""
    found: list[Any] = []
    undo = internals.look_at_losses(lambda loss, source: found.append(loss))
    yield found
    undo()


def test_every_loss_function_is_known_and_restored() -> None:
    """None is left alone in this torch, and none keeps the other code."""
    before = {name: getattr(functional, name).__code__ for name in LOSSES}
    undo = internals.look_at_losses(lambda loss, source: None)
    assert [name for name in LOSSES if getattr(functional, name).__code__ is before[name]] == []
    undo()
    assert all(getattr(functional, name).__code__ is code for name, code in before.items())


def test_functions_stay_what_they_are() -> None:
    """Objects, pickles, signatures, sources and lines of warnings are the same with the look."""

    def facts() -> list[Any]:
        functions = [getattr(functional, name) for name in LOSSES]
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            functional.mse_loss(torch.ones(3, 1), torch.ones(3))
            with torch.no_grad():
                functional.l1_loss(torch.ones(3, 1), torch.ones(3))
        text = [(str(inspect.signature(f)), inspect.getsource(f), f.__module__) for f in functions]
        return [functions, pickle.dumps(functions), text, [(w.filename, w.lineno) for w in told]]

    plain = facts()
    undo = internals.look_at_losses(lambda loss, source: None)
    with_look = facts()
    undo()
    assert with_look == plain
    assert [name for name, _ in plain[3]] == [__file__, __file__]


def test_what_is_seen(seen: list[Any]) -> None:
    """Values without gradients, of functions and modules, as they are returned; not those of training."""
    functional.cross_entropy(X, Y)
    nn.MSELoss()(X, Z)
    assert seen == []
    with torch.no_grad():
        one, two = functional.cross_entropy(X, Y), nn.MSELoss(reduction="none")(X, Z)
    assert len(seen) == 2
    assert seen[0] is one
    assert seen[1] is two


def test_a_function_of_somebody_else_in_its_place_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its module need not know `torch`, which the look asks."""
    monkeypatch.setattr(functional, "l1_loss", FunctionType(_halved.__code__, {}))
    undo = internals.look_at_losses(lambda loss, source: None)
    with torch.no_grad():
        assert functional.l1_loss(4, 0) == 2  # type: ignore[arg-type]
    undo()


def _halved(x: Any, y: Any) -> Any:
    return (x - y) / 2


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_torch_script_compiles_the_functions(seen: list[Any]) -> None:
    """From their source, with the same value, and without a look inside."""

    def both(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(x, y) + functional.huber_loss(x, 2 * x)

    script: Any = torch.jit.script(both)
    with torch.no_grad():
        assert torch.equal(script(X, Y), both(X, Y))
    assert len(seen) == 2  # of the eager call
    with torch.no_grad():
        traced: Any = torch.jit.trace(lambda x: functional.cross_entropy(x, Y), (X,))
    assert "cross_entropy_loss" in str(traced.graph)
    assert not internals.is_readable(torch.vmap(functional.mse_loss)(X, Z))


def test_a_loss_that_is_no_real_number_is_not_read() -> None:
    """Reading it would raise, and switch the look off."""
    assert internals.is_readable(torch.tensor(1.0))
    assert not internals.is_readable(torch.tensor(1 + 2j))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_models_are_the_same(seen: list[Any], backend: str) -> None:
    """A compiled call has no break and no graph of its own for the look, with and without gradients."""

    def model(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(x * 2, y)

    torch._dynamo.reset()
    counters.clear()
    # before 2.12 torch does not compile a function of its own that it is given by itself, with or without us
    compiles_own = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 12)
    functions = [model, functional.cross_entropy] if compiles_own else [model]
    for function in functions:
        compiled: Any = torch.compile(function, backend=backend, fullgraph=True)
        for gradients in (True, False):
            with torch.set_grad_enabled(gradients):
                assert [bool(torch.equal(compiled(X, Y), function(X, Y))) for _ in range(3)] == [True] * 3
    assert counters["stats"]["unique_graphs"] == 2 * len(functions)
    assert not counters["graph_break"]
    torch._dynamo.reset()


# --- evaluations ------------------------------------------------------------------------------------------------------


class Script:
    """A script's optimizer steps and evaluations, without the rest."""

    def __init__(self, model: nn.Module, source: str = "modules") -> None:
        self.model, self.step = model, 0
        self.facts: list[Any] = []
        self.guard = guard = Guard(lambda part, message: pytest.fail(f"{part}: {message}"))
        self.state: Any = SimpleNamespace(
            since=SinceLastStep(),
            wrappers=[],
            in_backward=0,
            world=2,
            next_step=lambda: self.step,
            models=lambda: [self.model],
        )
        self.bus, self.calls = Bus(guard), LoopCalls(Bus(guard), self.state, lambda *_: None)
        self.optimizer: Any = None
        self.loaders: Any = SimpleNamespace(samples=None)
        self.evaluations = Evaluations(
            self.bus, self.state, guard, calls=self.calls, loaders=self.loaders, tell=self.facts.append, source=source
        )

    def train(self, steps: int = 1) -> list[float]:
        """Take steps; return the validation losses of their rows."""
        found = []
        for _ in range(steps):
            self.bus.emit(StepBegan(self.optimizer, closure=False))
            since, self.state.since = self.state.since, SinceLastStep()
            row = decode(encode_row(StepRecord(0, self.step, Flag(0), since), 0, self.guard))
            assert row.has(Flag.VAL_LOSS_SEEN) == (not math.isnan(row.val_loss))
            found.append(row.val_loss)
            self.step += 1
            self.bus.emit(StepEnded(self.optimizer))
        return found

    def forward_of_the_wrapper(self) -> None:
        """Begin a forward of the DDP."""
        ddp: Any = SimpleNamespace(module=self.model)
        self.bus.emit(ForwardBegan(ddp, (), {}, Tensors(())))

    @torch.no_grad()
    def compute(self, *values: float) -> None:
        """Compute losses on one line."""
        for value in values:
            self.evaluations.look(torch.tensor(float(value)), "by a test")


def told(values: list[float]) -> list[float]:
    return [value for value in values if not math.isnan(value)]


def evaluating() -> Script:
    return Script(nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.1)).eval())


def test_the_mean_of_an_evaluation_goes_out() -> None:
    """With the next row; in the first step only where it is more than a number for the log."""
    script = evaluating()
    script.compute(1.0, 2.0)
    assert told(script.train(5)) == []
    script.compute(1.0, 2.0, 6.0)
    assert told(script.train(5)) == [3.0]
    script.compute(4.0)
    assert told(script.train(5)) == [4.0]
    fact, *rest = script.facts
    assert (type(fact), fact.batches, rest) == (ValidationLine, 3, [])
    assert "test_validation_loss.py:" in fact.location


@pytest.mark.parametrize(
    ("change", "mean"),
    [
        (lambda loss: loss.mul_(2), 4.0),  # a trainer, by the number of ranks
        (lambda loss: loss.add_(0.7), 2.0),  # summed over the ranks: another rank's
        (lambda loss: loss.zero_(), 2.0),
    ],
)
def test_a_loss_counts_as_the_script_means_it(change: Callable[[torch.Tensor], object], mean: float) -> None:
    """Scaled in place; once where module and model return it; not as it is after the next forward."""
    script = evaluating()
    script.train(5)
    losses = [torch.tensor(1.0), torch.tensor(3.0)]
    with torch.no_grad():
        for loss in losses:
            script.forward_of_the_wrapper()
            for source in ("by a loss module", "in the model's output"):
                script.evaluations.look(loss, source)
            change(loss)
        script.forward_of_the_wrapper()
        losses[0].zero_()
    assert told(script.train()) == [mean]
    assert [fact.batches for fact in script.facts] == [2]
    script.evaluations.release()


def test_the_sum_over_ranks_that_evaluate_the_same_is_not_their_loss() -> None:
    """Though it is the number of ranks times as much; a scaling before it counts."""
    script = evaluating()
    script.train(5)
    with torch.no_grad():
        for scale in (1, 2, 1):
            loss = torch.tensor(6.0)
            script.evaluations.look(loss, "by a test")
            loss *= scale
            script.bus.emit(CollectiveBegan())
            loss *= 2
    assert told(script.train()) == [8.0]


def test_what_comes_at_every_step_is_no_evaluation() -> None:
    """A teacher, a target or a number for the log; but many batches at every step are one."""
    script = evaluating()
    for _ in range(10):
        script.compute(1.0, 2.0)
        assert told(script.train()) == []
    script.compute(*range(6))
    assert told(script.train()) == [2.5]


def test_the_model_in_train_mode_evaluates_nothing() -> None:
    """The training loss that is logged without gradients."""
    script = evaluating()
    script.model.train()
    script.train(5)
    script.compute(*range(9))
    assert told(script.train(2)) == []
    script.evaluations.release()


def test_what_is_told_counts() -> None:
    """A script that tells has no other validation loss."""
    script = evaluating()
    script.train(5)
    script.compute(1.0)
    script.calls.tells_validation = True
    assert told(script.train(5)) == []
    script.compute(1.0)
    assert told(script.train(5)) == []


def test_one_line_is_followed() -> None:
    """The first of an evaluation, over data that are not trained on; another one when it is left out twice."""
    script = evaluating()
    script.loaders.samples = 1000
    script.train(5)
    script.compute(9.0)
    script.loaders.samples = 50
    script.compute(1.0)
    script.compute(7.0)
    assert told(script.train(5)) == [4.0]  # both calls by way of one line
    for _ in range(2):
        script.loaders.samples = 60
        script.compute(3.0)
        found = told(script.train(5))
    assert found == [3.0]
    assert [fact.samples for fact in script.facts] == [50, 60]


def test_tensors_of_several_numbers_are_left_alone() -> None:
    """Nobody knows how the script sums them up."""
    script = evaluating()
    script.train(5)
    script.evaluations.look(torch.ones(3), "by a test")
    script.evaluations.look("loss", "by a test")
    assert told(script.train()) == []


# --- what is seen of modules ------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def no_hooks() -> Iterator[None]:
    """No test leaves a hook behind, whatever it has looked at."""
    yield
    hooks._global_module_registration_hooks.clear()


def is_hooked(script: Script) -> bool:
    return not entries_of(script.guard).calls.idle


@pytest.mark.parametrize("gradients", [torch.no_grad, torch.inference_mode])
def test_loss_modules_are_seen(gradients: Any) -> None:
    """Those of torch and classes of them, by name; the mean of a line goes out with the next row."""

    class Halved(nn.modules.loss._Loss):
        def forward(self, x: Any, y: Any) -> Any:
            return (x - y).square().mean() / 2

    script = evaluating()
    for criterion, name in ((nn.MSELoss(), "by nn.MSELoss"), (Halved(), f"by {Halved.__qualname__}")):
        script = evaluating()
        script.train(5)
        with gradients():
            values = [float(criterion(script.model(x[:, :2]), y[:, :2])) for x, y in ((X, Z), (Z, X))]
        assert told(script.train(5)) == pytest.approx([sum(values) / 2])
        assert [(fact.source, fact.batches) for fact in script.facts] == [(name, 2)]
        assert script.evaluations.without_loss == 0


@pytest.mark.parametrize(
    "output",
    [
        lambda loss: loss,
        lambda loss: (torch.ones(3), loss),
        lambda loss: {"loss": loss, "logits": torch.ones(3)},
    ],
)
def test_losses_that_a_model_returns_are_seen(output: Any) -> None:
    """As many language models do: alone, beside the logits, or by name."""

    class Model(nn.Module):
        def forward(self, x: Any) -> Any:
            return output(functional.mse_loss(x, Z))

    script = Script(Model().eval())
    script.train(5)
    with torch.no_grad():
        script.model(X)
    assert told(script.train(5)) == [functional.mse_loss(X, Z).item()]
    assert [fact.source for fact in script.facts] == ["in the model's output"]


@pytest.mark.parametrize(
    "output",
    [
        None,
        "loss",
        torch.ones(3),
        torch.tensor(3),
        torch.tensor(1j),
        (torch.tensor(1.0), torch.tensor(2.0)),
        {"loss": "0.5"},
        {"total": torch.tensor(1.0)},
        torch.tensor(1.0).to_sparse(),
        torch.tensor(1.0, device="meta"),
    ],
)
def test_other_outputs_are_no_loss(output: Any) -> None:
    """Nothing is guessed."""
    assert loss_in(output) is None


@pytest.mark.parametrize(
    "output", [lambda x: (x.mean(), 1), lambda x: {"loss": x.mean()}, lambda x: x.mean().to_sparse()]
)
def test_odd_outputs_of_loss_modules_are_let_pass(output: Any) -> None:
    """They reach the script as they are, and are no validation loss."""

    class Odd(nn.modules.loss._Loss):
        def forward(self, x: Any) -> Any:
            return output(x)

    script = evaluating()
    script.train(5)
    with torch.no_grad():
        script.model(X[:, :2])
        assert type(Odd()(X)) is type(output(X))
    assert told(script.train(5)) == []
    assert script.facts == []


def test_training_never_meets_the_hook() -> None:
    """It lies there from a step to the next forward with gradients, of whatever model that trains."""
    script = evaluating()
    assert not is_hooked(script)
    script.train()
    assert is_hooked(script)
    with torch.no_grad():
        script.model(X[:, :2])
    nn.Linear(4, 1)(X)  # of somebody else
    assert is_hooked(script)
    script.model(X[:, :2])
    assert not is_hooked(script)
    script.train()
    script.bus.emit(ModuleForwardBegan(script.model, (), {}))
    assert not is_hooked(script)
    script.train()
    script.forward_of_the_wrapper()
    assert not is_hooked(script)


def test_no_hook_beside_torch_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    """What runs as a graph is not seen: once the looks are released they do not come back.

    That making one releases them is seen by the situation `compile_evaluation`.
    """
    script = evaluating()
    script.train()
    assert is_hooked(script)
    compiled = torch.compile(script.model, backend="eager")
    script.evaluations.release()
    assert not is_hooked(script)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("error")
        compiled(X[:, :2])
    script.train()
    assert not is_hooked(script)
    torch._dynamo.reset()
    monkeypatch.setattr(internals, "anything_compiled", lambda: True)
    script.train()
    assert not is_hooked(script)


@pytest.mark.parametrize("source", ["told", "functions"])
def test_where_the_user_wants_no_look_at_modules(source: str) -> None:
    """Their losses are not counted beside those of the functions that they call."""
    script = Script(evaluating().model, source)
    script.train(5)
    assert is_hooked(script) == (source == "functions")
    with torch.no_grad():
        nn.MSELoss()(script.model(X[:, :2]), Z[:, :2])
    assert told(script.train(5)) == []


def test_evaluations_without_a_loss_are_counted() -> None:
    """Not what happens at every step, and not where the script tells."""
    script = evaluating()
    for _ in range(3):
        script.train(5)
        with torch.no_grad():
            functional.mse_loss(script.model(X[:, :2]), Z[:, :2])
    script.train(3)
    assert script.evaluations.without_loss == 3
    for _ in range(9):  # a target at every step
        script.train()
        with torch.no_grad():
            script.model(X[:, :2])
    script.train(5)
    assert script.evaluations.without_loss == 4  # the first of them came after a pause
    script.calls.tells_validation = True
    with torch.no_grad():
        script.model(X[:, :2])
    script.train(5)
    assert script.evaluations.without_loss == 4


@pytest.mark.parametrize("compiled", [False, True])
def test_forwards_of_the_wrapper_are_evaluations(compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where no hook is used; each is counted once."""
    monkeypatch.setattr(internals, "anything_compiled", lambda: compiled)
    script = evaluating()
    script.train(5)
    with torch.no_grad():
        script.forward_of_the_wrapper()
        script.model(X[:, :2])
    script.train(5)
    assert script.evaluations.without_loss == 1


@pytest.mark.parametrize(
    "runs, loss, other, found",
    [
        ("model", "module", False, [4]),
        ("average", "module", False, []),
        ("nothing", "module", False, []),
        ("model", "function", False, []),
        ("model", "function", True, [4]),
        ("model", "nothing", True, [4]),
        ("average", "function", True, []),
    ],
)
def test_evaluation_in_train_mode(runs: str, loss: str, other: bool, found: list[int]) -> None:
    """Of the model itself it is told, where a loss or other data show it; a copy may be evaluated meanwhile."""
    script = evaluating()
    script.model.train()
    average = nn.Linear(2, 2).eval()
    for _ in range(2):
        script.loaders.samples = 100
        script.train(6)
        script.loaders.samples = 30 if other else 100
        with torch.no_grad():
            for _ in range(4):
                if runs != "nothing":
                    (script.model if runs == "model" else average)(X[:, :2])
                if loss != "nothing":
                    (nn.MSELoss() if loss == "module" else functional.mse_loss)(X, Z)
    script.train()
    assert [fact.forwards for fact in script.facts] == found * 2


# --- the rules' side --------------------------------------------------------------------------------------------------


def step_with(**rows: tuple[float, bool]) -> Step:
    found = {
        int(name[1:]): Row(rank=int(name[1:]), val_loss=value, flags=int(Flag.VAL_LOSS_SEEN) * own)
        for name, (value, own) in rows.items()
    }
    return Step(step=0, optimizer=0, world=2, rows=found)


def test_told_values_replace_seen_ones() -> None:
    """On whatever rank they are told; and what was seen before is another quantity."""
    source = ValidationSource()
    fact = ValidationLine(location="train.py:88", batches=12, source="by nn.L1Loss")
    source.hear("alone:evaluation", {1: fact})
    assert source.value(step_with(r0=(1.0, True), r1=(2.0, True))) == 1.5
    assert not source.renewed()
    assert source.location() == "train.py:88"
    assert source.evidence() == {
        "validation_loss": "seen by nn.L1Loss in evaluation at train.py:88, mean of 12 batches"
    }
    assert source.value(step_with(r0=(1.0, False), r1=(2.0, True))) == 1.0
    assert source.renewed()
    assert not source.renewed()
    assert source.value(step_with(r0=(math.nan, False), r1=(2.0, True))) is None
    assert (source.location(), source.evidence()) == (None, {"validation_loss": "told by observe(val_loss=)"})
    assert ValidationSource().evidence() == {}


def test_another_line_is_another_quantity() -> None:
    """A rank that begins later is not, one that changes its line is."""
    source = ValidationSource()
    for rank in (0, 1):
        source.hear("alone:evaluation", {rank: ValidationLine(location="a.py:1", batches=1)})
        assert not source.renewed()
    source.hear("alone:evaluation", {1: ValidationLine(location="a.py:9", batches=1)})
    assert source.renewed()
