"""`ddpdebug check`: verdicts and exit codes of real jobs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest
from machine import PATIENCE

from ddpdebug.schema.finding import Finding, Severity

pytestmark = pytest.mark.jobs
SCRIPT = Path(__file__).parent.parent / "support" / "scripts" / "train.py"
Command = Callable[..., subprocess.CompletedProcess[str]]


@pytest.mark.parametrize(
    "mode, options, code, word",
    [
        ("clean", ("--steps", 4), 0, "clean"),
        pytest.param("lr", (), 1, "findings", marks=pytest.mark.smoke),
        pytest.param("lr", ("--on-finding", "raise"), 1, "findings", marks=pytest.mark.slow),
        pytest.param("raise", (), 3, "script failed", marks=pytest.mark.smoke),
        pytest.param("exit", (), 3, "script failed", marks=pytest.mark.slow),
        pytest.param("kill", (), 4, "lost rank", marks=pytest.mark.smoke),
        pytest.param("os._exit", (), 0, "not checked", marks=pytest.mark.slow),
    ],
)
def test_verdict(
    mode: str, options: tuple[object, ...], code: int, word: str, command: Command, tmp_path: Path
) -> None:
    """Every ending has its word and its exit code, on the terminal and in the files."""
    files = ("--json", "v.json", "--junit", "v.xml", "--out", "o")
    steps = 8 if "raise" not in options else 200
    done = command("-m", "ddpdebug", "check", "--nproc-per-node", 2, *files, *options, SCRIPT, mode, steps)
    record = json.loads((tmp_path / "v.json").read_text(encoding="utf-8"))
    assert (done.returncode, record["exit_code"], record["verdict"]) == (code, code, word), done.stderr
    title = "no findings, but not checked" if word == "not checked" else word
    assert f"ddpdebug: verdict: {title} (exit {code})" in done.stderr
    assert record["run"] == str(tmp_path / "o")
    ET.parse(tmp_path / "v.xml")
    assert record["blamed"] == ([1] if code > 1 else [])
    assert ("RANK104" in [finding["code"] for finding in record["findings"]]) is (mode == "lr")


@pytest.mark.slow
def test_what_is_ignored_fails_nothing_and_is_counted(command: Command, tmp_path: Path) -> None:
    """Entries of pyproject.toml and of the command line; one without use is said, and a wrong one starts nothing."""
    (tmp_path / "pyproject.toml").write_text('[tool.ddpdebug]\nignore = ["RANK104 # each its own rate"]\n')
    words = ("-m", "ddpdebug", "check", "--nproc-per-node", 2, "--json", "v.json", "--out", "o")
    done = command(*words, "--ignore", "RANK101", "--ignore", "RANK103", "--ignore", "NUM307:head", SCRIPT, "lr", 8)
    record = json.loads((tmp_path / "v.json").read_text(encoding="utf-8"))
    assert (done.returncode, record["verdict"]) == (0, "clean"), done.stderr
    counts = record["ignored"]
    assert list(counts) == ["RANK104 # each its own rate", "RANK101", "RANK103", "NUM307:head"]
    assert (counts["RANK104 # each its own rate"], counts["NUM307:head"]) == (1, 0)
    assert "1 finding ignored by RANK104 # each its own rate" in done.stderr
    assert "nothing to ignore by NUM307:head" in done.stderr
    codes = [json.loads(line)["code"] for line in (tmp_path / "o" / "ignored.jsonl").read_text().splitlines()]
    assert "RANK104" in codes
    again = command("-m", "ddpdebug", "verdict", "o")
    assert (again.returncode, "ignored by RANK104" in again.stdout) == (0, True), again.stdout
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2, "-m", "ddpdebug", "check")
    done = command(*torchrun, "--ignore", "RANK101", "--json", "t.json", "--out", "t", SCRIPT, "lr", 8)
    assert json.loads((tmp_path / "t.json").read_text())["ignored"]["RANK104 # each its own rate"] == 1, done.stderr
    wrong = command("-m", "ddpdebug", "run", "--ignore", "RANK94", SCRIPT)
    assert (wrong.returncode, "there is no finding 'RANK94'; did you mean" in wrong.stderr) == (2, True), wrong.stderr


@pytest.mark.smoke
def test_single_process(command: Command) -> None:
    """One rank is no comparison, unless it is asked for; and a script that never trains is said to be one."""
    done = command("-m", "ddpdebug", "check", "--steps", 3, SCRIPT, "clean", 8)
    assert (done.returncode, "but not checked (exit 1)" in done.stderr) == (1, True), done.stderr
    assert "not checked: nothing is compared between ranks: there was one; start several with" in done.stderr
    done = command("-m", "ddpdebug", "check", "--nproc-per-node", 1, "--steps", 3, SCRIPT, "clean", 8)
    assert (done.returncode, "verdict: clean (exit 0)" in done.stderr) == (0, True), done.stderr
    assert "one rank, as --nproc-per-node 1 asks for: nothing was compared between ranks" in done.stderr
    done = command("-m", "ddpdebug", "check", "-m", "this")
    assert done.returncode == 1
    assert "no findings, but not checked (exit 1)" in done.stderr
    assert "no optimizer step was seen" in done.stderr


_SPAWNS = """
import os, signal, sys, time
import torch
import torch.multiprocessing as mp
from torch import nn
from torch.distributed import barrier, destroy_process_group, init_process_group
from torch.nn.parallel import DistributedDataParallel
def train(rank, mode):
    init_process_group("gloo", init_method="file://" + os.path.abspath("store"), rank=rank, world_size=2)
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.Generator().manual_seed(10 + rank)
    for step in range(8):
        if (mode, step, rank) == ("lr", 3, 1):
            optimizer.param_groups[0]["lr"] = 0.2
        optimizer.zero_grad()
        model(torch.randn(8, 4, generator=data)).pow(2).mean().backward()
        optimizer.step()
    if mode in ("raise", "kill"):
        if rank == 0:
            time.sleep(600)
        if mode == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        raise ValueError("bad batch")
    barrier()
    del model
    destroy_process_group()
