"""`ddpdebug check` on jobs that go wrong in every way: the right exit code, nothing left behind, nothing lost."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from machine import PATIENCE, until

pytestmark = [pytest.mark.jobs, pytest.mark.slow]
SCRIPT = Path(__file__).parent.parent / "support" / "scripts" / "wrong_ways.py"
CHECK = ("-m", "ddpdebug", "check", "--nproc-per-node", 2, "--quiet", "--json", "v.json")
Command = Callable[..., subprocess.CompletedProcess[str]]


def _record(tmp_path: Path) -> dict[str, object]:
    record: dict[str, object] = json.loads((tmp_path / "v.json").read_text(encoding="utf-8"))
    return record


@pytest.fixture(scope="module", autouse=True)
def hanging(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, subprocess.Popen[str]]]:
    """Start the job that hangs first: until its time is over, which must do for its start, the other tests run."""
    folder = tmp_path_factory.mktemp("hangs")
    words = [sys.executable, *map(str, CHECK), "--timeout", "60", str(SCRIPT), "hang-at-init", "pids"]
    with subprocess.Popen(words, cwd=folder, env=_environ(), stderr=subprocess.PIPE, text=True) as process:
        yield folder, process
        process.terminate()


def _environ() -> dict[str, str]:
    kept = {key: value for key, value in os.environ.items() if key not in {"RANK", "WORLD_SIZE"}}
    return {**kept, "OMP_NUM_THREADS": "1", "DDPDEBUG_METRICS": "off"}


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


@pytest.mark.slow
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
    assert until(lambda: not _alive(pid))


def test_loud_job(command: Command, tmp_path: Path) -> None:
    """A hundred megabytes of output pass through, all of them."""
    done = command(*CHECK, SCRIPT, "loud")
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.count("x") == 2 * 8 * 6 * 1023 * 1024


def test_two_checks_at_once(tmp_path: Path) -> None:
    """Two checks on one machine, in one folder, take neither each other's ports nor each other's files."""
    words = ("-m", "ddpdebug", "check", "--nproc-per-node", "2", "--quiet", "--json")
    started = [
        subprocess.Popen(
            [sys.executable, *words, f"{number}.json", str(SCRIPT), "clean"],
            cwd=tmp_path,
            env=_environ(),
            stderr=subprocess.PIPE,
            text=True,
        )
        for number in range(2)
    ]
    ended = [process.communicate(timeout=PATIENCE)[1] for process in started]
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


def test_hang_at_init(hanging: tuple[Path, subprocess.Popen[str]]) -> None:
    """A rank that never joins is named with its line, and ends with its children though all ignore SIGTERM."""
    folder, process = hanging
    _, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 4, err
    ranks = _record(folder)["ranks"]
    assert isinstance(ranks, dict)
    assert "wrong_ways.py:20 (<module>)" in ranks["1"]["reason"]
    assert "wrong_ways.py:25 (<module>), which waits in" in ranks["0"]["reason"]
    pids = _pids(folder / "pids")
    assert len(pids) == 2
    assert until(lambda: not any(map(_alive, pids)))
