"""What a model is given, sample by sample: views that are the same, evaluations of training data, a mistaken axis."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ddpdebug.isolation.guard import Guard
from ddpdebug.probes.entries import Entries
from ddpdebug.probes.training_loop.samples import Axes, Known, Views

GUARD = Guard(lambda part, message: pytest.fail(f"{part}: {message}"))


def told(model: nn.Module, batches: list[list[torch.Tensor]]) -> list[str | None]:
    """Return what is told of steps with so many forwards each."""
    views = Views()
    seen = [views.forward(model, [x], first=not i) for batch in batches for i, x in enumerate(batch)]
    return [fact.inside for fact in seen if fact is not None]


def random() -> torch.Tensor:
    """Make a batch."""
    return torch.randn(8, 4)


def test_rows_and_views_of_the_first_batches() -> None:
    """All rows alike, halves alike, or two forwards of a step, of other memory; each told once."""
    model = nn.Linear(4, 2)
    assert told(model, [[random()] for _ in range(9)]) == []
    assert told(model, [[random()[:1].repeat(8, 1)] for _ in range(9)]) == ["rows"]
    assert told(model, [[random().repeat(2, 1)] for _ in range(9)]) == ["views"]
    assert told(model, [[x := random(), x.clone()] for _ in range(9)]) == ["views"]
    assert told(model, [[random(), random()] for _ in range(9)]) == []


def test_what_makes_two_views_of_one() -> None:
    """Dropout; the same tensor twice is given on purpose; one batch that differs says that all may."""
    dropout = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.1))
    assert told(dropout, [[random().repeat(2, 1)] for _ in range(9)]) == []
    assert told(nn.Linear(4, 2), [[x := random(), x] for _ in range(9)]) == []
    assert told(nn.Linear(4, 2), [[random()], *([random().repeat(2, 1)] for _ in range(9))]) == []
    assert told(nn.Linear(4, 2), [[torch.ones(4, 4)] for _ in range(9)]) == []  # too few to tell


@pytest.mark.parametrize(("share", "expected"), [(1.0, [0, 16, 0]), (0.5, [0, 16, 0]), (0.0, [0, 0, 0])])
def test_evaluations_of_what_is_trained_on(share: float, expected: list[int]) -> None:
    """Told at the second one, where a part of each forward's samples is known."""
    known, trained, other = Known(), torch.randn(32, 8), torch.randn(32, 8)
    known.trains(lambda: [trained])
    number = int(8 * share)
    found = []
    for _ in range(3):
        for start in (0, 8, 16, 24):
            known.evaluates([torch.cat([trained[start : start + number], other[: 8 - number]])].copy)
        found.append(known.ends(evaluated=True))
    assert [min(n, 16) for n in found] == expected


@pytest.mark.parametrize("varies", [False, True])
def test_everything_in_one_forward(varies: bool) -> None:
    """Of a whole graph the loss chooses what counts; where another batch was trained on, an evaluation has its own."""
    known, whole = Known(), torch.randn(32, 8)
    found = []
    for _ in range(3):
        for _ in range(2):
            known.trains(lambda: [torch.randn(32, 8) if varies else whole])
        known.trains(lambda: [whole])
        known.evaluates(lambda: [whole])
        found.append(known.ends(evaluated=True))
    assert any(found) == varies


def test_an_evaluation_with_data_of_its_own_beside() -> None:
    """The loss over training data is wanted beside the other one, and steps without a loss are no evaluation."""
    known, trained = Known(), torch.randn(32, 8)
    known.trains(lambda: [trained])
    for _ in range(4):
        known.evaluates(lambda: [trained[:16]])
        known.evaluates(lambda: [torch.randn(16, 8)])
        assert not known.ends(evaluated=True)
    for _ in range(4):
        known.evaluates(lambda: [trained[:16]])
        assert not known.ends(evaluated=False)


@pytest.mark.parametrize(
    ("batch_first", "shape", "targets", "layer"),
    [
        (False, (32, 10, 4), 32, "LSTM"),
        (True, (32, 10, 4), 32, None),
        (False, (10, 32, 4), 32, None),
        (False, (10, 32, 4), 320, None),  # one for each token
        (False, (32, 1, 4), 32, None),  # one sequence
        (False, (32, 32, 4), 32, None),  # cannot be told
    ],
)
def test_a_layer_that_runs_over_the_samples(
    batch_first: bool,
    shape: tuple[int, ...],
    targets: int,
    layer: str | None,
) -> None:
    """Its time has as many entries as there are targets."""
    entries = Entries(GUARD)
    axes = Axes(entries)
    axes.begin()
    try:
        nn.LSTM(4, 4, batch_first=batch_first)(torch.zeros(shape))
    finally:
        axes.release()
        entries.close()
    found = axes.mixed(torch.zeros(targets))
    assert (None if found is None else found.layer) == layer