if __name__ == "__main__":
    mp.spawn(train, (sys.argv[1],), 2)
    if sys.argv[1] == "after":
        raise ValueError("after the ranks")
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "mode, code, blamed",
    [
        pytest.param("clean", 0, [], marks=pytest.mark.thorough),
        ("lr", 1, []),
        ("raise", 3, [1]),
        ("kill", 4, [1]),
        pytest.param("after", 3, [], marks=pytest.mark.thorough),
    ],
)
def test_ranks_that_the_script_starts(
    mode: str, code: int, blamed: list[int], command: Command, tmp_path: Path
) -> None:
    """The verdict is made of their rows and ends, and of the script's own."""
    (tmp_path / "spawns.py").write_text(_SPAWNS, encoding="utf-8")
    done = command("-m", "ddpdebug", "check", "--json", "v.json", "--out", "o", "spawns.py", mode)
    record = json.loads((tmp_path / "v.json").read_text(encoding="utf-8"))
    assert (done.returncode, record["blamed"]) == (code, blamed), done.stderr
    assert json.loads((tmp_path / "o" / "run.json").read_text(encoding="utf-8"))["world"] == 2
    if code < 3:
        found = [(finding["code"], finding["step"]) for finding in record["findings"]]
        assert (("RANK104", 3) in found) is (mode == "lr"), found


@pytest.mark.smoke
@pytest.mark.slow
@pytest.mark.parametrize(
    "mode, word", [("lr", "findings"), pytest.param("raise", "script failed", marks=pytest.mark.thorough)]
)
def test_under_torchrun(mode: str, word: str, command: Command, tmp_path: Path) -> None:
    """Inside ranks of torchrun, one rank prints and writes the verdict, and the job fails where it is bad."""
    done = command(*_TORCHRUN, "--json", "v.json", SCRIPT, mode, 8)
    assert done.returncode == 1
    _assert_one_verdict(tmp_path, word, done.stderr)


def _assert_one_verdict(folder: Path, word: str, err: str) -> None:
    record = json.loads((folder / "v.json").read_text(encoding="utf-8"))
    assert record["verdict"] == word, err
    assert err.count("ddpdebug: verdict:") == 1


_TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2, "-m", "ddpdebug", "check")
_HANGS = {
    "own": ("-m", "ddpdebug", "check", "--nproc-per-node", 2, "--out", "o"),
    "torchrun": (*_TORCHRUN, "--out", "o"),
}


