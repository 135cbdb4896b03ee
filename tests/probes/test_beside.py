"""Models beside the one that is trained: those that stay are to run in eval mode, those that follow, wholly."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

from ddpdebug.isolation.guard import Guard
from ddpdebug.probes.entries import Entries
from ddpdebug.probes.training_loop.beside import Beside
from ddpdebug.schema.announcements import TrainModeValidation


class Run:
    """A model that trains, and what runs beside it in each step and after every tenth."""

    def __init__(self) -> None:
        self.told: list[TrainModeValidation] = []
        self.entries = Entries(Guard(lambda part, message: pytest.fail(f"{part}: {message}")))
        self.model = net()
        self.beside = Beside(self.entries, lambda: [self.model], self.told.append)

    def built(self, *models: nn.Module) -> None:
        """Note models as torch's hooks would."""
        for model in models:
            for part in model.modules():
                self.entries.built.module(part)

    def train(
        self,
        each: Callable[[torch.Tensor], object],
        after: Callable[[], None] = lambda: None,
        evaluate: Callable[[torch.Tensor], object] = lambda _: None,
        steps: int = 50,
    ) -> list[str | None]:
        """Train, and return what was told."""
        optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.entries.built.optimizer(optimizer)
        self.built(self.model)
        try:
            for step in range(steps):
                x = torch.randn(6, 4)
                with torch.no_grad():
                    each(x)
                    if step % 10 == 9:
                        evaluate(x)
                self.beside.trains()
                optimizer.zero_grad()
                self.model(x).square().mean().backward()
                optimizer.step()
                self.beside.after_step(step, looks=True)
                with torch.no_grad():
                    after()
        finally:
            self.beside.release()
            self.entries.close()
        return [fact.beside for fact in self.told]


def net() -> nn.Sequential:
    """Make a model whose mode matters."""
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 2))


def follow(average: nn.Module, model: nn.Module, *, buffers: bool) -> None:
    """Move an average towards a model."""
    for mine, other in zip(average.parameters(), model.parameters(), strict=True):
        mine.lerp_(other, 0.2)
    for mine, other in zip(average.buffers(), model.buffers(), strict=True) if buffers else ():
        mine.copy_(other)


@pytest.mark.parametrize(
    "kind", ["train", "eval", "of chosen modules", "trained by another optimizer", "no such layer"]
)
def test_a_teacher_that_nobody_changes(kind: str) -> None:
    """One of another shape is told of at once; where its mode was chosen, or changes nothing, it is not."""
    run = Run()
    teacher = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Dropout(0.3 if kind != "no such layer" else 0.0))
    if kind == "no such layer":
        teacher[1] = nn.LayerNorm(3)
    if kind in {"eval", "of chosen modules"}:
        teacher.eval()
    if kind == "of chosen modules":
        teacher[2].train()
    if kind == "trained by another optimizer":
        run.entries.built.optimizer(torch.optim.SGD(teacher.parameters(), lr=0.1))
        kept = torch.optim.SGD(teacher.parameters(), lr=0.1)
        run.entries.built.optimizer(kept)
    run.built(teacher)
    expected: list[str | None] = ["stays"] if kind == "train" else []
    assert run.train(teacher) == expected
    assert [fact.names for fact in run.told] == [("Sequential", "1", "2")][: len(expected)]


@pytest.mark.parametrize(("every", "told"), [(0, ["stays"]), (1, []), (30, [])])
def test_a_copy_of_the_model_in_train_mode(every: int, told: list[str | None]) -> None:
    """A mean teacher and a target network are written, the latter late; a reference never is."""
    run = Run()
    other, steps = copy.deepcopy(run.model).requires_grad_(False), iter(range(1000))
    run.built(other)
    assert (
        run.train(
            other,
            lambda: follow(other, run.model, buffers=False) if every and next(steps) % every == every - 1 else None,
        )
        == told
    )


@pytest.mark.parametrize(
    ("buffers", "frozen", "follows", "told"),
    [
        (False, False, True, ["follows"]),
        (True, False, True, []),
        (False, True, True, []),  # the model's own statistics stay as well
        (False, False, False, []),  # a reference
    ],
)
def test_an_average_that_is_evaluated(buffers: bool, frozen: bool, follows: bool, told: list[str | None]) -> None:
    """With the statistics of the model that it was copied from, long ago."""
    run = Run()
    if frozen:
        run.model[1].eval()
    average = copy.deepcopy(run.model).requires_grad_(False).eval()
    run.built(average)
    assert (
        run.train(
            lambda _: None,
            lambda: follow(average, run.model, buffers=buffers) if follows else None,
            average,
        )
        == told
    )


def test_what_is_looked_at_ends() -> None:
    """Within the steps after the first ones nothing is called."""
    run = Run()
    teacher = net().eval()
    run.built(teacher)
    assert run.train(teacher) == []
    assert run.entries.calls.idle


class _Pair(nn.Sequential):
    """Runs one part without gradients and the other one with them."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self[0](x)
        out: torch.Tensor = self[1](x)
        return out


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        ("frozen", ["frozen"]),
        ("frozen, without gradients", ["frozen"]),  # a teacher
        ("a momentum encoder", []),  # the same, and it follows
        ("in eval mode", []),
        ("affine alone", []),  # somebody has chosen the norm, and the layer before it trains
        ("trained at times", []),  # a discriminator, in its generator's turn
        ("last", ["last"]),
        ("usual", []),
    ],
)
def test_statistics_of_the_trained_model(kind: str, told: list[str | None]) -> None:
    """Those of a frozen part stay, and those of what trains are more than the last batch."""
    run = Run()
    body = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8, momentum=0.99 if kind == "last" else 0.1))
    inside = kind in {"frozen, without gradients", "a momentum encoder"}
    run.model = _Pair(body, nn.Linear(4, 2)) if inside else nn.Sequential(body, nn.Linear(8, 2))
    (body[1] if kind == "affine alone" else body).requires_grad_(kind in {"last", "usual"})
    if kind == "in eval mode":
        body.eval()
    steps = iter(range(1000))

    def each(_: torch.Tensor) -> None:
        if kind == "trained at times":
            body.requires_grad_(next(steps) % 2 == 0)

    def after() -> None:
        for parameter in body.parameters() if kind == "a momentum encoder" else ():
            parameter.data.mul_(0.99)

    assert run.train(each, after, steps=20) == told
    assert [fact.names for fact in run.told] == [("0.1",)] * len(told)
