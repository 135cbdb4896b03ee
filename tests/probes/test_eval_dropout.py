"""Dropout that runs in eval mode is found where it is called, and what looks for it leaves no trace."""

from __future__ import annotations

import cProfile
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.functional import dropout as imported
from torch.overrides import TorchFunctionMode

from ddpdebug.detectors.rcp.rcp820_eval_not_deterministic import EvalNotDeterministic
from ddpdebug.forensics.loss.dropout_calls import dropout_calls
from ddpdebug.isolation.guard import Guard
from ddpdebug.probes.entries import entries_of
from ddpdebug.probes.training_loop.eval_dropout import FORWARDS, Chance
from ddpdebug.schema.announcements import DrawingModule, DropoutCall, EvalDraws
from ddpdebug.schema.finding import Finding

GUARD = Guard(lambda part, message: pytest.fail(f"{part}: {message}"))


class Net(nn.Module):
    """A layer whose output goes through a method that each model below writes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.drop, self.p, self.mc = nn.Linear(4, 4), nn.Dropout(0.5), 0.2, True

    def forward(self, x: Tensor) -> Tensor:
        kept = x
        x = self.inside(self.layer(x))
        return x + kept.sum()

    def inside(self, x: Tensor) -> Tensor:
        return x


class Own(Net):
    def inside(self, x: Tensor) -> Tensor:
        return functional.dropout(x, self.p)


class Imported(Net):
    def inside(self, x: Tensor) -> Tensor:
        return imported(x)


class OneDimension(Net):
    def inside(self, x: Tensor) -> Tensor:
        return functional.dropout1d(x[None], p=0.25)[0]


class Alpha(Net):
    def inside(self, x: Tensor) -> Tensor:
        return functional.alpha_dropout(x, 0.1, training=True)


class Attention(Net):
    def inside(self, x: Tensor) -> Tensor:
        p = self.p
        return functional.scaled_dot_product_attention(x[None], x[None], x[None], dropout_p=p)[0]


class Helped(Net):
    def inside(self, x: Tensor) -> Tensor:
        return helper(x, self.training)


def helper(x: Tensor, training: bool) -> Tensor:
    return functional.dropout(x, 0.3, training=not training)


class Told(Net):
    def inside(self, x: Tensor) -> Tensor:
        return functional.dropout(x, 0.2, self.training)


class Never(Net):
    def inside(self, x: Tensor) -> Tensor:
        return functional.dropout(x, 0.0)


class ByModule(Net):
    def inside(self, x: Tensor) -> Tensor:
        return self.drop(x)


class Samples(Net):
    def inside(self, x: Tensor) -> Tensor:
        return x + torch.rand_like(x)


class SamplesBesideDropout(Net):
    def inside(self, x: Tensor) -> Tensor:
        x = functional.dropout(x, self.p if self.training else 0.0) + torch.rand_like(x)
        return functional.dropout(helper(x, not self.training), self.p, training=self.training)


class AlphaByDefault(Net):
    def inside(self, x: Tensor) -> Tensor:
        return functional.alpha_dropout(x)


class Noise(Net):
    """Noise of a fixed size in the code of the model itself, with what it is multiplied by in a name of its own."""

    def inside(self, x: Tensor) -> Tensor:
        noise = torch.randn(x.shape)
        noise = noise * self.p
        return x + noise


class Added(Net):
    def inside(self, x: Tensor) -> Tensor:
        return x.add(torch.empty_like(x).normal_(0, 0.1))


class Mask(Net):
    def inside(self, x: Tensor) -> Tensor:
        keep = 1 - self.p
        return x * (torch.rand(x.shape) < keep).float() / keep


class Depth(Net):
    def inside(self, x: Tensor) -> Tensor:
        return drop_path(x, self.p, training=True)


class DepthOfMode(Net):
    def inside(self, x: Tensor) -> Tensor:
        return drop_path(x, self.p, self.training) + torch.rand_like(x) / 256


def drop_path(x: Tensor, p: float, training: bool) -> Tensor:
    """As it is written in many models."""
    if p == 0.0 or not training:
        return x
    keep = 1 - p
    kept = x.new_empty((len(x), 1)).bernoulli_(keep)
    kept.div_(keep)
    return x * kept


class Guarded(Net):
    def inside(self, x: Tensor) -> Tensor:
        if not self.training:
            return x + torch.rand_like(x)
        return functional.dropout(x + self.p * torch.randn_like(x), self.p)


class Variational(Net):
    """Learns how much noise there is."""

    def inside(self, x: Tensor) -> Tensor:
        std = torch.exp(0.5 * x)
        eps = torch.randn_like(std)
        return x + eps * std


class Denoises(Net):
    """Predicts the noise."""

    def inside(self, x: Tensor) -> Tensor:
        noise = torch.randn_like(x)
        return (self.layer(x + 0.3 * noise) - noise).square()


class Masked(Net):
    """Predicts what is hidden."""

    def inside(self, x: Tensor) -> Tensor:
        hidden = torch.rand(x.shape) < 0.5
        return torch.where(hidden, self.layer(x * ~hidden), 0.0)


class Raises(Net):
    def inside(self, x: Tensor) -> Tensor:
        x = functional.dropout(x)
        if self.mc:
            return x
        raise RuntimeError("no")


def evaluate(net: nn.Module, times: int = 4) -> list[EvalDraws]:
    """Return what is told of some forwards; each gives what it gives without us."""
    chance, told = Chance(entries_of(GUARD), dropout_calls), []
    x = torch.randn(3, 4)
    for seed in range(times):
        torch.manual_seed(seed)
        expected = net(x), torch.default_generator.get_state()
        torch.manual_seed(seed)
        chance.begin(net)
        got = net(x)
        told += [draws for draws in [chance.end(net)] if draws is not None]
        assert torch.equal(got, expected[0])
        assert torch.equal(torch.default_generator.get_state(), expected[1])
        assert entries_of(GUARD).calls.idle
    return told


def judged(told: list[EvalDraws]) -> list[Finding]:
    """What the rule says about it."""
    return [finding for draws in told for finding in EvalNotDeterministic().compare(draws.topic, {0: draws})]


@pytest.mark.parametrize(
    "kind, function, p",
    [
        (Own, "dropout", 0.2),
        (Imported, "dropout", 0.5),
        (OneDimension, "dropout1d", 0.25),
        (Alpha, "alpha_dropout", 0.1),
        (Attention, "scaled_dot_product_attention", None),
        (Helped, "dropout", 0.3),
    ],
)
def test_active_functions_are_named(kind: type[Net], function: str, p: float | None) -> None:
    """Whatever name it was imported by, the function is told with the module and the line that call it."""
    (found,) = judged(evaluate(kind().eval()))
    assert found.subject == ("(model)",)
    evidence = found.evidence
    assert (evidence["function"], evidence.get("p"), evidence["class"]) == (function, p, kind.__name__)
    file, _, line = str(found.location).partition(":")
    assert file == "tests/probes/test_eval_dropout.py"
    called = Path(__file__).read_text(encoding="utf-8").splitlines()[int(line) - 1]
    assert f"{function}(" in called or "imported(" in called


def test_the_innermost_module_is_named() -> None:
    """The path is that of the module whose own code draws."""
    net = nn.Sequential(nn.Linear(4, 4), Own()).eval()
    assert [module.path for module in evaluate(net)[0].modules] == ["1"]


@pytest.mark.parametrize(
    "kind, function",
    [(Noise, "randn"), (Added, "normal_"), (Mask, "rand"), (Depth, "bernoulli_")],
)
def test_dropout_written_by_hand_is_named(kind: type[Net], function: str) -> None:
    """Noise of a fixed size that is added, and a mask of a fixed rate: with the line where they are applied."""
    for wrapped in (kind().eval(), nn.Sequential(nn.Linear(4, 4), kind()).eval()):
        (found,) = judged(evaluate(wrapped))
        assert (found.evidence["function"], found.evidence["class"]) == (function, kind.__name__)
        line = Path(__file__).read_text(encoding="utf-8").splitlines()[int(str(found.location).partition(":")[2]) - 1]
        assert {"Noise": "x + noise", "Added": "x.add(", "Mask": "x * (", "Depth": "x * kept"}[kind.__name__] in line


def test_what_a_model_draws_itself_is_its_own() -> None:
    """No DDP is around it: its hook has run before its forward began, and the last draw is behind the last module's."""
    net, x = Own().eval(), torch.randn(3, 4)
    chance, told = Chance(entries_of(GUARD), dropout_calls), []
    run = net.forward

    def forward(x: Tensor) -> Tensor:
        chance.begin(net)
        out = run(x)
        told.append(chance.end(net))
        return out

    net.forward = forward  # type: ignore[method-assign]
    for _ in range(4):
        net(x)
    (found,) = judged([draws for draws in told if draws is not None])
    assert found.evidence["function"] == "dropout"


