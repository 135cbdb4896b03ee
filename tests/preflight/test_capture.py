"""What a script computes between forward and backward can be computed again with another model."""

from __future__ import annotations

import collections
import copy
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.optim import lr_scheduler
from torch.overrides import BaseTorchFunctionMode
from torch.utils.checkpoint import checkpoint

from ddpdebug.errors import StopRun
from ddpdebug.preflight.capture.capture import Capture
from ddpdebug.preflight.capture.copies import copied, optimizer_maker, peak_rates
from ddpdebug.preflight.capture.recorder import Recorder
from ddpdebug.preflight.capture.sampling import Samples
from ddpdebug.preflight.examine import examine
from ddpdebug.preflight.output.results import Check, Status
from ddpdebug.preflight.subject import Subject

X, Y = torch.randn(16, 6, generator=torch.Generator().manual_seed(0)), torch.arange(16) % 3


pytestmark = pytest.mark.slow


def model() -> nn.Module:
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3))


@pytest.fixture
def capture() -> Iterator[Capture]:
    found = Capture(steps=2)
    found.install()
    yield found
    found.close()


def captured(capture: Capture, script: Callable[[], Any]) -> Subject:
    """Run a script until it is stopped."""
    with pytest.raises(StopRun):
        script()
    capture.close()
    subject = capture.subject()
    assert subject is not None
    return subject


def gradients(loss: torch.Tensor, net: nn.Module) -> list[torch.Tensor]:
    return list(torch.autograd.grad(loss, list(net.parameters())))


def compare(subject: Subject, number: int, expected: Callable[[nn.Module], torch.Tensor]) -> None:
    """A tape with a copy gives the loss and the gradients of what the script wrote."""
    one, other = copied(subject.model), copied(subject.model)
    torch.manual_seed(9)
    loss, _ = subject.loss_of(one, subject.batches[number])
    torch.manual_seed(9)
    wanted = expected(other)
    assert torch.equal(loss, wanted)
    for a, b in zip(gradients(loss, one), gradients(wanted, other), strict=True):
        assert torch.equal(a, b)


def train(loss_of: Callable[[nn.Module], torch.Tensor]) -> None:
    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01, betas=(0.8, 0.9), weight_decay=0.1)
    for _ in range(9):
        optimizer.zero_grad()
        loss_of(net).backward()
        optimizer.step()


