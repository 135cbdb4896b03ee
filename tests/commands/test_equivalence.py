"""`ddpdebug equivalence` as a user starts it."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

pytestmark = pytest.mark.jobs
Command = Callable[..., subprocess.CompletedProcess[str]]

_FACTORIES = """
import os, signal
import torch
import torch.distributed as dist
from torch import nn

def squares(model, batch):
    return model(batch).square().mean()

def good():
    return nn.Linear(4, 1), squares, torch.randn(8, 4)

def bad():
    return nn.Linear(4, 1), lambda model, batch: squares(model, batch) * dist.get_world_size(), torch.randn(8, 4)

def odd():
    return nn.Linear(4, 1), squares, torch.randn(7, 4)

def fails():
    raise KeyError("no data")

def dies():
    if os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    return good()
"""


@pytest.fixture
def factories(tmp_path: Path) -> Path:
    file = tmp_path / "factories.py"
    file.write_text(_FACTORIES)
    return file


@pytest.mark.parametrize(
    "name, code, message",
    [
        pytest.param(
            "good",
            0,
            "verdict: equivalent: 2 ranks train like one process in 3 steps (exit 0)",
            marks=pytest.mark.smoke,
        ),
        pytest.param(
            "odd",
            2,
            "error: a batch of 7 cannot be split into 2 equal parts; make it a multiple of 2",
            marks=pytest.mark.slow,
        ),
        # of the rank that is first
        pytest.param("fails", 3, ": exception: KeyError: 'no data'", marks=pytest.mark.slow),
        pytest.param("dies", 4, "rank 1: died by SIGKILL", marks=pytest.mark.slow),
        pytest.param("missing", 2, "has no function 'missing'", marks=pytest.mark.slow),
    ],
)
def test_exit_codes(command: Command, factories: Path, name: str, code: int, message: str) -> None:
    """Those of `check`, with the reason."""
    done = command("-m", "ddpdebug", "equivalence", f"{factories}:{name}")
    assert done.returncode == code, done.stderr
    assert message in done.stderr


@pytest.mark.slow
def test_the_finding_is_printed_and_written(command: Command, factories: Path, tmp_path: Path) -> None:
    """A module of the current folder, on three ranks, in a step of the user's choice."""
    words = ["--nproc-per-node", 4, "--steps", 1, "--json", tmp_path / "verdict.json"]
    done = command("-m", "ddpdebug", "equivalence", "factories:bad", *words)
    assert done.returncode == 1, done.stderr
    assert "SYNC209 error" in done.stderr
    assert "all gradients are the world size times as large" in done.stderr
    (finding,) = json.loads((tmp_path / "verdict.json").read_text())["findings"]
    assert (finding["code"], finding["step"]) == ("SYNC209", 0)
    assert finding["evidence"]["ratio"] == {"weight": pytest.approx(4), "bias": pytest.approx(4)}


@pytest.mark.slow
def test_ranks_that_torchrun_made_are_used(command: Command, factories: Path) -> None:
    """Rank 0 prints the verdict, all exit with it."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2]
    done = command(*torchrun, "-m", "ddpdebug", "equivalence", f"{factories}:good")
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("verdict: equivalent: 2 ranks") == 1
    done = command(*torchrun, "-m", "ddpdebug", "equivalence", f"{factories}:bad")
    assert done.returncode == 1
    assert done.stderr.count("verdict: findings") == 1


@pytest.mark.parametrize(
    "word, message",
    [
        ("nocolon", "names no factory; write package.module:build or file.py:build"),
        ("no.py:build", "no such file: 'no.py'"),
    ],
)
def test_a_wrong_line_starts_nothing(command: Command, word: str, message: str) -> None:
    """It is an error before torch is loaded."""
    done = command("-X", "importtime", "-m", "ddpdebug", "equivalence", word)
    assert done.returncode == 2
    assert message in done.stderr
    assert "| torch" not in done.stderr