def test_noise_on_what_is_reconstructed_is_let_pass() -> None:
    """A denoising auto-encoder is given less than it shall return, in its evaluation too; dropout is no such noise."""
    calls = (DropoutCall(function="randn_like", location="m.py:3", active=True),)
    part = DrawingModule(path="a", class_name="A", calls=calls)
    assert judged([EvalDraws(step=4, modules=(part,))])
    assert not judged([EvalDraws(step=4, modules=(part,), reconstructs=True)])
    dropout = DrawingModule(
        path="a", class_name="A", calls=(DropoutCall(function="dropout", location="m.py:4", active=True),)
    )
    assert judged([EvalDraws(step=4, modules=(dropout,), reconstructs=True)])


@pytest.mark.parametrize(
    "kind",
    [Told, Never, ByModule, Samples, AlphaByDefault, DepthOfMode, Guarded, Variational, Denoises, Masked],
)
def test_what_is_right_is_let_pass(kind: type[Net]) -> None:
    """Functions that are told the mode, modules, and other draws are not even told."""
    assert evaluate(kind().eval(), FORWARDS + 2) == []


def test_beside_other_draws_only_what_is_certain_is_told() -> None:
    """A model that samples draws anyway: a dropout whose mode only running it would tell may be off."""
    (told,) = evaluate(SamplesBesideDropout().eval(), FORWARDS + 2)
    (module,) = told.modules
    assert module.draws_otherwise
    assert {call.active for call in module.calls} == {None}
    assert judged([told]) == []


