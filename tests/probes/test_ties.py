"""Which parameters were one and are two."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ddpdebug.isolation.guard import Guard
from ddpdebug.probes.built import Built
from ddpdebug.probes.entries import entries_of


class Words(nn.Module):
    """A model whose output layer has the weight of its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(6, 4)
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.embed.weight


def _broken(case: str) -> list[tuple[torch.Tensor, torch.Tensor]]:
    entries = entries_of(Guard(lambda part, message: pytest.fail(f"{part}: {message}")))
    built: Built = entries.built
    entries.on_parts("probe:built", built.has_part)
    try:
        with torch.device("cpu" if case == "as it is" else "meta"):
            model = Words()
        if case != "as it is":
            model.to_empty(device="cpu")
        if case == "tied again":
            model.head.weight = model.embed.weight
        if case == "by hand":
            model.head.weight = nn.Parameter(model.embed.weight.detach().clone())
        if case == "replaced":
            model.head = nn.Linear(4, 6)
        return built.ties.broken({id(p) for p in model.parameters() if case != "frozen" or p is model.head.weight})
    finally:
        entries.close()


@pytest.mark.parametrize("case", ["as it is", "tied again", "by hand", "replaced", "frozen"])
def test_what_is_tied_or_was_untied_on_purpose_is_left_alone(case: str) -> None:
    """What does not train too."""
    assert _broken(case) == []


def test_parameters_that_are_made_anew_module_by_module_are_tied_no_more() -> None:
    """As `to_empty` makes them."""
    ((one, other),) = _broken("to_empty")
    assert one is not other
    assert one.shape == other.shape
