"""The sweep over learning rates: what it reads from a curve, and that it leaves nothing behind."""

from __future__ import annotations

import math
import random
import time
from typing import Any

import numpy
import pytest
import torch
from preflight_subjects import adam, batches, cross_entropy, network, sgd, state_of, subject
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import ddpdebug
from ddpdebug.preflight.checks.lr_finder import LEAST_STEPS, check
from ddpdebug.preflight.checks.lr_sweep import End, Stop, Sweep, rates, verdict
from ddpdebug.preflight.output.results import Status

RATES = rates(1e-7, 10, 100)


def curve(fall_at: float, break_at: float, *, noise: float = 0.0, offset: float = 0.0) -> Sweep:
    """Return a sweep whose loss falls from 2.3 to 0.3 around one rate and rises from another on."""
    draw, stop, seen = random.Random(3), Stop(), []
    for rate in RATES:
        fallen = 2.3 - 2.0 / (1 + (fall_at / rate) ** 1.5)
        seen.append(offset + fallen + (rate / break_at) ** 3 + draw.gauss(0, noise))
        if stop(seen[-1]):
            return Sweep(rates=tuple(RATES[: len(seen)]), losses=tuple(seen), end=End.DIVERGED, current=1e-3)
    return Sweep(rates=tuple(RATES), losses=tuple(seen), end=End.ALL, current=1e-3)


def within(value: float | None, low: float, high: float) -> bool:
    return value is not None and low <= value <= high


@pytest.mark.parametrize("offset", [0.0, -2.3, -40.0, 1000.0])
@pytest.mark.parametrize("noise", [0.0, 0.05])
def test_the_suggestions_lie_where_the_curve_falls(noise: float, offset: float) -> None:
    """Also where the losses are negative, next to nothing or huge."""
    sweep = curve(1e-3, 0.3, noise=noise, offset=offset)
    if offset == 1000.0:  # a fall of 0.2 % is none
        assert sweep.steepest is None
        return
    assert within(sweep.steepest, 3e-4, 4e-3)
    assert within(sweep.tenth, 1e-3, 2e-2)
    assert within(sweep.edge, 0.1, 1.0)


def test_noise_is_no_fall() -> None:
    """A flat and a rising curve have no suggestion; a flat one does not break."""
    draw = random.Random(1)
    flat = Sweep(rates=tuple(RATES), losses=tuple(2.3 + draw.gauss(0, 0.2) for _ in RATES), end=End.ALL, current=0.1)
    rising = Sweep(rates=tuple(RATES), losses=tuple(1 + rate for rate in RATES), end=End.ALL, current=0.1)
    assert (flat.steepest, flat.tenth, flat.edge) == (None, None, None)
    assert (rising.steepest, rising.tenth) == (None, None)
    assert within(rising.edge, 0.005, 0.5)


def test_a_loss_that_scatters_by_its_own_size_is_not_judged() -> None:
    """Advantages have a mean of zero; a loss that merely differs between batches is judged."""
    draw = random.Random(1)

    def flat(mean: float) -> Status:
        losses = tuple(draw.gauss(mean, 0.2) for _ in RATES)
        return verdict(Sweep(rates=tuple(RATES), losses=losses, end=End.ALL, current=0.1)).status

    assert flat(0.01) is Status.INFO
    assert flat(2.3) is Status.WARN


def test_a_loss_that_has_a_ceiling_breaks_where_the_fall_is_lost() -> None:
    """It never rises above its start."""
    falls = [1 / (1 + (1e-3 / rate) ** 1.5) / (1 + (rate / 0.3) ** 3) for rate in RATES]
    sweep = Sweep(rates=tuple(RATES), losses=tuple(2.3 - 0.8 * fall for fall in falls), end=End.ALL, current=3.0)
    assert within(sweep.edge, 0.2, 2.0)
    assert (verdict(sweep).status, verdict(sweep).code) == (Status.WARN, "HLTH710")


def test_a_sweep_stops_when_the_loss_is_far_above_its_minimum() -> None:
    """A single outlier does not stop it, nor does noise around a loss that has come down to nothing."""
    stop = Stop()
    assert not any(stop(loss) for loss in [2.3] * 20 + [9.0] + [2.3] * 5)
    assert any(stop(loss) for loss in [20.0] * 10)
    small = Stop()
    assert not any(small(loss) for loss in [2.3] * 10 + [0.01] * 60 + [0.2, 0.1, 0.3, 0.2, 0.1])
    negative = Stop()
    assert not any(negative(loss) for loss in [-5.0] * 10 + [-9.0] * 10)
    assert any(negative(loss) for loss in [40.0] * 10)