class _Own(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
        return value * 3

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 3


def plain(net: nn.Module) -> torch.Tensor:
    return functional.cross_entropy(net(X), Y)


def module_loss(net: nn.Module) -> torch.Tensor:
    return nn.CrossEntropyLoss(label_smoothing=0.1)(net(X.clone()).float(), Y.long())


def two_forwards(net: nn.Module) -> torch.Tensor:
    return (net(X) - net(X + 0.1)).square().sum() + 0.5 * net(X)[:, 0].mean()


def penalty(net: nn.Module) -> torch.Tensor:
    loss = plain(net)
    return loss + 0.01 * sum(p.square().sum() for p in net.parameters())


def in_place(net: nn.Module) -> torch.Tensor:
    out = net(X) * 1.0
    out[Y == 1] = 0.0
    total = torch.zeros(())
    total += out.exp().mean()
    total.mul_(2.0)
    return total


def own_function(net: nn.Module) -> torch.Tensor:
    return _Own.apply(net(X)).square().mean()


def noise(net: nn.Module) -> torch.Tensor:
    out = net(X)
    return (out + torch.randn_like(out)).square().mean()


def gradient_penalty(net: nn.Module) -> torch.Tensor:
    x = X.clone().requires_grad_()
    (slope,) = torch.autograd.grad(net(x).sum(), x, create_graph=True)
    return slope.square().mean() + net(x).mean()


def cast(net: nn.Module) -> torch.Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = net(X)
    return functional.cross_entropy(out.float(), Y)


LOSSES = [plain, module_loss, two_forwards, penalty, in_place, own_function, noise, gradient_penalty, cast]


@pytest.mark.parametrize("loss_of", LOSSES, ids=lambda f: f.__name__)
def test_a_tape_is_the_loss(capture: Capture, loss_of: Callable[[nn.Module], torch.Tensor]) -> None:
    """Bit for bit, with its gradients, for a model from before the first step."""
    subject = captured(capture, lambda: train(loss_of))
    assert len(subject.batches) == 2
    for parameter, other in zip(subject.model.parameters(), model().parameters(), strict=True):
        assert torch.equal(parameter, other)
    assert int(subject.model[1].num_batches_tracked) == 0  # type: ignore[index]
    compare(subject, 0, loss_of)
    compare(subject, 1, loss_of)


class _ByFunctions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.drop = nn.Linear(4, 4), nn.Dropout(0.5)
        inner = self.linear
        self.through = lambda x: self.drop(inner(x))
        self.by_default = lambda x, layer=self.linear: layer(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.through(x) + self.by_default(x)


def test_a_copy_runs_its_own_modules() -> None:
    """Also those that the model reaches through closures and defaults of functions that it holds."""
    model = _ByFunctions()
    twin = copied(model).eval()
    x = torch.ones(1, 4)
    assert torch.equal(twin(x), twin(x))
    twin(x).sum().backward()
    assert model.linear.weight.grad is None
    assert model.drop.training


def test_the_optimizer_is_made_anew(capture: Capture) -> None:
    """Of the same class and settings, for a copy of the model, without state."""
    subject = captured(capture, lambda: train(plain))
    assert subject.optimizer_for is not None
    twin = copied(subject.model)
    made = subject.optimizer_for(twin)
    assert (type(made), made.state) == (torch.optim.AdamW, {})
    (group,) = made.param_groups
    assert (group["lr"], group["betas"], group["weight_decay"]) == (0.01, (0.8, 0.9), 0.1)
    assert [id(p) for p in group["params"]] == [id(p) for p in twin.parameters()]


def test_accumulation_and_a_scaler(capture: Capture) -> None:
    """Each micro-batch has its tape, and the loss is the unscaled one; skipped steps are no micro-batches."""

    def script() -> None:
        net, scaler = model(), torch.amp.GradScaler("cpu", init_scale=2.0**10)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for _ in range(9):
            for half in (slice(0, 8), slice(8, 16)):
                scaler.scale(functional.cross_entropy(net(X[half]), Y[half]) / 2).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()

    subject = captured(capture, script)
    assert (subject.micro_batches, len(subject.batches)) == (2, 4)
    compare(subject, 1, lambda net: functional.cross_entropy(net(X[8:]), Y[8:]) / 2)


def test_a_closure(capture: Capture) -> None:
    """The model is taken before the first forward, though all of the step happens inside the optimizer."""

    def script() -> None:
        net = model()
        optimizer = torch.optim.LBFGS(net.parameters(), max_iter=2)

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = plain(net)
            loss.backward()
            return loss

        for _ in range(9):
            optimizer.step(closure)

    subject = captured(capture, script)
    compare(subject, 0, plain)
    assert subject.optimizer_for is not None
    assert type(subject.optimizer_for(copied(subject.model))) is torch.optim.LBFGS


@dataclass
class _Output:
    loss: torch.Tensor
    logits: torch.Tensor


class _WithLoss(nn.Module):
    """Returns its loss, as models of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.net = model()

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> _Output:
        logits = self.net(inputs)
        return _Output(functional.cross_entropy(logits, labels), logits)


def test_a_model_that_returns_its_loss(capture: Capture) -> None:
    """The loss is a part of the output."""

    def script() -> None:
        torch.manual_seed(0)
        net = _WithLoss()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for _ in range(9):
            net(inputs=X, labels=Y).loss.backward()
            optimizer.step()

    subject = captured(capture, script)
    compare(subject, 0, lambda net: plain(net.net))  # type: ignore[arg-type]


def test_parts_of_a_model_are_called(capture: Capture) -> None:
    """A loss from methods is a tape over the parts of the model that holds them."""

    class Coder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(3)
            self.down, self.up = nn.Linear(6, 2), nn.Linear(2, 6)

    def loss_of(net: Any) -> torch.Tensor:
        return functional.mse_loss(net.up(net.down(X).tanh()), X)

    def script() -> None:
        net = Coder()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for _ in range(9):
            loss_of(net).backward()
            optimizer.step()

    subject = captured(capture, script)
    assert type(subject.model) is Coder
    compare(subject, 0, loss_of)


def test_two_models_and_two_optimizers(capture: Capture) -> None:
    """The first optimizer's loss is recorded, over both models."""
    z = torch.randn(16, 2, generator=torch.Generator().manual_seed(1))

    def critic_loss(makes: nn.Module, judges: nn.Module) -> torch.Tensor:
        return judges(makes(z).detach()).mean() - judges(X).mean()

    def script() -> None:
        torch.manual_seed(4)
        makes, judges = nn.Linear(2, 6), nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 1))
        first, second = torch.optim.SGD(judges.parameters(), 0.1), torch.optim.SGD(makes.parameters(), 0.1)
        for _ in range(9):
            critic_loss(makes, judges).backward()
            first.step()
            (-judges(makes(z)).mean()).backward()
            second.step()

    subject = captured(capture, script)
    assert len(subject.batches) == 2
    net = copied(subject.model)
    loss, _ = subject.loss_of(net, subject.batches[0])
    makes, judges = copy.deepcopy(net)  # type: ignore[misc]
    assert torch.equal(loss, critic_loss(makes, judges))
    assert subject.facts["trained"] == ["1.0.weight", "1.0.bias", "1.2.weight", "1.2.bias"]


