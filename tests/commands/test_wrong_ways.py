"""`ddpdebug check` on jobs that go wrong in every way: the right exit code, nothing left behind, nothing lost."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

pytestmark = [pytest.mark.jobs, pytest.mark.slow]
SCRIPT = Path(__file__).parent.parent / "support" / "scripts" / "wrong_ways.py"
CHECK = ("-m", "ddpdebug", "check", "--nproc-per-node", 2, "--quiet", "--json", "v.json")
Command = Callable[..., subprocess.CompletedProcess[str]]


def _record(tmp_path: Path) -> dict[str, object]:
    record: dict[str, object] = json.loads((tmp_path / "v.json").read_text(encoding="utf-8"))
    return record


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").split()[2] != "Z"
    except OSError:
        return False


def _pids(file: Path) -> list[int]:
    return [int(word) for word in file.read_text(encoding="utf-8").split()]


def test_crash_before_ddp(command: Command, tmp_path: Path) -> None:
    """A script that fails before its ranks ever met is a failed script, now and from its run directory."""
    done = command(*CHECK, "--out", "o", SCRIPT, "crash-early")
    assert (done.returncode, "RuntimeError: no data" in done.stderr) == (3, True), done.stderr
    assert command("-m", "ddpdebug", "verdict", "o").returncode == 3


def test_hang_at_init(command: Command, tmp_path: Path) -> None:
    """A rank that never joins is named with its line, and ends with its children though all ignore SIGTERM."""
    done = command(*CHECK, "--timeout", 25, SCRIPT, "hang-at-init", "pids")
    assert done.returncode == 4, done.stderr
    ranks = _record(tmp_path)["ranks"]
    assert isinstance(ranks, dict)
    assert "wrong_ways.py:20 (<module>)" in ranks["1"]["reason"]
    assert "wrong_ways.py:25 (<module>), which waits in" in ranks["0"]["reason"]
    pids = _pids(tmp_path / "pids")
    assert (len(pids), [pid for pid in pids if _alive(pid)]) == (2, [])


def test_one_rank_leaves_early(command: Command, tmp_path: Path) -> None:
    """A rank that exits with 0 in the middle does not make the check green."""
    done = command(*CHECK, SCRIPT, "leaves-early")
    assert done.returncode in {3, 4}, done.stderr
    assert _record(tmp_path)["blamed"]


def test_grandchildren_are_ended(command: Command, tmp_path: Path) -> None:
    """What a clean job leaves running is ended with it."""
    done = command(*CHECK, SCRIPT, "grandchild", "pid")
    assert done.returncode == 0, done.stderr
    (pid,) = _pids(tmp_path / "pid")
    assert not _alive(pid)


def test_loud_job(command: Command, tmp_path: Path) -> None:
    """A hundred megabytes of output pass through, all of them."""
    done = command(*CHECK, SCRIPT, "loud")
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.count("x") == 2 * 8 * 6 * 1023 * 1024


def test_two_checks_at_once(tmp_path: Path) -> None:
    """Two checks on one machine, in one folder, take neither each other's ports nor each other's files."""
    environ = {key: value for key, value in os.environ.items() if key not in {"RANK", "WORLD_SIZE"}}
    words = ("-m", "ddpdebug", "check", "--nproc-per-node", "2", "--quiet", "--json")
    started = [
        subprocess.Popen(
            [sys.executable, *words, f"{number}.json", str(SCRIPT), "clean"],
            cwd=tmp_path,
            env={**environ, "OMP_NUM_THREADS": "1"},
            stderr=subprocess.PIPE,
            text=True,
        )
        for number in range(2)
    ]
    deadline = time.monotonic() + 110
    ended = [process.communicate(timeout=deadline - time.monotonic())[1] for process in started]
    assert [process.returncode for process in started] == [0, 0], ended
    runs = {json.loads((tmp_path / f"{number}.json").read_text(encoding="utf-8"))["run"] for number in range(2)}
    assert len(runs) == 2


def test_read_only_folder(command: Command, tmp_path: Path) -> None:
    """Where no run directory can be made, it is a temporary one that is named, and the verdict is the job's."""
    done = command(*CHECK[:-2], "--json", tmp_path / "v.json", SCRIPT, "clean", cwd=Path("/proc"))
    assert done.returncode == 0, done.stderr
    run = Path(str(_record(tmp_path)["run"]))
    assert run.name.startswith("ddpdebug-")
    assert (run / "run.json").is_file()