@pytest.mark.parametrize(
    "current, status, code",
    [
        (1e-3, Status.PASS, ""),
        (0.1, Status.PASS, ""),
        (1.5, Status.WARN, "HLTH710"),
        (60.0, Status.FAIL, "HLTH710"),
        (1e-6, Status.WARN, "HLTH709"),
        (1e-5, Status.PASS, ""),
        (0.0, Status.INFO, ""),
    ],
)
def test_the_script_is_compared(current: float, status: Status, code: str) -> None:
    """Far too high, too high, far too low, as a warm-up begins, and in order."""
    sweep = curve(1e-3, 0.3)
    found = verdict(Sweep(rates=sweep.rates, losses=sweep.losses, end=sweep.end, current=current))
    assert (found.status, found.code) == (status, code)
    assert [text for _, text in found.plots[0].marks][:3] == ["steepest descent", "minimum / 10", "breaks"]
    assert bool(found.hypotheses) is bool(found.actions) is (status in {Status.WARN, Status.FAIL})


@pytest.mark.parametrize(
    "make, status, code",
    [
        (sgd(0.05), Status.PASS, ""),
        (adam(2e-3), Status.PASS, ""),
        (sgd(500.0), Status.FAIL, "HLTH710"),
        (sgd(1e-5), Status.WARN, "HLTH709"),
        (lambda model: torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1), Status.WARN, "HLTH709"),
    ],
)
def test_a_subject_is_swept_and_left_alone(make: Any, status: Status, code: str) -> None:
    """Dropout, batch normalisation and a loss that writes into its batch included."""

    def loss_of(model: nn.Module, batch: Any) -> Any:
        batch[0].mul_(0.5)
        random.random()
        numpy.random.rand()  # noqa: NPY002 - the global generator
        return cross_entropy(model, batch)

    given = subject(network(nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.1)), loss_of=loss_of, optimizer_for=make)
    before = state_of(given)
    (found,) = check(given, seconds=100)
    assert (found.status, found.code) == (status, code), found.summary
    assert state_of(given) == before


def test_what_cannot_be_swept_is_skipped_with_the_reason() -> None:
    """No optimizer, no batches, steps that are too slow, an optimizer that needs a closure."""

    def slow(model: nn.Module, batch: Any) -> Any:
        time.sleep(0.01)
        return cross_entropy(model, batch)

    def reason(seconds: float = 100, **changes: Any) -> str:
        (found,) = check(subject(**changes), seconds=seconds)
        assert found.status is Status.SKIPPED
        return found.summary

    assert reason(optimizer_for=None) == "there is no optimizer"
    assert reason(batches=[]) == "there are no batches"
    assert f"needs at least {LEAST_STEPS} of them" in reason(0.1, loss_of=slow)
    assert "closure" in reason(optimizer_for=lambda model: torch.optim.LBFGS(model.parameters()))


def test_a_loss_that_is_nan_at_once_fails() -> None:
    """The sweep does not go on."""
    (found,) = check(subject(loss_of=lambda m, b: (cross_entropy(m, b)[0] * math.nan, None)))
    assert (found.status, found.code) == (Status.FAIL, "NUM302")


class Output:
    def __init__(self, loss: torch.Tensor) -> None:
        self.loss = loss


