"""What is seen of the training loop, and what is let pass because people do it on purpose."""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    CosineAnnealingWarmRestarts,
    ExponentialLR,
    LambdaLR,
    LinearLR,
    LRScheduler,
    MultiStepLR,
    ReduceLROnPlateau,
    SequentialLR,
    StepLR,
)
from torch.utils.checkpoint import checkpoint

from ddpdebug.detectors.data.data903_invalid_labels import InvalidLabels
from ddpdebug.detectors.rank.rank108_loss_outlier import LossOutlier
from ddpdebug.detectors.rcp.rcp802_softmax_before_loss import SoftmaxBeforeLoss
from ddpdebug.detectors.rcp.rcp805_validation_in_train_mode import ValidationInTrainMode
from ddpdebug.detectors.rcp.rcp806_scheduler_out_of_step import SchedulerOutOfStep
from ddpdebug.detectors.rcp.rcp812_mostly_frozen import MostlyFrozen
from ddpdebug.detectors.rcp.rcp819_loss_broadcast import LossBroadcast
from ddpdebug.instrument.probes import Probes
from ddpdebug.isolation.guard import Guard
from ddpdebug.probes import training_events as events
from ddpdebug.probes.built import Built
from ddpdebug.probes.entries import entries_of
from ddpdebug.probes.loop_calls import Adding, Losses
from ddpdebug.probes.plain_models import PlainModel
from ddpdebug.probes.record import SinceLastStep, StepRecord
from ddpdebug.probes.step_digests import ParameterDigests
from ddpdebug.probes.threads import Threads
from ddpdebug.probes.training_events import BackwardBegan, BackwardEnded, ModuleForwardBegan
from ddpdebug.probes.training_loop.labels import Labels
from ddpdebug.probes.training_loop.loss_graph import (
    divisor,
    facts,
    is_mean,
    is_multiplied,
    is_scaled_in_part,
    made_of_softmax,
    share,
    soft_target_input,
    softmax_of_one,
    terms,
)
from ddpdebug.probes.training_loop.modes import Modes
from ddpdebug.probes.training_loop.parameter_ownership import Audit, unregistered
from ddpdebug.probes.training_loop.rollouts import Rollouts
from ddpdebug.probes.training_loop.schedulers import Schedules, length_of
from ddpdebug.probes.training_loop.targets import Targets
from ddpdebug.probes.training_loop.training_loop import RecipeNotes
from ddpdebug.probes.training_loop.zero_grad import Cleared, Clearing
from ddpdebug.schema import announcements
from ddpdebug.schema.announcements import (
    Announcement,
    InitialLoss,
    LabelCounts,
    LossInput,
    TargetRange,
    TrainModeValidation,
    UnusedSchedule,
)
from ddpdebug.schema.finding import Finding, Severity
from ddpdebug.schema.row import Flag

GUARD = Guard(lambda part, message: pytest.fail(f"{part}: {message}"))
ENTRIES = entries_of(GUARD)


RULES = [SoftmaxBeforeLoss(), LossBroadcast(), InvalidLabels()]


def said(loss: torch.Tensor) -> list[Announcement]:
    """What is told of a loss."""
    return [fact for term in terms(loss, by_scaler=False) for fact in facts(term)]


def codes(loss: torch.Tensor) -> list[str]:
    """What the rules say about it."""
    told = said(loss)
    return [finding.code for rule in RULES for fact in told for finding in rule.compare(fact.topic, {0: fact})]


def test_softmax_before_the_loss_is_seen_through_changes_of_form() -> None:
    """A softmax or sigmoid under a loss on logits is named, and log_softmax before cross entropy is not."""
    x = torch.randn(6, 5, 4, requires_grad=True)
    y = torch.randint(0, 4, (30,))
    assert codes(functional.cross_entropy(x.softmax(-1).reshape(30, 4), y)) == ["RCP802"]
    assert codes(functional.nll_loss(x.softmax(-1).reshape(30, 4), y)) == ["RCP802"]
    assert codes(functional.binary_cross_entropy_with_logits(x.sigmoid(), torch.ones_like(x)) / 4) == ["RCP802"]
    assert codes(functional.cross_entropy(x.reshape(30, 4), y)) == []
    assert codes(functional.cross_entropy(x.log_softmax(-1).reshape(30, 4), y)) == []
    assert codes(functional.nll_loss(x.log_softmax(-1).reshape(30, 4), y)) == []
    assert codes(functional.cross_entropy(torch.softmax(x, 1).mean(1) @ torch.randn(4, 4), y[:6])) == []  # attention


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_softmax_before_a_cross_entropy_of_soft_targets_is_seen(reduction: str) -> None:
    """Soft and smoothed targets make a loss of several nodes, whose input is named like that of one node."""
    x, y = torch.randn(6, 4, requires_grad=True), torch.randint(0, 4, (6,))
    soft = torch.rand(6, 4).softmax(-1)

    def said_of(loss: torch.Tensor) -> list[str]:
        fact = soft_target_input(loss)
        return [] if fact is None else [f.code for f in SoftmaxBeforeLoss().compare(fact.topic, {0: fact})]

    loss = functools.partial(functional.cross_entropy, reduction=reduction)
    assert said_of(loss(x.softmax(-1), soft)) == ["RCP802"]
    assert said_of(0.5 * loss(x.softmax(-1), soft, weight=torch.rand(4)) + x.mean()) == ["RCP802"]
    assert said_of(loss(x.softmax(-1), y, label_smoothing=0.1)) == ["RCP802"]
    assert said_of(loss(x, soft)) == said_of(loss(x, y, label_smoothing=0.1)) == []
    assert said_of((x.softmax(-1) * soft).sum()) == []  # a value of a policy
    teacher = torch.randn(6, 4, requires_grad=True).softmax(-1)  # one that learns as well
    assert said_of(-(teacher * x.log_softmax(-1)).sum(-1).mean()) == []


@pytest.mark.filterwarnings("ignore:reduction. 'mean'")
def test_kl_div_of_probabilities() -> None:
    """Its first argument is to be log probabilities, with whatever weight and beside whatever other loss."""
    x, soft = torch.randn(6, 4, requires_grad=True), torch.rand(6, 4).softmax(-1)

    def said_of(loss: torch.Tensor) -> list[str]:
        told = made_of_softmax(terms(loss, by_scaler=False), loss)
        return [found.code for fact in told for found in SoftmaxBeforeLoss().compare(fact.topic, {0: fact})]

    for reduction in ("batchmean", "sum", "mean"):
        loss = functools.partial(functional.kl_div, target=soft, reduction=reduction)
        assert said_of(loss(x.softmax(-1))) == ["RCP802"]
        assert said_of(4 * loss(x.softmax(-1)) + functional.cross_entropy(x, torch.ones(6).long())) == ["RCP802"]
        assert said_of(4 * loss(x.log_softmax(-1))) == []
        assert said_of(loss(x.softmax(-1).add(1e-8).log())) == []
    assert said_of((torch.ones(4) - 3 * soft * x.softmax(-1)).mean()) == []
    assert said_of(1 - (soft * x.softmax(-1)).sum()) == []  # an overlap


def test_broadcast_in_the_loss() -> None:
    """N predictions that meet N targets in a table are named, and a table that was asked for is not."""
    p, t = torch.randn(8, 1, requires_grad=True) * 1, torch.randn(8)
    with pytest.warns(UserWarning, match="target size"):
        assert codes(functional.smooth_l1_loss(p, t)) == ["RCP819"]
    for loss in (((p - t) ** 2).mean(), (p - t).abs().mean(), (-(p * t)).mean()):
        assert codes(loss) == ["RCP819"]
    square = p - t
    assert codes((square * square).mean()) == ["RCP819"]
    off, weight = square.abs(), torch.rand(8)
    assert codes((torch.where(off < 1, 0.5 * off**2, off - 0.5) * weight).mean()) == ["RCP819"]
    assert codes((1 + square**2).log().mean()) == ["RCP819"]
    value = torch.randn(8, 4, requires_grad=True).split([3, 1], 1)[1]  # one of several results of a model
    assert codes(value.sum() + 0.5 * (value - t).pow(2).mean() - 0.01 * value.exp().mean()) == ["RCP819"]
    flat = torch.randn(8, requires_grad=True) * 1
    for loss in (
        ((flat - t) ** 2).mean(),
        ((p - t[:, None]) ** 2).mean(),
        ((flat[:, None] - t) ** 2).mean(),  # all pairs, by an explicit dimension
        ((flat[:, None] - flat[None]) ** 2).mean(),
        ((torch.randn(8, 8, requires_grad=True) * t) ** 2).mean(),
        (torch.where(flat < t, flat * t, flat) * weight).mean(),
        ((flat[:, None] - t).abs() * weight).mean(),
    ):
        assert codes(loss) == []


