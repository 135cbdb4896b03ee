"""Sharded training on CUDA, two ranks on one device over gloo: the same bit for bit; a copy that differs is named."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


@pytest.mark.thorough
@pytest.mark.jobs
@pytest.mark.parametrize("kind", ["fsdp", "hsdp", "tp"])
def test_sharded_training_is_the_same(
    kind: str, device: str, train: Callable[..., Any], compare: Callable[..., Any]
) -> None:
    """Losses and the parts of all parameters."""
    plain, again, watched = (
        train("sharded.py", kind, "found", device, watched=watched, ranks=2, result="found")
        for watched in (False, False, True)
    )
    assert (plain.status, again.status, watched.status) == (0, 0, 0), watched.text
    assert compare(plain.saved(), again.saved()) == [], "plain training is not the same twice: nothing can be compared"
    assert compare(plain.saved(), watched.saved()) == []
    assert (watched.trouble(), [found.code for found in watched.findings()]) == ("", [])


@pytest.mark.thorough
@pytest.mark.jobs
@pytest.mark.parametrize("kind, dimension", [("hsdp", "replicate"), ("tp", "tp")])
def test_a_copy_that_differs_is_named(kind: str, dimension: str, device: str, train: Callable[..., Any]) -> None:
    """RANK101, with the parameter, the step and the dimension of the mesh."""
    done = train("sharded.py", kind, "found", device, "fault", watched=True, ranks=2, result="found")
    (found,) = [found for found in done.findings() if found.code == "RANK101"]
    assert (found.step, list(found.subject)) == (21, ["0.weight"])
    assert list(found.evidence["dimensions"]) == [dimension]