def test_a_loss_that_cannot_be_recorded(capture: Capture) -> None:
    """It says why, and the model and its optimizer are there."""

    def script() -> None:
        net = model()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for _ in range(9):
            net(X).backward(torch.ones(16, 3))
            optimizer.step()

    subject = captured(capture, script)
    assert (list(subject.batches), subject.facts["not_recorded"]) == ([], "backward was not called on one scalar loss")


def test_nothing_stays_behind(capture: Capture) -> None:
    """After it is closed torch is as it was before."""
    capture.close()
    before = {owner: dict(vars(owner)) for owner in (nn.Module, torch.optim.Optimizer, torch.amp.GradScaler)}
    other = Capture()
    other.install()
    assert torch.overrides._get_current_function_mode() is not None
    other.close()
    assert torch.overrides._get_current_function_mode() is None
    assert all(dict(vars(owner)) == known for owner, known in before.items())
    assert torch.autograd.backward.__name__ == "backward"
    assert not hasattr(torch.autograd.backward, "__wrapped__")


def test_somebody_else_wraps_a_wrapper(capture: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the script has put over one of ours stays when it is closed; ours, below it, does nothing any more."""
    ours, calls = nn.Module.load_state_dict, []

    def theirs(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        calls.append(module)
        return ours(module, *args, **kwargs)

    monkeypatch.setattr(nn.Module, "load_state_dict", theirs)
    mode = BaseTorchFunctionMode()
    mode.__enter__()
    try:
        capture.close()
        assert nn.Module.load_state_dict is theirs
        net = model()
        net.load_state_dict(model().state_dict())
        assert calls == [net]
        assert not capture.facts["loaded"]
        assert torch.overrides._get_current_function_mode() is mode  # and not taken for ours
        functional.cross_entropy(net(X), Y).backward()
        assert capture.recorder.roots == []
    finally:
        mode.__exit__(None, None, None)
        if torch.overrides._get_current_function_mode() is capture.recorder:
            capture.recorder.__exit__(None, None, None)


def test_a_target_that_is_missing(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """It is said what is not seen; everything else is."""
    monkeypatch.delattr(torch.amp.GradScaler, "update")
    capture = Capture(steps=2)
    capture.install()
    subject = captured(capture, lambda: train_script(model()))
    assert len(subject.batches) == 2
    assert "torch.amp.grad_scaler.GradScaler.update" in capsys.readouterr().err


class Refusing(collections.UserDict):  # type: ignore[type-arg]  # of anything
    """A batch that lets nobody but the model look into it."""

    def values(self) -> Any:
        raise ValueError("not for you")


def train_script(net: nn.Module, given: Callable[[torch.Tensor], Any] = lambda x: x) -> None:
    run_script(net, torch.optim.SGD(net.parameters(), lr=0.1), given)


def run_script(net: nn.Module, optimizer: Any, given: Callable[[torch.Tensor], Any] = lambda x: x) -> None:
    torch.optim.lr_scheduler.ConstantLR(optimizer)
    net.load_state_dict(net.state_dict())
    for inputs, labels in torch.utils.data.DataLoader(torch.utils.data.TensorDataset(X, Y), batch_size=4):
        optimizer.zero_grad()
        functional.cross_entropy(net(given(inputs)), labels).backward()
        optimizer.step()


@pytest.mark.parametrize(
    "make, peak",
    [
        (lambda o: None, None),
        (lambda o: lr_scheduler.LinearLR(o, 0.01, total_iters=50), 0.1),
        (lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.4, total_steps=100), 0.4),
        (lambda o: lr_scheduler.LambdaLR(o, lambda n: min(1.0, n / 1000)), 0.1),
        (lambda o: lr_scheduler.LambdaLR(o, lambda n: 0.002 * min((n + 1) / 400, 1.0)), 0.0002),
        (lambda o: lr_scheduler.LambdaLR(o, [1.0, 0.5, 0.25].__getitem__), 0.1),
    ],
)
def test_the_rate_of_a_copy_is_the_peak_of_the_schedule(make: Callable[[Any], Any], peak: float | None) -> None:
    """A warm-up, a cycle, a function of the user's, one that is no more than a list; its own without a schedule."""
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    schedule = make(optimizer)  # noqa: F841 - lives as long as the optimizer
    assert peak_rates(optimizer) == [None if peak is None else pytest.approx(peak, rel=0.06)]
    made = optimizer_maker(optimizer, {id(p): name for name, p in net.named_parameters()})
    assert made is not None
    assert made(net).param_groups[0]["lr"] == pytest.approx(peak or 0.1, rel=0.06)


class Looks(nn.Module):
    """Takes its input out of a dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = model()

    def forward(self, batch: Any) -> Any:
        return self.inner(batch["x"])


def test_a_batch_that_refuses_to_be_read(capture: Capture) -> None:
    """What our look at it would raise is not the script's."""
    subject = captured(capture, lambda: train_script(Looks(), lambda x: Refusing(x=x)))
    assert subject.facts["steps"] == 2


def fails(*_: Any, **__: Any) -> None:
    raise RuntimeError("of ours")


@pytest.mark.parametrize(
    ("owner", "name", "part"),
    [
        (Capture, "_calls", "recording"),
        (Capture, "_backward", "recording"),
        (Recorder, "function", "recording"),
        (Recorder, "ends", "recording"),
        (Capture, "_loads", "script"),
        (Capture, "_optimizer_made", "script"),
        (Samples, "made", "data"),
        (Samples, "read", "data"),
        (Capture, "_before_step", "steps"),
        (Capture, "_after", "steps"),
        (Capture, "_end", "steps"),
    ],
)
def test_what_fails_stays_ours(
    owner: type, name: str, part: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A hook that fails is off and says so; the script trains on, and is stopped all the same."""
    monkeypatch.setattr(owner, name, fails)
    capture = Capture(steps=2)
    capture.install()
    with pytest.raises(StopRun):
        train_script(model())
    capture.close()
    subject = capture.subject()
    assert (subject is None) == (name == "_calls")  # without it no model is known
    assert torch.overrides._get_current_function_mode() is None
    assert not hasattr(nn.Module.__call__, "__wrapped__")
    said = capsys.readouterr().err
    assert f"ddpdebug: preflight: {part}: RuntimeError: of ours" in said
    assert said.count("of ours") == 1
    if part in {"recording", "steps"}:
        assert capture.recorder.trouble == "RuntimeError: of ours"


class TooSlow(Exception):  # noqa: N818 - the script's own
    """What the script's own alarm raises."""


@pytest.mark.parametrize(
    ("owner", "name"), [(Capture, "_calls"), (Recorder, "_node"), (Samples, "made"), (Capture, "_after")]
)
def test_the_scripts_own_alarm_goes_through(owner: type, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A signal that comes while one of our hooks runs is handled as the script wants it."""
    look = getattr(owner, name)
    rung: list[int] = []

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        if not rung:
            rung.append(1)
            signal.raise_signal(signal.SIGUSR1)
        return look(*args, **kwargs)

    def alarm(*_: Any) -> None:
        raise TooSlow

    monkeypatch.setattr(owner, name, interrupted)
    before = signal.signal(signal.SIGUSR1, alarm)
    capture = Capture(steps=2)
    try:
        capture.install()
        net = model()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        with pytest.raises(TooSlow):
            run_script(net, optimizer)
        captured(capture, lambda: run_script(net, optimizer))  # and what was half written down is no hindrance
        assert capture.tapes
    finally:
        capture.close()
        signal.signal(signal.SIGUSR1, before)


def test_loaders_are_told_apart(capture: Capture) -> None:
    """Samples come from the loader that trains and from another one; a generator of theirs is put back."""
    data, other = (torch.utils.data.TensorDataset(X + shift, Y) for shift in (0, 1))
    generator = torch.Generator().manual_seed(5)

    def script() -> None:
        train_loader = torch.utils.data.DataLoader(data, batch_size=4, shuffle=True, generator=generator)
        torch.utils.data.DataLoader(other, batch_size=8)
        net = model()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for inputs, labels in train_loader:
            functional.cross_entropy(net(inputs), labels).backward()
            optimizer.step()

    subject = captured(capture, script)
    assert subject.samples is not None
    assert subject.samples.trouble is None
    assert sorted(float(x.sum()) for x, _ in subject.samples.train) == sorted(float(x.sum()) for x in X)
    assert len(subject.samples.repeats) == 8
    assert [(loader["trains"], loader["batch_size"]) for loader in subject.facts["loaders"]] == [(True, 4), (False, 8)]
    expected = torch.Generator().manual_seed(5)
    torch.empty((), dtype=torch.int64).random_(generator=expected)  # the loader's base seed
    torch.randperm(16, generator=expected)


def looked_at(subject: Subject, group: str, name: str) -> Check:
    return next(check for check in examine(subject, [group]) if check.name == name)


def test_two_optimizers_that_share_a_parameter(capture: Capture) -> None:
    """It is stepped twice, which is found; an optimizer that was rebuilt and never steps again is none."""

    def script() -> None:
        net = model()
        torch.optim.SGD(net.parameters(), lr=0.1)
        first, second = torch.optim.SGD(net.parameters(), lr=0.1), torch.optim.SGD(net[3].parameters(), lr=0.1)
        for _ in range(9):
            plain(net).backward()
            second.step()
            first.step()

    check = looked_at(captured(capture, script), "parameters", "in the optimizer")
    assert (check.status, check.evidence["twice"]) == (Status.FAIL, ["3.bias", "3.weight"])


def test_modes_of_a_script(capture: Capture) -> None:
    """Training in eval mode is an error, an evaluation in train mode a warning."""

    def script() -> None:
        net = model().eval()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for _ in range(9):
            plain(net).backward()
            optimizer.step()

    check = looked_at(captured(capture, script), "gradient flow", "train mode")
    assert (check.status, check.code) == (Status.FAIL, "RCP804")


@pytest.mark.parametrize("forgotten", [True, False])
def test_the_mode_of_an_evaluation(capture: Capture, forgotten: bool) -> None:
    """A forward without gradients between the steps has its mode noted."""

    def script() -> None:
        net = model()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for _ in range(9):
            plain(net).backward()
            optimizer.step()
            net.train(forgotten)
            with torch.no_grad():
                net(X)
            net.train()

    found = {check.name: check.code for check in examine(captured(capture, script), ["gradient flow"])}
    assert found.get("evaluation mode") == ("RCP805" if forgotten else None)


def test_no_grad_around_a_part_that_is_not_frozen(capture: Capture) -> None:
    """It is a warning where the optimizer holds the part, and none where it is frozen or left out."""

    class Probe(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(3)
            self.body, self.head = nn.Linear(6, 4), nn.Linear(4, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                features = self.body(x).tanh()
            return self.head(features)

    def script() -> None:
        net = Probe()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for _ in range(9):
            plain(net).backward()
            optimizer.step()

    subject = captured(capture, script)
    check = looked_at(subject, "parameters", "reached by the loss")
    assert (check.status, check.code, check.evidence["not reached"]) == (
        Status.WARN,
        "RCP810",
        ["body.weight", "body.bias"],
    )
    subject.model.body.requires_grad_(False)  # type: ignore[operator, union-attr]
    assert looked_at(subject, "parameters", "reached by the loss").status is Status.PASS


def test_what_is_told_of_the_parameters(capture: Capture) -> None:
    """Frozen, tied and equal parameters, and decay on biases, are information."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(3)
            self.one, self.two, self.three = (nn.Linear(6, 6) for _ in range(3))
            self.two.weight = self.one.weight
            self.three.load_state_dict(self.one.state_dict())
            self.fixed = nn.Parameter(torch.randn(200), requires_grad=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.three(self.two(self.one(x))) * self.fixed.mean()

    def script() -> None:
        net = Net()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, weight_decay=0.1)
        for _ in range(9):
            net(X).square().mean().backward()
            optimizer.step()

    checks = {check.name: check for check in examine(captured(capture, script), ["parameters"])}
    assert checks["tied weights"].summary == "tied: one.weight = two.weight"
    assert "one.weight = three.weight" in checks["equal weights"].summary
    assert checks["frozen"].code == "RCP812"
    assert "3 scales and biases" in checks["decay of norms and biases"].summary
    rows = {row[0]: row for row in checks["table"].tables[0].rows}
    assert rows["one.weight"][1:7] == ("6 x 6", "float32", "yes", 0, 0.1, 0.1)
    assert {check.status for check in checks.values()} <= {Status.INFO, Status.PASS}


def test_a_checkpointed_part_is_computed_again(capture: Capture) -> None:
    """What runs within backward is no part of the next tape."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = model()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return checkpoint(self.net, x, use_reentrant=False)  # type: ignore[no-any-return]

    def script() -> None:
        net = Net()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for _ in range(9):
            plain(net).backward()
            optimizer.step()

    subject = captured(capture, script)
    assert [len(tape.needed) for tape in subject.batches] == [2, 2]
    assert [sum(node.function is None for node in tape.nodes) for tape in subject.batches] == [1, 1]
    compare(subject, 1, plain)


def test_arrays_of_a_data_set(capture: Capture) -> None:
    """Samples of numpy are compared like those of torch."""
    numpy = pytest.importorskip("numpy")

    class Arrays(torch.utils.data.Dataset):  # type: ignore[type-arg]
        def __init__(self, at: int) -> None:
            self.at = at

        def __len__(self) -> int:
            return 16

        def __getitem__(self, at: int) -> Any:
            generator = numpy.random.default_rng(self.at + at)
            return generator.normal(size=(4, 6)).astype("float32"), int(at % 3)

    def script() -> None:
        loader, _ = (torch.utils.data.DataLoader(Arrays(at), batch_size=4) for at in (0, 8))
        net = nn.Sequential(nn.Flatten(), nn.Linear(24, 3))
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for inputs, labels in loader:
            functional.cross_entropy(net(inputs), labels).backward()
            optimizer.step()

    check = looked_at(captured(capture, script), "data", "train and validation overlap")
    assert check.summary == "8 of 16 validation samples are among 16 training samples"
