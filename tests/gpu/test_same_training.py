"""On CUDA, too, a job trains bit for bit the same with ddpdebug as without it, and is looked at while it does.

Each kind runs plain, on CUDA plain again, and watched. Where the two plain ones differ nothing can be said, and the
test fails. On the CPU, where tests/harm says more, the kinds run whose script has the same lines there.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

from ddpdebug.run_directory import reader
from ddpdebug.schema.row import Flag

#: kind of tests/gpu/scripts/train.py -> ranks (0 is one process without a launcher), backend on CUDA
KINDS: dict[str, tuple[int, str]] = {
    "fp32": (0, ""),
    "moved": (0, ""),
    "amp": (0, ""),
    "compiled": (0, ""),
    "graph": (0, ""),
    "no-sync": (0, ""),
    "ddp": (1, "nccl"),
    "ddp-no-sync": (1, "nccl"),
    "ddp-graph": (1, "nccl"),
}
_ON_THE_CPU = ("moved", "amp", "compiled")
_CASES = [pytest.param(kind, "cuda", id=f"cuda-{kind}", marks=pytest.mark.gpu) for kind in KINDS]
_CASES += [
    pytest.param(kind, "cpu", id=f"cpu-{kind}", marks=pytest.mark.slow if kind == "moved" else pytest.mark.thorough)
    for kind in _ON_THE_CPU
]
#: Capture of a DDP asks for that, by torch's notes on CUDA graphs.
_ENV = {"ddp-graph": {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}}


def _three(train: Callable[..., Any], kind: str, ranks: int, device: str, env: dict[str, str]) -> list[Any]:
    done = [
        train("train.py", kind, "found", device, watched=watched, ranks=ranks, env=env, result="found")
        for watched in (*([False] if device == "cuda" else []), False, True)
    ]
    for job in done:
        assert job.status == 0, job.text
        assert len(job.files) == max(1, ranks), job.text
    return done


def _same(done: list[Any], compare: Callable[[Any, Any], list[str]]) -> None:
    *plain, watched = (job.saved() for job in done)
    assert compare(plain[0], plain[-1]) == [], "plain training is not the same twice: nothing can be compared"
    assert compare(plain[0], watched) == []
    assert done[-1].trouble() == ""
    assert [found.code for found in done[-1].findings()] == []


@pytest.mark.jobs
@pytest.mark.parametrize("kind, device", _CASES)
def test_training_is_the_same(
    kind: str, device: str, train: Callable[..., Any], compare: Callable[..., Any], checked: Callable[[Any], None]
) -> None:
    """Losses, weights, gradients, optimizer state, random state; no part fails, nothing is found, steps are checked."""
    ranks, backend = KINDS[kind]
    env = {"BACKEND": backend if device == "cuda" else "gloo", **_ENV.get(kind, {})}
    done = _three(train, kind, ranks, device, env)
    _same(done, compare)
    checked(done[-1])
    if kind == "amp":
        assert any(row.flags & Flag.SKIPPED for row in done[-1].rows())
    if kind.endswith("no-sync") and device == "cuda":
        assert all("raises:" in job.text for job in done)


@pytest.mark.gpu
@pytest.mark.jobs
def test_replays_of_a_whole_step_are_counted(train: Callable[..., Any]) -> None:
    """Nobody sees them: the run is not complete, and says of how many steps."""
    done = train("train.py", "graph", "found", "cuda", watched=True, result="found")
    assert done.status == 0, done.text
    coverage = reader.read_run(done.directory)["coverage"]
    (replayed,) = (rank["replayed"] for rank in coverage["ranks"].values())
    assert (replayed > 0, coverage["complete"]) == (True, False)
    assert "were not seen: a CUDA graph replayed them" in coverage["line"]


@pytest.mark.thorough
@pytest.mark.jobs
def test_two_ranks_share_a_device(
    device: str, train: Callable[..., Any], compare: Callable[..., Any], checked: Callable[[Any], None]
) -> None:
    """Gloo reduces tensors of the device, and the ranks agree in all that is compared."""
    done = _three(train, "ddp", 2, device, {"BACKEND": "gloo"})
    _same(done, compare)
    checked(done[-1])


@pytest.mark.thorough
@pytest.mark.jobs
def test_the_times_are_those_of_the_device(device: str, train: Callable[..., Any]) -> None:
    """From the second checked step on each phase has one, and together they are no longer than the step."""
    ranks, backend = KINDS["ddp"]
    env = {"BACKEND": backend if device == "cuda" else "gloo"}
    done = train("train.py", "ddp", "found", device, watched=True, ranks=ranks, env=env, result="found")
    assert done.status == 0, done.text
    rows = done.rows()[4:]
    names = ("forward_seconds", "backward_seconds", "optimizer_seconds")
    times = [[getattr(row, name) for name in names] for row in rows]
    assert all(math.isfinite(value) and value > 0 for row in times for value in row), times
    assert sum(map(sum, times)) <= 1.2 * sum(row.step_seconds for row in rows)
    if device == "cuda":
        assert any(math.isfinite(row.sync_wait_seconds) for row in rows)