def test_binary_targets_outside_of_0_and_1() -> None:
    """Targets that binary cross entropy has no meaning for are named with their range."""
    x = torch.randn(9, requires_grad=True)
    loss = functional.binary_cross_entropy_with_logits(x, torch.where(x > 0, 1.0, -1.0))
    assert codes(loss) == ["DATA903"]
    assert [fact.low for fact in said(loss) if isinstance(fact, TargetRange)] == [-1]
    assert codes(functional.binary_cross_entropy_with_logits(x, torch.rand(9))) == []


@pytest.mark.parametrize(
    "targets, code",
    [
        ((0.0, 1, 0, 1, 1), ["DATA903"]),
        ((1.0, -1, 1, -1, 1), []),
        ((1.0, 1, 1, 1, 1), []),
        ((-1.0, -1, -1, -1, -1), []),
        ((1.0, -1, 0, -1, 1), []),  # some pairs are left out
    ],
)
def test_targets_of_a_loss_that_knows_1_and_minus_1(targets: tuple[float, ...], code: list[str]) -> None:
    """Zeros are no case of it; those that stand beside both cases, or are few, may be left out on purpose."""
    x, y = torch.randn(40, 3, requires_grad=True), torch.tensor(targets * 8)
    assert codes(functional.cosine_embedding_loss(x, torch.randn(40, 3), y, margin=0.2)) == code
    assert codes(functional.hinge_embedding_loss(x[:, 0], y)) == code
    assert codes(functional.soft_margin_loss(x[:, 0], y)) == code
    assert codes(functional.cosine_embedding_loss(x[:5], torch.randn(5, 3), y[:5])) == []
    facts = said(functional.cosine_embedding_loss(x, x.detach(), y))
    cases = [(fact.loss, fact.neither, fact.targets) for fact in facts if isinstance(fact, announcements.TargetCases)]
    assert cases == [("CosineEmbedding", 16, 40)] * len(code)


def test_a_masked_sum_of_two_cases_is_no_fault() -> None:
    """Written by hand, with another form or with both cases."""
    x, y = torch.randn(48, requires_grad=True), torch.tensor((1, 0, 2, 1, 0, 2) * 8)
    zero, table = torch.zeros(48), torch.randn(8, 8, requires_grad=True)
    same, other = torch.eye(8) > 0, torch.eye(8) < 0
    for loss in (
        (torch.where(y == 1, 1 - x, zero) + torch.where(y == 2, (x - 0.2).clamp_min(0), zero)).mean(),
        (torch.where(y == 1, 1 - x, zero) + torch.where(y == 3, x, zero)).mean(),
        (torch.where(y == 1, 1 - x, zero) + (x - 0.2).clamp_min(0)).mean(),
        (torch.where(same, 1 - table, 0.0) + torch.where(other, (1 - table).clamp_min(0), 0.0)).mean(),
    ):
        assert codes(loss) == []


def test_what_a_loss_is_given_is_told_whatever_it_is() -> None:
    """Operations, ranges and shapes are said as they are; which of them are a mistake, a rule says."""
    x, y = torch.randn(6, 3, requires_grad=True), torch.randint(0, 3, (6,))
    (fact,) = said(functional.cross_entropy(torch.relu(x).reshape(6, 3), y))
    assert fact == LossInput(loss="NllLoss", before=("LogSoftmax", "Relu"), shape=(6, 3), total=pytest.approx(1.0))
    fact, span = said(functional.binary_cross_entropy_with_logits(x * 2, torch.full((6, 3), 0.5)))
    assert fact == LossInput(
        loss="BinaryCrossEntropyWithLogits", before=("Mul", "torch::autograd::AccumulateGrad"), shape=(6, 3)
    )
    assert span == TargetRange(loss="BinaryCrossEntropyWithLogits", low=0.5, high=0.5)
    (spread,) = said((x[:, :1] * 1 - torch.zeros(6, 5)).abs().mean())
    assert spread == announcements.LossBroadcast(loss="Mean", prediction=(6, 1), result=(6, 5))
    (spread,) = said((y[:, None] - x[:, 0][:, None]).pow(2).mean() * 1 + ((x[:, 0][:, None] - y) ** 2).mean())
    assert spread == announcements.LossBroadcast(loss="Mean", prediction=(6, 1), result=(6, 6), explicit=True)


def test_a_loss_of_no_sample_is_told_like_another() -> None:
    """A batch without labels: sums of nothing are 0, means are NaN, and the probe goes on."""
    x, y = torch.randn(0, 3, requires_grad=True), torch.randint(0, 3, (0,))
    logs, flat, zeros = x.log_softmax(-1), x[:, 0] * 1, torch.zeros(0, 3)
    for loss in (
        functional.cross_entropy(x, y, reduction="sum"),
        functional.cross_entropy(x, zeros),
        functional.nll_loss(logs, y),
        functional.kl_div(logs, zeros, reduction="batchmean"),
        functional.mse_loss(x * 1, zeros),
        functional.binary_cross_entropy_with_logits(x, zeros),
        functional.binary_cross_entropy(x.sigmoid(), zeros),
        functional.cosine_embedding_loss(x, zeros, y),
        functional.hinge_embedding_loss(flat, y),
        functional.soft_margin_loss(flat, y),
        -(logs.exp() * zeros).sum(1).mean(),
        ((flat - zeros[:, 0]) ** 2).mean(),
    ):
        assert codes(loss) == []
        share(loss, by_scaler=False)
        for term in terms(loss, by_scaler=False):
            Labels().read(term)


def test_a_softmax_over_one_entry_makes_a_loss_constant() -> None:
    """By class numbers, by probabilities or by hand; attention over one key and rows of several are no such thing."""
    one, three = torch.randn(4, 1, requires_grad=True) * 1, torch.randn(4, 3, requires_grad=True) * 1
    none, share = torch.zeros(4, dtype=torch.long), torch.rand(4, 1)
    for loss in (
        functional.cross_entropy(one, none),
        functional.cross_entropy(one, share) / 2,
        -(one.softmax(-1).log() * share).sum(1).mean(),
        functional.nll_loss(three.log_softmax(1), none) + functional.cross_entropy(one, none),
    ):
        found = softmax_of_one(loss)
        assert found is not None
        assert found.shape == (4, 1)
    for loss in (
        functional.cross_entropy(three, none),
        functional.cross_entropy(three, three.detach().softmax(1)),
        functional.binary_cross_entropy_with_logits(one, share),
        functional.mse_loss(one.softmax(1) @ torch.randn(1, 3), three),
    ):
        assert softmax_of_one(loss) is None


def test_a_loss_is_told_once_and_again_when_something_is_new() -> None:
    """The number of samples and where targets lie between two whole numbers are nothing new."""
    told: list[Any] = []
    bus = _probes(lambda fact, number=None: told.append(fact)).bus

    def step(samples: int, highest: float) -> int:
        x = torch.randn(samples, 1, requires_grad=True)
        target = torch.linspace(0.01, highest, samples)[:, None]
        for loss in (functional.binary_cross_entropy_with_logits(x * 1, target), (x * 1 - target[:, 0]).abs().mean()):
            bus.emit(BackwardBegan([loss]))
            bus.emit(BackwardEnded())
        number = len(told)
        told.clear()
        return number

    assert step(8, 1.0) == 3
    assert [step(5, 1.0), step(8, 0.7), step(8, 0.99)] == [0, 0, 0]
    assert step(8, 1.5) == 1


def test_division_of_the_loss_is_seen() -> None:
    """A mean loss counts as scaled behind any factor, but not behind that of the loss scaler."""
    x = torch.randn(4, 3, requires_grad=True)
    y = torch.randint(0, 3, (4,))
    plain, divided = functional.cross_entropy(x, y), functional.cross_entropy(x, y) / 4
    assert [term.scaled for term in terms(plain, by_scaler=False)] == [False]
    assert [term.scaled for term in terms(divided, by_scaler=False)] == [True]
    assert [term.scaled for term in terms(plain * torch.tensor(1024.0), by_scaler=True)] == [False]
    assert [term.scaled for term in terms(divided * torch.tensor(1024.0), by_scaler=True)] == [True]
    assert [term.scaled for term in terms(plain + 0.1 * x.pow(2).mean(), by_scaler=False)] == [False, True]
    assert not is_mean(terms(functional.cross_entropy(x, y, reduction="sum"), by_scaler=False)[0])


def test_the_number_that_a_loss_is_divided_by() -> None:
    """At last and by a number of the script's: not by the scaler, not by what was computed."""
    x = torch.randn(4, requires_grad=True)
    loss, scale = x.square().mean(), torch.tensor(1024.0)
    assert [divisor(one, by_scaler=False) for one in (loss / 4, loss * 0.25, 0.25 * loss)] == [4.0, 4.0, 4.0]
    assert divisor(loss / 4 * scale, by_scaler=True) == divisor(scale * (loss / 4), by_scaler=True) == 4.0
    others = (loss, loss + 1, loss / x.sum(), loss * 0, x.detach().requires_grad_())
    assert [divisor(one, by_scaler=False) for one in others] == [1.0] * 5


