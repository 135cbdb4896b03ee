"""Several ranks against one process: what is the same passes, what is not is found and named."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - the usual name
from torch.nn.parallel import DistributedDataParallel

import ddpdebug
from ddpdebug import torch_internals as internals
from ddpdebug.ci.equivalence import judge, measure
from ddpdebug.errors import UsageError
from ddpdebug.schema.finding import Finding, Severity
from ddpdebug.testing import assert_equivalent

Made = tuple[nn.Module, Callable[..., Any], Any]


class Language(nn.Module):
    """A small transformer over padded sequences."""

    def __init__(self, width: int = 16, dropout: float = 0.1) -> None:
        super().__init__()
        self.embed = nn.Embedding(29, width)
        self.block = nn.TransformerEncoderLayer(width, 4, 32, dropout=dropout, batch_first=True)
        self.head = nn.Linear(width, 29)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.block(self.embed(tokens), src_key_padding_mask=tokens == 0))


def padded(samples: int = 8, length: int = 12) -> Tensor:
    """Return sequences whose lengths differ much between the halves of the batch."""
    tokens = torch.randint(1, 29, (samples, length))
    for sample in range(samples):
        tokens[sample, 2 + sample :] = 0
    return tokens


def per_token(model: nn.Module, tokens: Tensor) -> Tensor:
    return F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten(), ignore_index=0)


def regression(*layers: nn.Module) -> tuple[nn.Module, Tensor]:
    return nn.Sequential(nn.Linear(6, 16), *layers, nn.Tanh(), nn.Linear(16, 1)), torch.randn(8, 6)


def squares(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().mean()


# --- right ------------------------------------------------------------------------------------------------------------


def plain() -> Made:
    model, batch = regression(nn.ReLU(), nn.Dropout(0.5))
    return model, squares, batch


def right_tokens() -> Made:
    def loss(model: nn.Module, tokens: Tensor) -> Tensor:
        count = (tokens != 0).sum()
        dist.all_reduce(count)
        total = F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten(), ignore_index=0, reduction="sum")
        return total * dist.get_world_size() / count

    return Language(), loss, padded()


def per_sequence() -> Made:
    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        each = F.cross_entropy(model(batch["x"]).transpose(1, 2), batch["x"], ignore_index=0, reduction="none")
        return (each.sum(1) / batch["lengths"]).mean()

    tokens = padded()
    return Language(), loss, {"x": tokens, "lengths": (tokens != 0).sum(1)}


def loss_in_float32() -> Made:
    def loss(model: nn.Module, tokens: Tensor) -> Tensor:
        return F.cross_entropy(model(tokens).float().flatten(0, 1), tokens.flatten())

    return Language(), loss, torch.randint(1, 29, (8, 12))


def insists_on_float32() -> Made:
    class Insists(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x.float())

    return Insists(), squares, torch.randn(8, 6)


def accumulated() -> Made:
    def step(model: DistributedDataParallel, batch: Tensor) -> None:
        first, last = batch.chunk(2)
        with model.no_sync():
            (squares(model, first) / 2).backward()
        (squares(model, last) / 2).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)

    model, batch = regression()
    return model, step, batch


def own_wrapper() -> Made:
    model, batch = regression()
    return DistributedDataParallel(model, gradient_as_bucket_view=True), squares, batch


class Records:
    """A batch of another kind."""

    def __init__(self, rows: list[list[float]]) -> None:
        self.rows = rows

    def shard(self, rank: int, world: int) -> Records:
        return Records(self.rows[rank::world])


def own_batch() -> Made:
    model, _ = regression()
    return model, lambda m, b: squares(m, torch.tensor(b.rows)), Records(torch.randn(8, 6).tolist())


def unused_branch() -> Made:
    model, batch = regression()
    model.append(nn.Linear(1, 1))
    return model, lambda m, b: m.module[:-1](b).square().mean() * 0 + squares(m, b), batch


# --- wrong ------------------------------------------------------------------------------------------------------------


def scaled_by_world() -> Made:
    model, batch = regression()
    return model, lambda m, b: squares(m, b) * dist.get_world_size(), batch


def divided_by_world() -> Made:
    model, batch = regression()
    return model, lambda m, b: squares(m, b) / dist.get_world_size(), batch


def reduced_twice() -> Made:
    def step(model: nn.Module, batch: Tensor) -> None:
        squares(model, batch).backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)

    model, batch = regression()
    return model, step, batch


def wrong_tokens() -> Made:
    return Language(), per_token, padded()


def clipped_per_rank() -> Made:
    def step(model: DistributedDataParallel, batch: Tensor) -> None:
        with model.no_sync():
            squares(model, batch).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()

    model, batch = regression()
    batch[:4] *= 5
    return model, step, batch


def sum_of_losses() -> Made:
    model, batch = regression()
    return model, lambda m, b: m(b).square().sum(), batch


def contrastive() -> Made:
    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        vectors = F.normalize(model(batch) + batch[:, :1], dim=0)
        scores = vectors @ vectors.t()
        return F.cross_entropy(scores, torch.arange(len(batch)))

    model, batch = regression()
    return model, loss, batch


def one_layer_not_reduced() -> Made:
    model, batch = regression()
    model._ddp_params_and_buffers_to_ignore = ["2.weight"]
    return model, squares, batch


def batch_norm() -> Made:
    model, batch = regression(nn.BatchNorm1d(16))
    return model, squares, batch


def batch_norm_and_scaled() -> Made:
    model, batch = regression(nn.BatchNorm1d(16))
    return model, lambda m, b: squares(m, b) * dist.get_world_size(), batch


def finding(build: Callable[[], Made], steps: int = 3) -> Finding | None:
    """Measure on this test's ranks, judge what all of them say."""
    own = measure(build, steps=steps)
    told: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(told, own)
    found = judge(dict(enumerate(told)))
    return found[0] if found else None


