"""What is made a graph is known as such, whichever way torch traces."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from ddpdebug import torch_internals as internals


@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
@pytest.mark.parametrize("above", [False, True])
def test_a_trace(mode: str, above: bool) -> None:
    seen: list[bool] = []

    def traced(x: torch.Tensor) -> torch.Tensor:
        seen.append(internals.is_made_a_graph())
        return x.sin()

    make_fx(traced, tracing_mode=mode, pre_dispatch=above)(torch.ones(3))
    assert set(seen) == {True}


def test_fake_tensors_and_nothing() -> None:
    with FakeTensorMode():
        assert internals.is_made_a_graph()
    assert not internals.is_made_a_graph()