def test_the_share_of_the_labels_that_a_loss_is_the_sum_over() -> None:
    """By all numbers that it is divided by, and without labels that are ignored; nothing for a mean or another loss."""
    x, y = torch.randn(6, 5, requires_grad=True), torch.tensor([1, 2, -100, 3, -100, 0])
    total, scale = functional.cross_entropy(x, y, reduction="sum"), torch.tensor(1024.0)
    loss = total / torch.tensor(16)
    shares = [share(one, by_scaler=False) for one in (loss, 2 * loss, total)]
    assert [one() for one in shares if one is not None] == [0.25, 0.5, 4.0]
    scaled = share(loss * scale, by_scaler=True)
    assert scaled is not None
    assert scaled() == 0.25
    others = functional.cross_entropy(x, y) / 16, total / x.sum(), x.square().sum() / 16, x.detach().requires_grad_()
    assert [share(one, by_scaler=False) for one in others] == [None] * 4


@pytest.mark.parametrize(
    "shares, step",
    [
        ([0.5, 0.5], 3.0),
        ([0.7, 0.1], 3.0),  # another rank has more labels
        ([1.0, 1.0], 1.5),  # each is divided by its own labels
        ([128.0, 128.0], 1.5),  # sums that nothing divides
        ([0.5, None], 1.5),
        ([0.01, 0.01], 1.5),
        ([], 1.5),
    ],
)
def test_losses_that_are_divided_by_the_labels_of_all_micro_batches_add_up(
    shares: list[float | None], step: float
) -> None:
    """As trainers do that count tokens; a window that was cut short is one of its own."""
    part = Losses(
        given=[lambda: 1.0, lambda: 2.0],
        divisors=[7.0, 7.0],
        label_shares=[None if one is None else (lambda one=one: one) for one in shares],
    )
    record = StepRecord(optimizer=0, step=0, flags=Flag(0), since=SinceLastStep())
    assert part.columns(record)["loss"] == step


def test_whether_losses_add_up_is_decided_by_the_first_steps() -> None:
    """Labels that are left out by chance do not make the loss of a step another thing than that of the step before."""
    adding = Adding()
    assert [adding.holds(parts) for parts in ([0.5], [1.0, 0.9], [0.7, 0.6], [0.9, 0.9])] == [False] * 4
    adding = Adding()
    assert [adding.holds(parts) for parts in ([0.5, 0.4], [0.8, 0.8], [1.0])] == [True, True, False]
    adding = Adding()  # one whose first share is far from the others'
    assert [adding.holds([part / 2] * 2) for part in (math.nan, 1.6, 0.8, 1.0)] == [False, False, True, True]
    assert all(adding.holds([0.5, 0.5]) for _ in range(20))
    assert all(adding.holds([1.0, 1.0]) for _ in range(20))


@pytest.mark.parametrize(
    "losses, divisors, step",
    [
        ([1.0, 2.0], [2.0, 2.0], 3.0),
        ([1.0, 2.0], [1.0, 1.0], 1.5),
        ([1.0, 2.0], [4.0, 4.0], 6.0),  # a window that was cut short
        ([1.0, 2.0], [3.0, 3.0], 1.5),  # the average of three heads
        ([1.0, 2.0], [2.0, 1.0], 1.5),
        ([1.0, 2.0], [2.0, None], 1.5),
        ([3.0], [1.0], 3.0),
        ([3.0], [2.0], 3.0),
        ([0.5], [4.0], 2.0),
    ],
)
def test_the_loss_of_a_step_is_what_the_script_means(
    losses: list[float], divisors: list[float | None], step: float
) -> None:
    """The sum of losses that are shares of one, also where some are missing; the mean of others. Four were usual."""
    part = Losses(given=[lambda value=value: value for value in losses], divisors=divisors)  # type: ignore[misc]
    assert part.settle(4) == (2 if divisors == [2.0, 2.0] else 4)
    record = StepRecord(optimizer=0, step=0, flags=Flag(0), since=SinceLastStep())
    assert part.columns(record)["loss"] == step


def test_saved_tensors_of_the_user_are_not_unpacked() -> None:
    """Hooks of the user on saved tensors are not run by looking at the graph."""
    unpacked = []
    x, y = torch.randn(4, 3, requires_grad=True), torch.randint(0, 3, (4,))
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: unpacked.append(t) or t):
        loss = functional.cross_entropy(x.softmax(1), y)
    assert codes(loss) == ["RCP802"]
    labels = Labels()
    for term in terms(loss, by_scaler=False):
        labels.read(term)
    assert not unpacked
    assert labels.counts() is None
    assert codes(functional.cross_entropy(checkpoint(nn.Linear(3, 3), x, use_reentrant=False), y)) == []


def test_labels_that_are_ignored_do_not_count() -> None:
    """Ignored labels are no class, and one class in all others is seen."""
    labels = Labels()
    x = torch.randn(8, 3, requires_grad=True)
    y = torch.tensor([2, 2, -100, 2, 2, 2, -100, 2])
    labels.read(terms(functional.cross_entropy(x, y), by_scaler=False)[0])
    detail: dict[str, object] = {}
    assert labels.take(detail)
    assert detail == {"label": 2, "labels": 6}
    counts = labels.counts()
    assert counts is not None
    assert (counts.seen, counts.present, counts.share) == (6, 1, 1.0)
    labels.read(terms(functional.cross_entropy(x, torch.arange(8) % 3), by_scaler=False)[0])
    assert not labels.take({})


@pytest.mark.parametrize(
    ("targets", "padded"),
    [
        ([1, 2, 0, 0, 0, 2, 0, 0], 5),
        ([1, 2, 0, 1, 2, 1, 0, 2], 0),  # each text ends with it
        ([1, 2, 2, 1, 2, 1, 1, 2], 0),
    ],
)
def test_padding_among_the_labels(targets: list[int], padded: int) -> None:
    """It comes several times in a row, of what the model's embedding pads with."""
    labels = Labels()
    labels.read(
        terms(functional.cross_entropy(torch.randn(8, 3, requires_grad=True), torch.tensor(targets)), by_scaler=False)[
            0
        ]
    )
    models = [nn.Sequential(nn.Embedding(5, 2, padding_idx=1), nn.Embedding(3, 2, padding_idx=0))]
    counts, other = labels.counts(models), labels.counts()
    assert counts is not None
    assert other is not None
    assert (counts.padding, counts.padded, other.padding, other.padded) == (0, padded, None, 0)


def write(model: nn.Module, change: str) -> None:
    for p in model.parameters():
        assert p.grad is not None
        p.grad.data.zero_() if change == "old style" else p.grad.mul_(0.5)


def uphill(model: nn.Linear, optimizer: torch.optim.Optimizer) -> None:
    """Move the parameters and clear, as sharpness-aware minimisation does."""
    with torch.no_grad():
        model.weight.add_(0.01)
    optimizer.zero_grad()


UNTOUCHED = Cleared(carried=False, gone=False, discards=0, written=False)


def loop(clear: str, steps: int = 4) -> list[Cleared]:
    """Train with one way to clear gradients; return what was seen before each step."""
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    places = {
        "before each backward": {"before backward": optimizer.zero_grad},
        "before the step": {"before step": lambda: optimizer.zero_grad(set_to_none=False)},
        "after": {"after step": optimizer.zero_grad},
        "zeros": {"after step": lambda: optimizer.zero_grad(set_to_none=False)},
        "old style": {"after step": lambda: write(model, "old style")},
        "decay": {"after step": lambda: write(model, "decay")},
        "perturb": {"after first backward": lambda: uphill(model, optimizer), "after step": optimizer.zero_grad},
        "never": {},
    }[clear]
    clearing, seen = Clearing(), []

    def come_to(place: str) -> None:
        places.get(place, lambda: None)()

    clearing.of(optimizer)
    for _ in range(steps):
        for micro in ("first", "second"):
            come_to("before backward")
            clearing.begin_backward()
            model(torch.randn(4, 3)).pow(2).mean().backward()
            clearing.end_backward()
            come_to(f"after {micro} backward")
        come_to("before step")
        seen.append(clearing.before_step(optimizer))
        optimizer.step()
        clearing.after_step(optimizer)
        come_to("after step")
    return seen


def test_gradients_that_are_cleared_in_any_way_are_not_carried_over() -> None:
    """All ways to clear are seen, an accumulation is none, and only a loop without any carries gradients over."""
    for clear in ("after", "zeros", "old style", "decay", "perturb"):
        assert loop(clear) == [UNTOUCHED] * 4, clear
    assert loop("never") == [UNTOUCHED] + [UNTOUCHED._replace(carried=True)] * 3


@pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad")  # LBFGS does, before torch 2.12
@pytest.mark.parametrize(
    ("clears", "carried"),
    [
        ("in each evaluation", [False] * 3),
        ("before each step", [True] * 3),  # of an evaluation before, in the same step
        ("never", [True] * 3),
        ("after each step, of one evaluation", [False] * 3),
        ("never, of one evaluation", [False, True, True]),
    ],
)
def test_gradients_that_a_closure_adds_to(clears: str, carried: list[bool]) -> None:
    """Two halves of a batch are one evaluation; what an evaluation before has left does not belong to it."""
    records: list[Any] = []
    probes = Probes(Guard(lambda *_: None), records.append, lambda *_: None, lambda *_: True)
    model = nn.Linear(3, 1)
    one = clears.endswith("of one evaluation")
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=1 if one else 3)
    probes.bus.emit(events.OptimizerBuilt(optimizer))

    def closure() -> torch.Tensor:
        if clears == "in each evaluation":
            optimizer.zero_grad()
        for half in torch.randn(2, 4, 3):
            loss = (model(half) - 1).square().mean()
            probes.bus.emit(events.BackwardBegan([loss]))
            loss.backward()
            probes.bus.emit(events.BackwardEnded())
        return loss

    for _ in range(3):
        if clears == "before each step":
            optimizer.zero_grad()
        probes.bus.emit(events.StepBegan(optimizer, closure=True))
        optimizer.step(closure)
        probes.bus.emit(events.StepEnded(optimizer))
        if clears.startswith("after each step"):
            optimizer.zero_grad()
    probes.remove()
    probes.release()
    flags = [record.since.parts[RecipeNotes].flags for record in records]
    assert [bool(flag & Flag.GRADS_CARRIED) for flag in flags] == carried
    assert {record.fields["without_grad"] for record in records} == {0}  # before the closure there were none


@pytest.mark.parametrize("again", [False, True])
def test_a_closure_that_makes_no_gradients_is_none(again: bool) -> None:
    """Lightning steps with one that only returns the loss; what it finds was there before, unless it makes others."""
    records: list[Any] = []
    probes = Probes(Guard(lambda *_: None), records.append, lambda *_: None, lambda *_: True)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    probes.bus.emit(events.OptimizerBuilt(optimizer))

    def backward() -> None:
        loss = (model(torch.randn(4, 3)) - 1).square().mean()
        probes.bus.emit(events.BackwardBegan([loss]))
        loss.backward()
        probes.bus.emit(events.BackwardEnded())

    def closure() -> float:
        if again:
            optimizer.zero_grad()
            backward()
        return 1.0

    for _ in range(3):
        backward()
        probes.bus.emit(events.StepBegan(optimizer, closure=True))
        optimizer.step(closure)
        probes.bus.emit(events.StepEnded(optimizer))
    probes.remove()
    probes.release()
    flags = [record.since.parts[RecipeNotes].flags for record in records]
    assert [bool(flag & Flag.GRADS_CARRIED) for flag in flags] == [False, not again, not again]
    assert [("carried" in record.since.parts[RecipeNotes].recipe) for record in records] == [
        False,
        not again,
        not again,
    ]


@pytest.mark.parametrize("by", ["the forward", "the optimizer", "the optimizer, past autograd", "nobody"])
def test_who_changes_parameters_before_a_closure_has_run(by: str) -> None:
    """A forward in a closure is the user's; what the optimizer does ahead of it (SAM) is its own."""
    records: list[Any] = []
    probes = Probes(Guard(lambda *_: None), records.append, lambda *_: None, lambda *_: True)
    model = nn.Linear(3, 1)

    class Climbing(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            if by == "the optimizer":
                with torch.no_grad():
                    model.weight.add_(1.0)
            elif by == "the optimizer, past autograd":
                model.weight.data.add_(1.0)
            loss = closure()
            super().step()
            return loss

    optimizer = Climbing(model.parameters(), lr=0.1)
    probes.bus.emit(events.OptimizerBuilt(optimizer))

    def closure() -> torch.Tensor:
        probes.bus.emit(events.ModuleForwardBegan(model, (torch.ones(4, 3),), {}))
        if by == "the forward":
            model.weight.data.clamp_(-0.01, 0.01)
        loss = model(torch.ones(4, 3)).square().mean()
        probes.bus.emit(events.BackwardBegan([loss]))
        loss.backward()
        probes.bus.emit(events.BackwardEnded())
        return loss

    for _ in range(3):
        optimizer.zero_grad()
        probes.bus.emit(events.StepBegan(optimizer, closure=True))
        optimizer.step(closure)
        probes.bus.emit(events.StepEnded(optimizer))
    probes.remove()
    probes.release()
    outside = [record.parts[ParameterDigests].changed_outside() for record in records]
    assert outside == [False, by == "the forward", by == "the forward"]


def test_the_last_share_of_a_loss_may_come_in_a_closure() -> None:
    """The step's loss is the sum of all its shares, of which the optimizer itself has the last one computed."""
    records: list[Any] = []
    probes = Probes(Guard(lambda *_: None), records.append, lambda *_: None, lambda *_: True)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    probes.bus.emit(events.OptimizerBuilt(optimizer))
    told: list[float] = []

    def closure() -> torch.Tensor:
        loss = (model(torch.randn(4, 3)) - 1).square().mean()
        told.append(loss.item())
        loss = loss / 4
        probes.bus.emit(events.BackwardBegan([loss]))
        loss.backward()
        probes.bus.emit(events.BackwardEnded())
        return loss

    for _ in range(2):
        for _ in range(3):
            closure()
        probes.bus.emit(events.StepBegan(optimizer, closure=True))
        optimizer.step(closure)
        probes.bus.emit(events.StepEnded(optimizer))
    probes.remove()
    probes.release()
    losses = [record.since.parts[Losses].columns(record)["loss"] for record in records]
    assert losses == pytest.approx([math.fsum(told[:4]) / 4, math.fsum(told[4:]) / 4])


@pytest.mark.parametrize(
    ("gradient", "zero"),
    [
        (torch.zeros(5), True),
        (-torch.zeros(5), True),
        (torch.zeros(4, 4).t()[1:], True),
        (torch.zeros(3, dtype=torch.bfloat16), True),
        (torch.zeros(100_000), True),
        (torch.tensor([0.0, 0.0, 1e-30]), False),
        (torch.eye(500)[:, 400:401].repeat(1, 4), False),  # of an embedding of which some rows are trained
        (torch.eye(64).view(8, 8, 8, 8).to(memory_format=torch.channels_last), False),
        (torch.zeros(2, 64, 8, 8).to(memory_format=torch.channels_last), True),
        (torch.tensor([1.0, 0.0, 0.0]), False),
        (torch.full((3,), -2.0), False),
        (torch.full((3,), math.nan), False),
        (torch.ones(4, 4).t()[1:], False),
        (torch.tensor([0.0, 1j]), False),
    ],
)
def test_a_gradient_of_zeros_is_told_by_its_bytes(gradient: torch.Tensor, zero: bool) -> None:
    """As `any` tells it: -0.0 is zero, NaN is not."""
    parameter = nn.Parameter(torch.zeros_like(gradient))
    parameter.grad = gradient
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    fed = Clearing().of(optimizer)
    assert fed.is_zero() is zero is not bool(gradient.any())


def test_gradients_that_are_thrown_away() -> None:
    """Clearing between backward and step, and between micro-batches, is seen from the first step on."""
    assert loop("before the step") == [Cleared(carried=False, gone=True, discards=0, written=True)] * 4
    assert loop("before each backward") == [UNTOUCHED._replace(discards=1)] * 4


def test_networks_that_are_switched_off_for_each_others_turn() -> None:
    """An optimizer is first looked at in another one's turn, when nothing of its own wants a gradient."""
    models = [nn.Linear(3, 2), nn.Linear(3, 2)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    clearing, seen = Clearing(), []
    for optimizer in optimizers:
        clearing.of(optimizer)
    for turn in (0, 1) * 3:
        for number, model in enumerate(models):
            model.requires_grad_(number == turn)
        clearing.begin_backward()
        models[turn](torch.randn(4, 3)).pow(2).mean().backward()
        clearing.end_backward()
        seen.append(clearing.before_step(optimizers[turn]).carried)
        optimizers[turn].step()
        clearing.after_step(optimizers[turn])
        if turn == 0:
            optimizers[0].zero_grad()
    assert seen == [False, False, False, True, False, True]


def test_the_other_networks_gradients_may_be_cleared() -> None:
    """In adversarial training each network gets gradients from the other's loss, and clears them before its own."""
    one, two = nn.Linear(2, 2), nn.Linear(2, 1)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (one, two)]
    clearing = Clearing()
    for optimizer in optimizers:
        clearing.of(optimizer)
    for _ in range(3):
        for optimizer, module in zip(optimizers, (one, two), strict=True):
            optimizer.zero_grad()
            x = torch.randn(4, 2)
            fake = one(x) if module is one else one(x).detach()
            clearing.begin_backward()
            two(fake).mean().backward()
            clearing.end_backward()
            assert clearing.before_step(optimizer) == UNTOUCHED
            optimizer.step()
            clearing.after_step(optimizer)


class Spied(nn.Parameter):
    """Notes that its gradient is read: while another thread clears it, that would end the process."""

    readers: ClassVar[list[int]] = []

    @property
    def grad(self) -> torch.Tensor | None:  # type: ignore[override]
        self.readers.append(id(self))
        found: torch.Tensor | None = torch._C.TensorBase.grad.__get__(self)
        return found


def spied() -> tuple[int, torch.optim.Optimizer]:
    """An optimizer of one such parameter, with the parameter's number."""
    parameter = Spied(torch.ones(2))
    torch._C.TensorBase.grad.__set__(parameter, torch.ones(2))
    return id(parameter), torch.optim.SGD([parameter], lr=0.1)


def elsewhere(call: Callable[..., Any], *args: Any) -> None:
    """Call something in a thread that ends with it."""
    thread = threading.Thread(target=call, args=args)
    thread.start()
    thread.join()


def read_in_a_step(clearing: Clearing, optimizer: torch.optim.Optimizer) -> set[int]:
    """Whose gradients a step of this thread reads."""
    Spied.readers.clear()
    clearing.begin_backward()
    clearing.end_backward()
    clearing.before_step(optimizer)
    clearing.after_step(optimizer)
    return set(Spied.readers)


def test_gradients_that_another_thread_may_clear_are_not_read() -> None:
    """An optimizer is looked at from when it is built, in one thread; with several, from its first step in this one."""
    threads = Threads(lambda part, text: None)
    clearing = Clearing(threads.alone)
    (own, mine), (later, second), (others, third) = spied(), spied(), spied()
    Spied.readers.clear()
    for optimizer in (mine, second, third):
        elsewhere(clearing.of, optimizer)
    assert not Spied.readers  # whoever builds an optimizer may do so while another thread trains its parameters
    assert threads.begins()
    assert read_in_a_step(clearing, mine) == {own, later, others}
    clearing.begin_backward()
    elsewhere(threads.begins)  # between the two ends of a backward
    Spied.readers.clear()
    clearing.end_backward()
    assert set(Spied.readers) == {own}
    assert read_in_a_step(clearing, second) == {own, later}
    assert clearing.before_step(second) == UNTOUCHED
    assert clearing.number() == 3
    assert others not in read_in_a_step(clearing, mine)
    del third


def test_what_an_ended_thread_has_trained_may_be_another_ones_by_now() -> None:
    """Its optimizers are read again once this thread has stepped them, and none that is given up."""
    given_up: list[torch.optim.Optimizer] = []
    clearing = Clearing(lambda: nullcontext(False), given_up.__contains__)
    (own, mine), (before, theirs) = spied(), spied()
    elsewhere(clearing.before_step, theirs)
    elsewhere(clearing.after_step, theirs)
    assert read_in_a_step(clearing, mine) == {own}
    assert clearing.before_step(theirs) == UNTOUCHED
    assert read_in_a_step(clearing, mine) == {own, before}
    given_up.append(theirs)
    assert read_in_a_step(clearing, mine) == {own}


def test_schedulers_are_counted_where_the_user_calls_them() -> None:
    """Constructors and the parts of a schedule do not count, two calls for one step do, a skipped step is forgiven."""
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=1.0)
    seen = Schedules(ENTRIES)
    schedule = SequentialLR(
        optimizer, [LinearLR(optimizer, total_iters=2), CosineAnnealingLR(optimizer, 8)], milestones=[2]
    )
    for _ in range(4):
        assert "scheduler" not in seen.before_step(optimizer, 1)
        optimizer.step()
        seen.called(schedule)
    seen.called(schedule)
    assert seen.before_step(optimizer, 2)["scheduler"].calls == 2
    seen.called(schedule)
    seen.called(schedule)
    seen.forgive()
    assert "scheduler" not in seen.before_step(optimizer, 2)