RIGHT = [plain, right_tokens, per_sequence, loss_in_float32, insists_on_float32, accumulated, own_wrapper, own_batch]


@pytest.mark.parametrize("world", [pytest.param(n, marks=pytest.mark.ranks(n)) for n in (2, 4)])
@pytest.mark.parametrize("build", [*RIGHT, unused_branch], ids=lambda build: build.__name__)
def test_equivalent_training_passes(build: Callable[[], Made], world: int) -> None:
    """Whatever the loss averages, in whatever precision, as long as the ranks compute the same."""
    assert finding(build) is None


@pytest.mark.ranks(4)
@pytest.mark.parametrize(
    "build, ratio, reading",
    [
        (scaled_by_world, 4, "all gradients are the world size times as large"),
        (divided_by_world, 1 / 4, "all gradients are 1 / world size times as large"),
        (reduced_twice, 4, "all gradients are the world size times as large"),
        (sum_of_losses, 1 / 4, "all gradients are 1 / world size times as large"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_common_factor_is_named(build: Callable[[], Made], ratio: float, reading: str) -> None:
    """World size, or one over it, in the first step, in all parameters."""
    found = finding(build)
    assert found is not None
    assert (found.code, found.severity, found.step) == ("SYNC209", Severity.ERROR, 0)
    assert found.evidence["reading"] == reading
    assert found.evidence["differing"] == "4 of 4 gradients"
    assert "remove the manual reduction or scaling" in found.actions[0]
    assert list(found.evidence["ratio"].values()) == pytest.approx([ratio] * 3)


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    "build, cause",
    [
        (wrong_tokens, "mean over local tokens"),
        (contrastive, "mean over local tokens"),
        (clipped_per_rank, "mean over local tokens"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_parts_that_weigh_differently_are_found(build: Callable[[], Made], cause: str) -> None:
    """Token averages, a loss over the local batch, clipping before the reduction: no common ratio."""
    found = finding(build)
    assert found is not None
    assert (found.code, found.severity, found.step) == ("SYNC209", Severity.ERROR, 0)
    assert "no common ratio" in found.evidence["reading"]
    assert found.evidence["difference"] > 1e6 * found.evidence["bound"]
    assert cause in found.causes[0]


@pytest.mark.ranks(2)
def test_a_single_parameter_is_named() -> None:
    """One that the reduction leaves out."""
    found = finding(one_layer_not_reduced)
    assert found is not None
    assert found.subject == ("2.weight",)
    assert found.evidence["differing"] == "1 of 4 gradients"
    assert "`2.weight` differ over all ranks, and their mean is that of one process" in found.evidence["reading"]


@pytest.mark.ranks(2)
def test_batch_norm_is_explained_and_not_blamed() -> None:
    """It is an information, unless there is more behind it."""
    found = finding(batch_norm)
    assert found is not None
    assert found.severity is Severity.INFO
    assert "only BatchNorm" in found.evidence["reading"]
    assert_equivalent(batch_norm)
    worse = finding(batch_norm_and_scaled)
    assert worse is not None
    assert worse.severity is Severity.ERROR
    assert worse.evidence["reading"] == "all gradients are the world size times as large"


@pytest.mark.ranks(2)
def test_the_assertion_says_the_same_on_all_ranks() -> None:
    """With parameters, ratio and the likeliest cause."""
    assert_equivalent(plain, steps=2)
    with pytest.raises(AssertionError) as error:
        assert_equivalent(scaled_by_world)
    told = ["", ""]
    dist.all_gather_object(told, str(error.value))
    assert told[0] == told[1]
    for part in ("SYNC209", "step 0", "all gradients are the world size times", "multiplied or divided by the world"):
        assert part in told[0]


@pytest.mark.ranks(2)
def test_nothing_is_left_changed() -> None:
    """Random state, default type and the group are as before."""
    before = torch.get_rng_state()
    assert finding(plain) is None
    assert torch.equal(before, torch.get_rng_state())
    assert torch.get_default_dtype() is torch.float32
    assert dist.get_world_size() == 2
    dist.barrier()


@pytest.mark.ranks(2)
def test_a_training_process_is_not_made_a_world_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Outside of tests and of the ranks that a command starts it is refused, and nothing has happened to the group."""
    monkeypatch.delenv("PYTEST_CURRENT_TEST")
    world = dist.group.WORLD
    with pytest.raises(UsageError, match="run `ddpdebug equivalence"):
        measure(plain)
    with pytest.raises(UsageError, match="run `ddpdebug preflight --nproc-per-node N"):
        ddpdebug.preflight(nn.Linear(2, 2), F.mse_loss, None, [(torch.ones(2, 2), torch.ones(2, 2))], only=["data"])
    with pytest.raises(RuntimeError, match="may not be made a world of its own"), internals.alone():
        pass
    assert dist.group.WORLD is world
    assert dist.get_world_size() == 2
    monkeypatch.setenv("PYTEST_CURRENT_TEST", "this one")
    with internals.one_rank():
        assert dist.get_world_size() == 1


def random_in_function() -> Made:
    model, batch = regression()
    return model, lambda m, b: F.dropout(m(b), 0.5).mean(), batch


def odd_batch() -> Made:
    model, _ = regression()
    return model, squares, torch.randn(7, 6)


def ragged() -> Made:
    model, batch = regression()
    return model, squares, (batch, torch.randn(3, 6))


def no_scalar() -> Made:
    model, batch = regression()
    return model, lambda m, b: m(b), batch


def in_half() -> Made:
    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return model(batch.float()).square().mean()

    model, batch = regression()
    return model, loss, batch


def scaled_in_half() -> Made:
    model, loss, batch = in_half()
    return model, lambda m, b: loss(m, b) * dist.get_world_size(), batch


@pytest.mark.ranks(2)
def test_in_16_bits_what_is_far_off_is_found() -> None:
    """The tolerance is what rounding does to one process, also where that is much."""
    assert finding(in_half) is None
    found = finding(scaled_in_half)
    assert found is not None
    assert found.evidence["dtype"] == "bfloat16"
    assert found.evidence["bound"] > 1e-4
    assert found.evidence["reading"] == "all gradients are the world size times as large"


def two_things() -> Any:
    return regression()


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    "build, message",
    [
        (random_in_function, "draws random numbers"),
        (odd_batch, "a batch of 7 cannot be split into 2 equal parts; make it a multiple of 2"),
        (ragged, r"they have \[3, 8\]. A batch of another kind can split itself"),
        (no_scalar, r"must return a scalar tensor, or None after its own backward, not a tensor of shape \[8, 1\]"),
        (two_things, r"must return \(model, loss_fn, batch\), not tuple"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_what_cannot_be_compared_is_refused_with_the_reason(build: Callable[[], Made], message: str) -> None:
    """Instead of a verdict that means nothing."""
    with pytest.raises(UsageError, match=message):
        measure(build)