def test_monte_carlo_dropout_is_let_pass() -> None:
    """A dropout module that was put into train mode alone draws on purpose."""
    net = ByModule().eval()
    net.drop.train()
    told = evaluate(net)
    assert [(module.path, module.training) for draws in told for module in draws.modules] == [("drop", True)]
    assert judged(told) == []


def test_nothing_stays_behind_when_forward_raises() -> None:
    """The hooks are taken away, and what comes later is looked at as before."""
    chance, net = Chance(entries_of(GUARD), dropout_calls), Raises().eval()
    chance.begin(net)
    net(torch.zeros(2, 4))
    assert chance.end(net) is None
    net.mc = False
    chance.begin(net)
    assert not entries_of(GUARD).calls.idle
    with pytest.raises(RuntimeError, match="no"):
        net(torch.zeros(2, 4))
    chance.release()
    assert entries_of(GUARD).calls.idle
    net.mc = True
    chance.begin(net)
    net(torch.zeros(2, 4))
    assert [finding.evidence["function"] for finding in judged([chance.end(net)])] == ["dropout"]


@pytest.fixture
def profiled() -> Iterator[cProfile.Profile]:
    own = cProfile.Profile()
    own.enable()
    yield own
    own.disable()


def test_a_profiler_of_the_user_stays_in_place(profiled: cProfile.Profile) -> None:
    """It is never replaced, and the call is found all the same."""
    before = sys.getprofile()
    assert judged(evaluate(Own().eval()))
    assert sys.getprofile() is before
    assert before is (profiled if sys.version_info < (3, 12) else None)  # later it is a tool of sys.monitoring
    own = [entry for entry in profiled.getstats() if getattr(entry.code, "co_name", "") == "evaluate"]
    assert own, "it has not seen the call"


class _Counting(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(func.__name__)
        return func(*args, **(kwargs or {}))


def test_a_mode_of_the_user_sees_the_same() -> None:
    """None of ours lies beside it, and what looks asks torch for nothing that it would count."""

    def counted(forward: Callable[[Net, Tensor], Tensor]) -> list[str]:
        net, x = Own().eval(), torch.zeros(2, 4)
        with _Counting() as mode:
            for _ in range(4):
                forward(net, x)
        return mode.seen

    chance, told = Chance(entries_of(GUARD), dropout_calls), []

    def attached(net: Net, x: Tensor) -> Tensor:
        GUARD.run("probe:chance", chance.begin, net)
        out: Tensor = net(x)
        told.append(GUARD.run("probe:chance", chance.end, net))
        return out

    assert counted(attached) == counted(lambda net, x: net(x))
    assert any(told)


def test_the_finding_names_every_call() -> None:
    """Who mends one line would meet the next in the next run."""
    calls = tuple(DropoutCall(function="dropout", location=f"m.py:{line}", active=True) for line in (3, 9, 3))
    fact = EvalDraws(step=4, modules=(DrawingModule(path="a", class_name="A", calls=calls),))
    (finding,) = judged([fact])
    assert (finding.location, finding.evidence["others"]) == ("m.py:3", ["dropout at m.py:9"])