def stepped_with(seen: Schedules, optimizer: torch.optim.Optimizer, schedule: Any, steps: int) -> list[str | None]:
    """Step both; return in which way the rate was set in vain before each step."""
    found = []
    for _ in range(steps):
        about = seen.before_step(optimizer, 1).get("elsewhere")
        found.append(about and about.kind)
        optimizer.step()
        seen.called(schedule)
        schedule.step()
    return found


def test_a_rate_that_the_first_step_of_a_schedule_overwrites() -> None:
    """Not one that the script writes again, one that was there before, or that a chained schedule goes on from."""
    for scales, kind, wanted in (
        ("after", partial(LambdaLR, lr_lambda=lambda step: 1 - step / 40), "overwritten"),
        ("before", partial(LambdaLR, lr_lambda=lambda step: 1 - step / 40), None),
        ("always", partial(LambdaLR, lr_lambda=lambda step: 1 - step / 40), None),
        ("after", partial(ExponentialLR, gamma=0.99), None),
    ):
        seen, optimizer = Schedules(ENTRIES), torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=1.0)
        (group,) = optimizer.param_groups
        group["lr"] *= 8 if scales == "before" else 1
        schedule = kind(optimizer)
        group["lr"] *= 8 if scales != "before" else 1
        found = stepped_with(seen, optimizer, schedule, 1)
        for _ in range(5):
            group["lr"] *= 8 if scales == "always" else 1
            found += stepped_with(seen, optimizer, schedule, 1)
        assert found == [None, *[wanted] * 5], scales


def test_a_function_that_returns_the_rate_and_not_a_factor() -> None:
    """Known when it no longer rises; a rate of 1.0 with a function that returns the rate is another way to write it."""
    for rate, factor, wanted in ((3e-3, 3e-3, "factor"), (1.0, 3e-3, None), (3e-3, 1.0, None)):
        seen, optimizer = Schedules(ENTRIES), torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=rate)
        schedule = LambdaLR(optimizer, lambda step, factor=factor: factor * min(step + 1, 5, max(1, 12 - step)) / 5)
        found = stepped_with(seen, optimizer, schedule, 12)
        assert (found[:5], found[-1]) == ([None] * 5, wanted)


def trained(seen: Schedules, optimizer: torch.optim.Optimizer, times: int = 5) -> None:
    for _ in range(times):
        seen.before_step(optimizer, 1)
        optimizer.step()


def noted(seen: Schedules, schedule: LRScheduler) -> LRScheduler:
    """Return the schedule after the call that torch makes in its constructor."""
    seen.moved(schedule)
    seen._of(schedule).inner = 1
    return schedule


def test_a_schedule_that_nothing_has_stepped() -> None:
    """It is named with its optimizer's steps, and also when it has ended with the function that made it."""
    weight = nn.Parameter(torch.ones(1))
    seen, optimizer = Schedules(ENTRIES), torch.optim.SGD([weight], lr=1.0)
    schedule = noted(seen, CosineAnnealingLR(optimizer, 10))
    trained(seen, optimizer)
    assert seen.at_end() == [UnusedSchedule(class_name="CosineAnnealingLR", steps=5)]
    del schedule
    assert seen.at_end() == [UnusedSchedule(class_name="CosineAnnealingLR", steps=5)]
    plateau = ReduceLROnPlateau(optimizer)
    seen.built(plateau)
    assert seen.at_end() == [UnusedSchedule(class_name="ReduceLROnPlateau", steps=5)]
    seen.moved(plateau)  # step(metric)
    assert seen.at_end() == []


def test_how_long_a_schedule_is_says_something_where_the_run_ends_with_it() -> None:
    """Not where another stage has followed, nor of one that was restored: it began in another run."""
    weight = nn.Parameter(torch.ones(1))
    seen, optimizers = Schedules(ENTRIES), [torch.optim.SGD([weight], lr=1.0) for _ in range(3)]
    schedules = [noted(seen, CosineAnnealingLR(optimizer, 10)) for optimizer in optimizers]
    schedules[2].load_state_dict({**schedules[2].state_dict(), "last_epoch": 5})
    for optimizer, schedule in zip(optimizers, schedules, strict=True):
        for _ in range(5):
            trained(seen, optimizer, 1)
            seen.called(schedule)
            schedule.step()
    assert [(fact.calls, fact.world) for fact in seen.at_end(2)] == [(5, None), (5, None)]
    trained(seen, optimizers[1], 1)
    assert [fact.world for fact in seen.at_end(2)] == [None, 2]


def test_a_schedule_whose_time_has_not_come() -> None:
    """Parts of a schedule that was stepped, and one beside a rate that changes by other means, are let pass."""
    weight = nn.Parameter(torch.ones(1))
    seen, optimizer = Schedules(ENTRIES), torch.optim.SGD([weight], lr=1.0)
    parts = [noted(seen, LinearLR(optimizer, total_iters=99)), noted(seen, CosineAnnealingLR(optimizer, 8))]
    whole = SequentialLR(optimizer, parts, milestones=[99])
    optimizer.param_groups[0]["lr"] = 1.0
    for _ in range(5):
        trained(seen, optimizer, 1)
        seen.called(whole)
    assert [fact for fact in seen.at_end() if not fact.calls] == []
    other = torch.optim.SGD([weight], lr=1.0)
    late = noted(seen, CosineAnnealingLR(other, 10))
    trained(seen, other)
    other.param_groups[0]["lr"] = 0.5
    trained(seen, other)
    assert [fact for fact in seen.at_end() if not fact.calls] == []
    assert late.last_epoch == 0


