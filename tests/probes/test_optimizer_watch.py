"""A watch knows the parameters of an optimizer that has gone, once each."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ddpdebug.isolation.guard import Guard
from ddpdebug.probes.entries import entries_of
from ddpdebug.probes.optimizers import OptimizerWatch, index_of


def test_an_optimizer_that_is_built_again_takes_over_the_number_of_one_that_was_forgotten() -> None:
    entries = entries_of(Guard(lambda part, message: pytest.fail(f"{part}: {message}")))
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    watch = OptimizerWatch(optimizer, 0, entries)
    watch.refresh([])
    del optimizer
    watch.forget()
    assert watch.number() == 2
    assert index_of(torch.optim.SGD(model.parameters(), 0.1), [watch]) == 0
    del model
    assert not watch.number()
