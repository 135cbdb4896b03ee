"""`ddpdebug run` on real jobs."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from machine import PATIENCE, processes, until

from ddpdebug.run_directory.reader import read_findings, read_outcomes

pytestmark = pytest.mark.jobs
SCRIPT = Path(__file__).parent.parent / "support" / "scripts" / "train.py"
Command = Callable[..., subprocess.CompletedProcess[str]]
_TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2)


def _results(output: str) -> list[str]:
    return sorted(re.findall(r"^(?:RESULT|finally|variables) .*", output, re.MULTILINE))


@pytest.mark.slow
def test_single_process(command: Command, tmp_path: Path) -> None:
    """Without ranks the script runs in this very process, sees its own words, and ends as without us."""
    plain = command(SCRIPT, "clean", 5)
    ours = command("-m", "ddpdebug", "run", "--quiet", "--out", tmp_path / "o", SCRIPT, "clean", 5)
    assert (ours.returncode, ours.stdout, ours.stderr) == (0, plain.stdout, plain.stderr)
    assert read_outcomes(tmp_path / "o")[0]["reason"] == "finished"


@pytest.fixture(scope="module")
def plain() -> list[str]:
    """Return what the job prints under torchrun without us."""
    words = [sys.executable, *map(str, _TORCHRUN), str(SCRIPT), "lr", "8"]
    environ = {**os.environ, "DDPDEBUG_METRICS": "off"}  # as `command` has it
    done = subprocess.run(words, env=environ, capture_output=True, text=True, timeout=PATIENCE, check=True)
    return _results(done.stdout)


@pytest.mark.parametrize(
    "way", [pytest.param("torchrun", marks=pytest.mark.slow), "own", pytest.param("module", marks=pytest.mark.slow)]
)
def test_ranks(way: str, plain: list[str], command: Command, tmp_path: Path) -> None:
    """Ranks of torchrun and ranks of our own are watched alike, and the job computes what it computes without us."""
    options = ("--out", tmp_path / "o", "--every-step")
    if way == "torchrun":
        ours = command(*_TORCHRUN, "-m", "ddpdebug", "run", *options, SCRIPT, "lr", 8)
    else:
        target = ("-m", "train") if way == "module" else (SCRIPT,)
        words = ("--nproc-per-node", 2, *options, *target, "lr", 8)
        ours = command("-m", "ddpdebug", "run", *words, PYTHONPATH=str(SCRIPT.parent))
    assert ours.returncode == 0, ours.stderr
    assert _results(ours.stdout) == plain
    assert re.search(r"^argv \['.*train\.py', 'lr', '8'\]$", ours.stdout, re.MULTILINE)
    assert [(f.code, f.step) for f in read_findings(tmp_path / "o")] == [("RANK104", 3)]
    assert {rank: outcome["reason"] for rank, outcome in read_outcomes(tmp_path / "o").items()} == {
        0: "finished",
        1: "finished",
    }


@pytest.mark.slow
def test_failure_is_the_users(command: Command) -> None:
    """The traceback is the script's own, and the launcher's status passes through."""
    done = command("-m", "ddpdebug", "run", "--nproc-per-node", 2, SCRIPT, "raise", 8)
    assert done.returncode == 1
    own = done.stderr[done.stderr.index("Traceback") :].split("\n")
    assert f'File "{SCRIPT}"' in own[1]
    assert "ValueError: bad batch" in done.stderr
    assert not re.search(r'File ".*ddpdebug/(runner|commands|__main__)', done.stderr)


@pytest.mark.slow
def test_steps(command: Command, tmp_path: Path) -> None:
    """`--steps` ends the script after so many steps, through its `finally` blocks."""
    done = command("-m", "ddpdebug", "run", "--nproc-per-node", 2, "--steps", 4, "--out", "o", SCRIPT, "clean", 1000)
    assert done.returncode == 0, done.stderr
    assert [line for line in _results(done.stdout) if line.startswith("finally")] == ["finally 0", "finally 1"]
    outcomes = read_outcomes(tmp_path / "o")
    assert {rank: (o["reason"], o["steps"]["0"]) for rank, o in outcomes.items()} == {
        0: ("stopped", 4),
        1: ("stopped", 4),
    }


@pytest.mark.parametrize(
    "number",
    [pytest.param(signal.SIGINT, marks=pytest.mark.smoke), pytest.param(signal.SIGTERM, marks=pytest.mark.slow)],
)
def test_signals_reach_the_ranks(number: signal.Signals, tmp_path: Path) -> None:
    """A signal to `ddpdebug run` ends launcher and ranks as one to torchrun does."""
    words = ["-m", "ddpdebug", "run", "--quiet", "--nproc-per-node", "2", str(SCRIPT), "hang", "100"]
    environ = {**os.environ, "DDPDEBUG_METRICS": "off", "MARK": str(tmp_path)}
    with subprocess.Popen(
        [sys.executable, *words], cwd=tmp_path, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        said = [process.stdout.readline().split()[0] for _ in range(4)]
        assert sorted(said) == ["argv", "argv", "variables", "variables"]
        process.send_signal(number)
        process.communicate(timeout=PATIENCE)
    assert process.returncode != 0
    assert until(lambda: not processes(f"MARK={tmp_path}"))