@pytest.mark.parametrize(
    "make, length",
    [
        (lambda o: CosineAnnealingLR(o, 6), 6),
        (lambda o: CosineAnnealingLR(o, 6, eta_min=0.5), None),
        (lambda o: StepLR(o, 30), 90),
        (lambda o: StepLR(o, 2, gamma=0.5), 20),
        (lambda o: ExponentialLR(o, 1.0), None),
        (lambda o: MultiStepLR(o, [3, 5]), 5),
        (lambda o: LinearLR(o, 1.0, 0.0, total_iters=7), 7),
        (lambda o: LinearLR(o, total_iters=7), None),  # a warm-up
        (lambda o: SequentialLR(o, [LinearLR(o, total_iters=2), CosineAnnealingLR(o, 8)], [2]), 10),
        (lambda o: CosineAnnealingWarmRestarts(o, 5), None),
        (lambda o: LambdaLR(o, lambda n: 1 / (1 + n)), None),
    ],
)
def test_the_length_of_a_schedule(make: Callable[[Any], LRScheduler], length: int | None) -> None:
    """What begins again by design, only warms up, or is a function of the user's has none."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0)
    assert length_of(make(optimizer)) == length


@pytest.mark.parametrize(
    "make, left",
    [
        (lambda o: MultiStepLR(o, [3], 0.1), 0.1),
        (lambda o: MultiStepLR(o, [2, 4], 0.1), 0.01),
        (lambda o: LinearLR(o, 1.0, 0.2, total_iters=5), 0.2),
        (lambda o: CosineAnnealingLR(o, 5), 0.0),
        (lambda o: CosineAnnealingLR(o, 5, eta_min=0.1), 0.1),
        (lambda o: SequentialLR(o, [LinearLR(o), MultiStepLR(o, [3], 0.1)], milestones=[2]), 0.1),
    ],
)
def test_what_a_schedule_leaves_of_the_rate_is_told(make: Callable[[Any], LRScheduler], left: float) -> None:
    """After one drop to a tenth a run may well go on for most of its steps."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0)
    seen, schedule = Schedules(ENTRIES), make(optimizer)
    for _ in range(40):
        seen.before_step(optimizer, 1)
        optimizer.step()
        seen.called(schedule)
    seen.before_step(optimizer, 1)
    (told,) = seen.paces()
    assert told.left == pytest.approx(left)


@pytest.mark.parametrize(
    "length, each, phase",
    [(3, 1, "early"), (10, 1, "early"), (60, 1, None), (40, 1, None), (6, 10, None), (3, 10, None), (60, 10, "late")],
)
def test_a_schedule_counted_in_another_unit(length: int, each: int, phase: str | None) -> None:
    """Of 60 steps in 6 epochs, stepped with each step or each epoch."""
    seen, optimizer = Schedules(ENTRIES), torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0)
    schedule = noted(seen, CosineAnnealingLR(optimizer, length))
    told = []
    for number in range(1, 61):
        trained(seen, optimizer, 1)
        told += seen.paces()
        if number % each == 0:
            seen.called(schedule)
            schedule.step()
    told += seen.at_end()
    rule = SchedulerOutOfStep()
    found = [finding for fact in told for finding in rule.compare(fact.topic, {0: fact})]
    assert [finding.phase for finding in found] == ([phase] if phase else [])


@pytest.mark.parametrize(
    "mode, measures, told",
    [
        ("min", [0.4, 0.5, 0.6, 0.7, 0.8, 0.9], True),
        ("max", [0.4, 0.5, 0.6, 0.7, 0.8, 0.9], False),
        ("max", [2.0, 1.5, 1.2, 1.0, 0.9, 0.8], True),
        ("min", [2.0, 1.5, 1.6, 1.7, 1.8, 1.9], False),  # it was better once
    ],
)
def test_a_measure_that_moves_the_wrong_way(mode: Any, measures: list[float], told: bool) -> None:
    """The rate is cut again and again, and no measure was as good as the first."""
    seen, optimizer = Schedules(ENTRIES), torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0)
    schedule = ReduceLROnPlateau(optimizer, mode=mode, patience=0)
    found = []
    for measure in measures:
        trained(seen, optimizer, 8)
        seen.moved(schedule, measure)
        schedule.step(measure)
        found += seen.paces()
    assert [fact.measures[0] for fact in found] == ([measures[0]] if told else [])
    for fact in found:
        (finding,) = SchedulerOutOfStep().compare(fact.topic, {0: fact})
        assert finding.phase == "measure"


def test_a_rate_that_the_optimizer_does_not_read() -> None:
    """A schedule of another optimizer and an attribute are in vain; one that shares its groups is not."""
    weight = nn.Parameter(torch.ones(1))
    old, new = torch.optim.SGD([weight], lr=1.0), torch.optim.SGD([weight], lr=1.0)
    seen, schedule = Schedules(ENTRIES), CosineAnnealingLR(old, 10)
    found = []
    for _ in range(8):
        found.append(seen.before_step(new, 1))
        seen.called(schedule)
    assert ["elsewhere" in own for own in (found[0], found[-1])] == [False, True]
    seen.called(schedule)
    for step in range(8):  # it has stepped once itself
        found.append({} if step else seen.before_step(old, 1))
        found.append(seen.before_step(new, 1))
        seen.called(schedule)
    assert "elsewhere" in found[-1]
    new.param_groups = old.param_groups
    assert "elsewhere" not in seen.before_step(new, 1)
    new.lr = 0.1
    assert "elsewhere" not in seen.before_step(new, 1)
    new.lr = 0.05
    assert seen.before_step(new, 1)["elsewhere"].kind == "attribute"


@pytest.mark.parametrize(("at", "each", "told"), [(3, 1, [(60, 4)]), (59, 1, []), (3, 4, []), (0, 1, [])], ids=str)
def test_a_schedule_that_is_put_to_the_number_of_the_epoch(at: int, each: int, told: list[tuple[int, int]]) -> None:
    """One that is called with each step is to be where its optimizer is; by epochs it counts these."""
    weight = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.Adam([{"params": [weight], "initial_lr": 1.0}])
    weight.grad = torch.ones(1)
    optimizer.step()
    optimizer.state[weight]["step"].fill_(60)
    seen = Schedules(ENTRIES)
    schedule = LambdaLR(optimizer, lambda step: 1.0, last_epoch=at - 1 if at else -1)
    schedule.last_epoch += bool(at)
    seen.built(schedule)
    for step in range(12):
        seen.before_step(optimizer, 1)
        if step % each == 0:
            seen.called(schedule)
    found = [(fact.steps, fact.calls) for fact in seen.paces() if fact.calls]
    assert found == told


def _scaled(scale: float, *, both: bool) -> torch.Tensor:
    one, other = torch.ones(3, requires_grad=True).sum(), torch.ones(3, requires_grad=True).mean()
    return one * torch.tensor(scale) + (other * torch.tensor(scale) if both else other * 0.1)


def test_a_part_of_the_loss_without_the_loss_scale() -> None:
    """What is added to a scaled loss is to be scaled as well; weights of its own are another matter."""
    assert is_scaled_in_part(_scaled(512.0, both=False), 512.0)
    assert not is_scaled_in_part(_scaled(512.0, both=True), 512.0)
    assert not is_scaled_in_part(_scaled(4.0, both=False), 512.0)
    assert not is_scaled_in_part(torch.ones(3, requires_grad=True).mean() * torch.tensor(512.0), 512.0)


def test_a_loss_that_is_scaled_by_hand() -> None:
    """What multiplies it last may be the loss scale; a weight below 1 is none."""
    loss = torch.ones(3, requires_grad=True).mean()
    assert is_multiplied(loss * 512.0)
    assert is_multiplied(loss / torch.tensor(0.01))
    assert not is_multiplied(loss * 0.5)
    assert not is_multiplied(loss)
    assert not is_multiplied(torch.ones(1, requires_grad=True))


@pytest.mark.parametrize("logs", [True, False])
@pytest.mark.parametrize("loss", ["nll", "ctc"])
def test_logarithms_of_probabilities_add_up_to_one(loss: str, logs: bool) -> None:
    """Those that `nll_loss` and `ctc_loss` are given."""
    made = torch.randn(6, 4, requires_grad=True) * 1.0
    made = made.log_softmax(-1) if logs else made
    if loss == "nll":
        value = functional.nll_loss(made, torch.tensor([0, 1, 2, 3, 0, 1]))
    else:
        value = functional.ctc_loss(made[:, None], torch.tensor([[1, 2]]), torch.tensor([6]), torch.tensor([2]))
    told = [fact for term in terms(value, by_scaler=False) for fact in facts(term)]
    told += made_of_softmax(terms(value, by_scaler=False), value)
    found = [finding for fact in told if isinstance(fact, LossInput) for finding in rule_of(fact)]
    assert [finding.phase for finding in found] == ([] if logs else ["not normalised"])


def rule_of(fact: LossInput) -> list[Finding]:
    """Return what the rule about the inputs of losses finds."""
    return list(SoftmaxBeforeLoss().compare("alone:loss", {0: fact}))