@pytest.fixture(scope="module")
def hangs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, int, str]]:
    """Run the jobs that hang, of the tests that were chosen, beside each other: folder, status, errors."""
    chosen = {item.name for item in request.session.items if item.path == request.path}
    jobs = {name: words for name, words in _HANGS.items() if f"test_hang_{name}" in chosen}
    environ = {key: value for key, value in os.environ.items() if key not in {"RANK", "WORLD_SIZE"}}
    environ.update(DDPDEBUG_METRICS="off", OMP_NUM_THREADS="1")
    started = []
    for words in jobs.values():
        line = [sys.executable, *map(str, (*words, "--timeout", PATIENCE, "--json", "v.json", SCRIPT, "hang", 8))]
        folder = tmp_path_factory.mktemp("hangs")
        process = subprocess.Popen(line, cwd=folder, env=environ, stderr=subprocess.PIPE, text=True)
        started.append((folder, process))
    ended = [(folder, process.communicate(timeout=PATIENCE)[1], process.returncode) for folder, process in started]
    return {name: (folder, code, err) for name, (folder, err, code) in zip(jobs, ended, strict=True)}


@pytest.mark.smoke
@pytest.mark.slow
def test_hang_own(hangs: dict[str, tuple[Path, int, str]], command: Command) -> None:
    """A job is ended with all its processes as soon as it is known who keeps it, and says so."""
    folder, code, err = hangs["own"]
    assert code == 4, err
    assert "verdict: hang" in err
    assert "SignalException" not in err  # we have ended the launcher ourselves
    record = json.loads((folder / "v.json").read_text(encoding="utf-8"))
    assert (record["verdict"], record["blamed"], record["hang"]["code"]) == ("hang", [1], "HANG501")
    assert "rank 0 waits in all_reduce" in err
    assert "train.py:43" in record["ranks"]["0"]["reason"]
    assert "train.py:39 (<module>)" in record["ranks"]["1"]["reason"]
    assert "backward" in (folder / "o" / "ranks" / "0" / "stacks.txt").read_text(encoding="utf-8")
    assert command("-m", "ddpdebug", "verdict", folder / "o").returncode == 4


@pytest.mark.slow
def test_hang_torchrun(hangs: dict[str, tuple[Path, int, str]]) -> None:
    """Inside ranks of torchrun as well."""
    folder, code, err = hangs["torchrun"]
    assert code == 1, err
    _assert_one_verdict(folder, "hang", err)
    assert "rank 1 is missing: sleeps, at" in err
    assert json.loads((folder / "o" / "check.json").read_text(encoding="utf-8"))["hung"] is True


@pytest.mark.thorough
def test_a_hang_that_is_over_ends_nothing(command: Command, tmp_path: Path) -> None:
    """A rank that was stopped for eight seconds is a warning in the verdict."""
    script = Path(__file__).parent.parent / "progress" / "scripts" / "stops.py"
    words = ("--nproc-per-node", 2, "--fail-on", "critical", "--json", "v.json", "--timeout", PATIENCE)
    done = command("-m", "ddpdebug", "check", *words, script, "sigstop", 1, 5, 8)
    record = json.loads((tmp_path / "v.json").read_text(encoding="utf-8"))
    assert (done.returncode, record["hang"]) == (0, None), done.stderr
    assert "counts as a warning" in done.stderr


@pytest.mark.slow
def test_old_findings_do_not_count(command: Command, tmp_path: Path) -> None:
    """A run directory that is used again is judged by the new run alone."""
    old = Finding(code="RANK101", severity=Severity.CRITICAL, title="old")
    (tmp_path / "o").mkdir()
    (tmp_path / "o" / "run.json").write_text('{"run": "old"}', encoding="utf-8")
    (tmp_path / "o" / "findings.jsonl").write_text(old.to_json() + "\n", encoding="utf-8")
    done = command("-m", "ddpdebug", "check", "--out", "o", "--json", "v.json", SCRIPT, "no-mode", "not-a-number")
    assert done.returncode == 3, done.stderr
    assert json.loads((tmp_path / "v.json").read_text(encoding="utf-8"))["findings"] == []