class Recording:
    """A loss that notes the learning rates of the groups whenever it is computed."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.seen: list[tuple[float, ...]] = []
        self._optimizer = optimizer

    def __call__(self, model: nn.Module, batch: Any) -> torch.Tensor:
        self.seen.append(tuple(float(group["lr"]) for group in self._optimizer.param_groups))
        return cross_entropy(model, batch)[0]


@pytest.mark.parametrize("tensor", [False, True])
def test_the_rate_grows_with_optimizer_steps_and_groups_keep_their_ratio(tensor: bool) -> None:
    """Three micro-batches see one rate; a group with a tenth of the rate keeps it, as number and as tensor."""
    model = network()
    kinds = [torch.tensor(lr) if tensor else lr for lr in (0.02, 0.002)]
    groups = [{"params": model[i].parameters(), "lr": lr} for i, lr in zip((0, 2), kinds, strict=True)]
    optimizer = torch.optim.AdamW(groups)
    loss = Recording(optimizer)
    sweep = ddpdebug.find_lr(model, optimizer, loss, batches(), micro_batches=3, highest=1e-3, steps=40)
    assert len(sweep.rates) == 40
    assert len(loss.seen) == 120
    assert [seen[0] for seen in loss.seen[::3]] == pytest.approx(sweep.rates)
    assert loss.seen[::3] == loss.seen[2::3]
    assert all(low == pytest.approx(high / 10) for high, low in loss.seen)
    assert [float(group["lr"]) for group in optimizer.param_groups] == pytest.approx([0.02, 0.002])
    assert sweep.current == pytest.approx(0.02)


class HalfScaler:
    """A GradScaler as far as a step goes: the scale begins too high, and steps are skipped until it fits."""

    def __init__(self) -> None:
        self.now, self.taken, self.skipped = 2.0**16, 0, 0
        self._bad = False

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        return loss * self.now

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        self._bad = self.now > 2.0**12
        self.skipped, self.taken = self.skipped + self._bad, self.taken + (not self._bad)
        if not self._bad:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.grad /= self.now
            optimizer.step()

    def update(self) -> None:
        self.now = self.now / 2 if self._bad else self.now

    def get_scale(self) -> float:
        return self.now

    def state_dict(self) -> dict[str, float]:
        return {"scale": self.now}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.now = state["scale"]


def test_a_step_that_the_scaler_skips_is_taken_again() -> None:
    """The rate does not grow, the losses are unscaled, and the scale is put back."""
    model, scaler = network(), HalfScaler()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss = Recording(optimizer)
    scaled = ddpdebug.find_lr(model, optimizer, loss, batches(1), scaler=scaler, highest=0.1, steps=30)
    plain = ddpdebug.find_lr(model, optimizer, loss, batches(1), highest=0.1, steps=30)
    assert (scaler.skipped, scaler.taken, scaler.now) == (4, 30, 2.0**16)
    assert scaled.rates == plain.rates
    assert scaled.losses == pytest.approx(plain.losses, rel=1e-4)
    assert [seen[0] for seen in loss.seen[:5]] == pytest.approx([1e-7] * 5)


@pytest.mark.parametrize("make", [adam(1e-3), sgd(0.1)])
@pytest.mark.parametrize("warm", [False, True])
def test_find_lr_puts_everything_back_bit_for_bit(make: Any, warm: bool) -> None:
    """Before training and in the middle of it: weights, gradients, statistics, optimizer, schedule, generators."""
    model = network(nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2))
    optimizer = make(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    data = TensorDataset(torch.cat([x for x, _ in batches()]), torch.cat([y for _, y in batches()]))
    loader = DataLoader(data, batch_size=16, shuffle=True, generator=torch.Generator().manual_seed(5))

    def loss_fn(model: nn.Module, batch: Any) -> tuple[torch.Tensor, Any]:
        return cross_entropy(model, batch)

    for batch in list(loader)[: 3 if warm else 0]:
        optimizer.zero_grad()
        cross_entropy(model, batch)[0].backward()
        optimizer.step()
        scheduler.step()
    before = state_of(model, optimizer), loader.generator.get_state(), scheduler.state_dict()
    sweep = ddpdebug.find_lr(model, optimizer, loss_fn, loader, steps=60)
    after = state_of(model, optimizer), loader.generator.get_state(), scheduler.state_dict()
    assert after[0] == before[0]
    assert torch.equal(after[1], before[1])
    assert after[2] == before[2]
    assert sweep.steepest is not None
    assert "steepest descent" in sweep.text()


def test_find_lr_puts_everything_back_when_the_loss_raises() -> None:
    """The user's error comes out, the model is as it was."""
    model = network()
    optimizer = torch.optim.Adam(model.parameters())
    calls = iter(range(100))

    def loss_fn(model: nn.Module, batch: Any) -> torch.Tensor:
        if next(calls) == 7:
            raise LookupError("mine")
        return cross_entropy(model, batch)[0]

    before = state_of(model, optimizer)
    with pytest.raises(LookupError, match="mine"):
        ddpdebug.find_lr(model, optimizer, loss_fn, batches())
    assert state_of(model, optimizer) == before


@pytest.mark.parametrize(
    "wrong", [{"lowest": 0.0}, {"lowest": 1.0, "highest": 0.1}, {"steps": 5}, {"micro_batches": 0}]
)
def test_arguments_that_make_no_sense_are_refused(wrong: dict[str, Any]) -> None:
    """Before anything is run."""
    with pytest.raises(ddpdebug.UsageError, match="find_lr needs"):
        ddpdebug.find_lr(network(), sgd(0.1)(network()), cross_entropy, batches(), **wrong)


@pytest.mark.parametrize("wrapped", [lambda loss: loss, lambda loss: (loss, 3), lambda loss: {"loss": loss}, Output])
def test_the_loss_is_found_in_what_is_returned(wrapped: Any) -> None:
    """A tensor, a tuple, a dictionary, an output with a loss."""
    model = network()
    optimizer = sgd(0.1)(model)
    swept = ddpdebug.find_lr(model, optimizer, lambda m, b: wrapped(cross_entropy(m, b)[0]), batches(), steps=30)
    assert swept.losses[0] == pytest.approx(1.6, abs=0.3)


def test_a_loss_that_is_none_is_refused() -> None:
    """With the type that was returned; a number cannot be trained on, and a tensor without a graph neither."""
    model = network()
    for loss_fn, words in ((lambda m, b: None, "got NoneType"), (lambda m, b: {"nll": 1}, "got NoneType")):
        with pytest.raises(ddpdebug.UsageError, match=words):
            ddpdebug.find_lr(model, sgd(0.1)(model), loss_fn, batches())
    with pytest.raises(RuntimeError, match="no parameter that is trainable"):
        ddpdebug.find_lr(model, sgd(0.1)(model), lambda m, b: torch.ones(()), batches())


def test_batches_that_end_are_an_error() -> None:
    """An iterator cannot be begun anew."""
    model = network()
    with pytest.raises(ddpdebug.UsageError, match="give a list or a DataLoader"):
        ddpdebug.find_lr(model, sgd(0.1)(model), cross_entropy, iter(batches()))