def _forward(probes: Probes, model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Call a model as a hooked one is called."""
    probes.bus.emit(ModuleForwardBegan(model, (x,), {}))
    out = model(x)
    probes.bus.emit(events.ModuleForwardEnded(model, events.Tensors((x,)), events.Tensors(out)))
    return torch.as_tensor(out).square().mean()


def _begun() -> tuple[Probes, nn.Module, torch.optim.Optimizer]:
    probes, model = _probes(lambda said, number=None: None), nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    probes.state.follow(model)
    probes.bus.emit(events.OptimizerBuilt(optimizer))
    return probes, model, optimizer


@pytest.mark.parametrize(
    ("kind", "told"), [("attack", "attack"), ("cleared", None), ("two losses", None), ("other points", None)]
)
def test_gradients_of_the_loss_that_changes_the_input(kind: str, told: str | None) -> None:
    """They are not to be used; a loss at other points, or another loss, may add to the first one."""
    probes, model, optimizer = _begun()
    x = torch.randn(8, 4).requires_grad_(kind != "two losses")
    loss = _forward(probes, model, x)
    probes.bus.emit(BackwardBegan([loss]))
    loss.backward()
    probes.bus.emit(BackwardEnded())
    if kind == "cleared":
        optimizer.zero_grad()
    loss = _forward(probes, model, x.detach()[: 4 if kind == "other points" else 8] + 1.0)
    probes.bus.emit(BackwardBegan([loss]))
    loss.backward()
    probes.bus.emit(BackwardEnded())
    probes.bus.emit(events.StepBegan(optimizer, closure=False))
    carried = probes.state.since.parts[RecipeNotes].recipe.get("carried")
    assert (None if carried is None else carried.kind) == told


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (["weight"], "layers"),
        (["weight", "bias"], None),
        (["bias"], "layers"),
        (None, None),
        ([], None),
    ],
)
def test_clipping_of_whole_layers(given: list[str] | None, told: str | None) -> None:
    """A clipping that cuts a layer in two is told; one of some layers, or of what is not known, is not."""
    probes, model, optimizer = _begun()
    probes.bus.emit(BackwardBegan([loss := _forward(probes, model, torch.randn(8, 4))]))
    loss.backward()
    probes.bus.emit(BackwardEnded())
    own = dict(model.named_parameters())
    for parameters in [None] if given is None else [[own[name]] for name in given]:  # a call for each
        probes.bus.emit(events.Clipped(torch.tensor(2.0), 1.0, "train.py:7", parameters))
    probes.bus.emit(events.StepBegan(optimizer, closure=False))
    clip = probes.state.since.parts[RecipeNotes].recipe.get("clip")
    assert (None if clip is None else clip.instead) == told


@pytest.mark.parametrize(
    ("dtype", "scaled", "told"),
    [(torch.float16, False, "never"), (torch.float16, True, None), (torch.bfloat16, False, None)],
)
def test_float16_has_a_loss_scale(dtype: torch.dtype, *, scaled: bool, told: str | None) -> None:
    """Where autocast computes in it, and nothing has scaled a loss."""
    probes, model, optimizer = _begun()
    with torch.autocast("cpu", dtype):
        loss = _forward(probes, model, torch.randn(8, 4))
    if scaled:
        probes.bus.emit(events.LossScaled(torch.tensor(512.0)))
        loss = loss * torch.tensor(512.0)
    probes.bus.emit(BackwardBegan([loss]))
    loss.backward()
    probes.bus.emit(BackwardEnded())
    if scaled:
        probes.bus.emit(events.Unscaled())
    probes.bus.emit(events.StepBegan(optimizer, closure=False))
    clip = probes.state.since.parts[RecipeNotes].recipe.get("clip")
    assert (None if clip is None else clip.instead) == told


def test_a_module_that_was_said_to_be_frozen() -> None:
    """An attribute of a module freezes nothing; one whose parameters are frozen may have it."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    model[0].requires_grad = model[1].requires_grad = False
    model[1].requires_grad_(False)
    model[2].weight.required_grad, model[2].bias.is_frozen = False, False
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    audit = Audit(Built())
    audit.built(optimizer)
    model(torch.ones(1, 4)).sum().backward()
    told = [audit.at_step(step, optimizer, [PlainModel(model, 0)]) for step in (0, 1)]
    assert [getattr(fact, "attribute", None) for fact in told] == [None, ("0", "2.weight")]


def test_modes_matter_where_the_model_trains() -> None:
    """Those of a frozen body are not among those that the mode changes; a choice among the modules is told."""
    body, head = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), nn.Sequential(nn.Dropout(0.1), nn.Linear(4, 2))
    model = nn.Sequential(body, head)
    modes = Modes()
    assert modes.in_eval(model) is None
    assert modes.in_eval(model.eval()) == (["0.1", "1.0"], False, None)
    head.train()
    assert modes.in_eval(model) == (["0.1"], True, None)
    frozen = nn.Sequential(body.requires_grad_(False), nn.Linear(4, 2)).eval()
    assert modes.in_eval(frozen) == ([], False, None)
    assert not any(modes.evaluates_in_train(other) for other in (frozen, nn.Linear(1, 1)))
    assert modes.evaluates_in_train(model.train())


def test_what_was_collected_is_trained_on_next_and_does_not_come_back() -> None:
    """Rollouts of vectors, images or single observations; an evaluation on training data, or on other data, is none."""
    draw = torch.Generator().manual_seed(0)

    def played(shape: tuple[int, ...], number: int) -> list[bool]:
        seen, told = Rollouts(), []
        seen.trains([torch.randn(32, *shape, generator=draw)])
        for _ in range(3):
            steps = [torch.randn(*([number] if number else []), *shape, generator=draw) for _ in range(6)]
            for step in steps:
                seen.given([step])
            rows = torch.stack(steps).reshape(-1, *shape)
            told.append(seen.collected([rows[torch.randperm(len(rows), generator=draw)[:32]]]))
        return told

    for shape, number in (((4,), 8), ((4,), 1), ((4,), 0), ((3, 8, 8), 2)):
        assert played(shape, number) == [True, True, True]

    data, other = torch.randn(96, 4, generator=draw), torch.randn(96, 4, generator=draw)
    for evaluated in (data, other):
        seen = Rollouts()
        for epoch in range(3):
            batches = data[torch.randperm(96, generator=draw)].split(16)
            if epoch:
                assert not seen.collected([batches[0]])
            elif not seen.has_batch:
                seen.trains([batches[0]])
            for part in evaluated.split(32):
                seen.given([part])


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_and_sparse_inputs_are_not_asked() -> None:
    """They have no rows; a forward without gradients may be given them, and a training one as well."""
    sparse, nested = torch.eye(3).to_sparse(), torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    seen = Rollouts()
    seen.trains([nested, sparse])
    for _ in range(3):
        seen.given([nested, sparse])
        assert not seen.collected([nested, sparse])


def test_a_collection_in_train_mode_is_a_hint() -> None:
    """An evaluation is a warning."""
    for is_collection, severity in ((True, Severity.INFO), (False, Severity.WARNING)):
        fact = TrainModeValidation(forwards=8, since=20, collected=is_collection)
        (finding,) = ValidationInTrainMode().compare(fact.topic, {0: fact})
        assert finding.severity is severity


def test_harmless_evaluations_do_not_use_up_what_is_told(request: pytest.FixtureRequest) -> None:
    """Three views in every step are told as such, and the evaluation at the end of the epoch as well."""
    told: list[Any] = []
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))
    probes = _probes(lambda fact, number=None: told.append(fact))
    request.addfinalizer(probes.release)
    request.addfinalizer(probes.remove)
    probes.state.follow(model)

    def forward(times: int) -> None:
        for _ in range(times):
            x = torch.randn(2, 4)
            probes.bus.emit(ModuleForwardBegan(model, (x,), {}))

    for length in (1, 1, 1, 1, 1, 1, 12):
        with torch.no_grad():
            forward(3)
        probes.state.watches = [SimpleNamespace(step=probes.state.next_step() + length)]  # type: ignore[list-item]
        forward(1)
    assert [fact.since for fact in told if isinstance(fact, TrainModeValidation)] == [1, 1, 1, 12]


@pytest.mark.parametrize(("forwards", "samples", "told"), [(2, 64, 1), (1, 64, 0), (2, 320, 0), (3, 320, 1)])
def test_a_short_evaluation_is_known_by_its_data(forwards: int, samples: int, told: int) -> None:
    """Two forwards without gradients belong to many training steps, unless a loader over other data was begun."""
    said: list[Any] = []
    probes = _probes(lambda fact, number=None: said.append(fact))
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.1))
    probes.state.follow(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    probes.loaders.samples = 320
    for step in range(12):
        if step == 8:
            probes.loaders.samples = samples
            with torch.no_grad():
                for _ in range(forwards):
                    probes.bus.emit(ModuleForwardBegan(model, (torch.zeros(2, 4),), {}))
            probes.loaders.samples = 320
        probes.bus.emit(ModuleForwardBegan(model, (torch.zeros(2, 4),), {}))
        probes.bus.emit(events.StepBegan(optimizer, closure=False))
        probes.bus.emit(events.StepEnded(optimizer))
    probes.remove()
    probes.release()
    evaluations = [fact for fact in said if isinstance(fact, TrainModeValidation)]
    assert len(evaluations) == told
    findings = [f for fact in evaluations for f in ValidationInTrainMode().compare(fact.topic, {0: fact})]
    assert len(findings) == told


def test_modules_in_a_plain_list_are_found_in_the_graph() -> None:
    """Parameters that no module registers are named by their container, what an input brings along is not."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = [nn.Linear(3, 3, bias=False)]
            self.out = nn.Linear(3, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.out(self.layers[0](x))

    net, before = Net(), nn.Linear(3, 3)
    x = before(torch.randn(2, 3))
    known = {id(p) for p in net.parameters()}
    assert unregistered([net(x)], [x], net, known) == ["layers[0].weight"]
    assert unregistered([net(x)], [x], net, known | {id(net.layers[0].weight)}) == []


_MADE: list[Probes] = []


@pytest.fixture(autouse=True)
def _released() -> Iterator[None]:
    """Hooks on all modules do not outlive a test."""
    yield
    while _MADE:
        probes = _MADE.pop()
        probes.remove()
        probes.release()


def _probes(announce: Callable[[str, Any], None]) -> Probes:
    _MADE.append(Probes(Guard(lambda *_: None), lambda _: None, announce, lambda *_: True))
    return _MADE[-1]


def test_a_schedule_is_judged_where_the_run_came_to_its_end() -> None:
    """After an exception or a stop nobody knows whether a schedule by epochs would have been stepped."""
    told: list[Any] = []
    recipe = _probes(lambda said, number=None: told.append((type(said), said.class_name, said.steps))).recipe
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=1.0)
    schedule = noted(recipe.schedules, CosineAnnealingLR(optimizer, 10))
    trained(recipe.schedules, optimizer, 50)
    recipe.close()
    assert told == []
    recipe.close(finished=True)
    assert told == [(UnusedSchedule, type(schedule).__name__, 50)]


def test_a_forked_child_announces_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """What only the end shows is told by the rank itself, and not by the workers that it forks."""
    told: list[Any] = []
    probes = _probes(lambda said, number=None: told.append(type(said)))
    recipe = probes.recipe
    loss = functional.cross_entropy(torch.randn(8, 3, requires_grad=True), torch.arange(8) % 3)
    probes.bus.emit(BackwardBegan([loss]))
    with monkeypatch.context() as patch:
        patch.setattr("os.getpid", lambda: -1)
        recipe.close()
    assert told == [LossInput, InitialLoss]
    recipe.close()
    assert told == [LossInput, InitialLoss, LabelCounts]


def _fine_tuned(which: str) -> tuple[nn.Module, nn.Module, torch.optim.Optimizer | None]:
    """Return a model, its output layer, and another optimizer than the one that trains the model."""
    body = nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16), nn.ReLU(), nn.Linear(16, 16), nn.LayerNorm(16), nn.ReLU())
    head = nn.Linear(16, 3)
    model = nn.Sequential(body, head)
    trains = {
        "head frozen": lambda name: name.startswith("0."),
        "head of another optimizer": lambda name: name.startswith("0."),
        "probe": lambda name: name.startswith("1."),
        "biases": lambda name: name.endswith("bias"),
        "norms only": lambda name: name[:4] in {"0.1.", "0.4."},
        "norms and head": lambda name: name[:4] in {"0.1.", "0.4."} or name.startswith("1."),
        "norms frozen": lambda name: name[:4] not in {"0.1.", "0.4."},
        "prompt": lambda name: False,
    }
    for name, p in model.named_parameters():
        p.requires_grad_(trains.get(which, bool)(name))
    if which == "prompt":
        model.insert(0, nn.Linear(16, 16))
    if which == "decoder":
        model.extend([nn.Linear(3, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 8)])
        model[2:].requires_grad_(False)
    other = torch.optim.SGD(head.parameters(), lr=0.1) if which == "head of another optimizer" else None
    return model, head, other


def _stages(second: str) -> list[str]:
    """Train a model, then with another optimizer what the filter of a second stage leaves; return what is told."""
    told: list[Any] = []
    probes = _probes(lambda said, number=None: told.append(said))
    model, head, _ = _fine_tuned("nothing frozen")
    probes.state.follow(model)

    def stage(optimizer: torch.optim.Optimizer, steps: int) -> None:
        for _ in range(steps):
            x = torch.randn(4, 16)
            probes.bus.emit(ModuleForwardBegan(model, (x,), {}))
            out = model(x)
            probes.bus.emit(events.ModuleForwardEnded(model, events.Tensors((x,)), events.Tensors(out)))
            loss = out.square().mean()
            probes.bus.emit(BackwardBegan([loss]))
            loss.backward()
            probes.bus.emit(BackwardEnded())
            probes.bus.emit(events.StepBegan(optimizer, closure=False))
            optimizer.step()
            probes.bus.emit(events.StepEnded(optimizer))
            optimizer.zero_grad()

    def built(wanted: Callable[[str], bool]) -> torch.optim.Optimizer:
        made = torch.optim.SGD([p for name, p in model.named_parameters() if wanted(name)], lr=0.01)
        probes.bus.emit(events.OptimizerBuilt(made))
        return made

    first = built(lambda name: True)
    stage(first, 40)
    if second == "in turns":
        other = built(lambda name: name.startswith("1."))
        for _ in range(12):
            stage(other, 4)
            stage(first, 1)
        return [type(fact).__name__ for fact in told]
    if second == "new head":
        head.weight, head.bias = nn.Parameter(torch.randn(3, 16)), nn.Parameter(torch.randn(3))
    wanted = {"norms": lambda name: name[:4] in {"0.1.", "0.4."}, "head": lambda name: name.startswith("1.")}
    wanted["new head"] = lambda name: name.startswith("0.")
    wanted["head, the rest as it was"] = wanted["head"]
    for name, p in model.named_parameters():
        p.requires_grad_(second in {"new head", "head, the rest as it was"} or wanted[second](name))
    stage(built(wanted[second]), 60)
    return [f"{type(fact).__name__} {getattr(fact, 'norms', '')}".strip() for fact in told]


@pytest.mark.parametrize(
    "second, told",
    [
        ("norms", ["FrozenParameters 4"]),
        ("new head", ["MissingParameters"]),
        ("head", []),
        ("head, the rest as it was", []),  # it has been trained before
        ("in turns", []),
    ],
)
def test_each_stage_of_training_is_looked_at(second: str, told: list[str]) -> None:
    """A model is trained, changed, and trained on with another optimizer while the first one still lives."""
    said = _stages(second)
    assert [what for what in said if what.startswith(("Frozen", "Missing"))] == told


@pytest.mark.parametrize(
    "which, told",
    [
        ("head frozen", "output"),
        ("head of another optimizer", None),
        ("probe", None),
        ("biases", None),
        ("norms only", "norms"),
        ("norms and head", None),
        ("norms frozen", None),
        ("prompt", None),
        ("decoder", None),
        ("nothing frozen", None),
    ],
)
def test_a_filter_that_froze_what_should_train(which: str, told: str | None) -> None:
    """Ways of fine-tuning that people choose are let pass: probes, adapters, biases, prompts, frozen norms."""
    model, head, other = _fine_tuned(which)
    built = Built()
    audit = Audit(built)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    for one in (optimizer, *([other] if other else [])):
        audit.built(one)
    models = [PlainModel(model, 0)]
    assert audit.at_step(1, optimizer, models) is None
    audit.output(model, [model(torch.randn(4, 16))])
    fact = audit.at_step(32, optimizer, models)
    findings = [] if fact is None else list(MostlyFrozen().compare(fact.topic, {0: fact}))
    assert [f.phase for f in findings] == {"output": ["output layer"], "norms": ["norms"]}.get(told or "", [])
    if told == "output":
        head.requires_grad_()
        assert audit.at_step(32, optimizer, models) is None


@pytest.mark.parametrize("kind", ["new", "again", "whole"])
def test_a_list_of_labels_that_comes_again_is_counted_once(kind: str) -> None:
    """So that few samples, seen many times, do not look like many; all of them in another order are told as such."""
    targets, told = Targets(), []
    generator = torch.Generator().manual_seed(0)
    first = torch.randint(0, 3, (24,), generator=generator)
    for _ in range(16):
        labels = torch.randint(0, 3, (24,), generator=generator) if kind == "new" else first
        labels = labels[torch.randperm(24, generator=generator)] if kind == "whole" else labels
        loss = functional.cross_entropy(torch.randn(24, 3, requires_grad=True), labels)
        told.append(targets.read(terms(loss, by_scaler=False), loss, {24}, by_scaler=False))
    fact = told[-1]
    assert fact is not None
    assert fact.whole is (kind == "whole")
    assert sum(fact.counts) == (24 if kind == "again" else 16 * 24)
    assert not list(LossOutlier().compare("targets", {0: fact, 1: fact}))
