"""The live view, from a run directory and from endpoints."""

from __future__ import annotations

import io
import json
import os
import pty
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from ddpdebug.commands import main
from ddpdebug.reports.top.snapshot import RankView, Snapshot, from_directory
from ddpdebug.reports.top.view import phase_bar, sparkline, view
from ddpdebug.run_directory.writer import RunDirectory
from ddpdebug.schema.coverage import RankCoverage, Tally
from ddpdebug.schema.finding import Finding, Severity
from ddpdebug.schema.row import Digest, Flag, Row
from ddpdebug.schema.run_state import WaitState
from ddpdebug.schema.step import Step
from ddpdebug.sinks import Covered, FindingRaised, Record, RunEnded, RunStarted, StepJudged, Waiting

WORLD = 4
EVIL = "[red]w\x1b[2J\n"
STARTED = RunStarted(run_id="r1", rank=0, world=WORLD, directory=None, config={}, versions={})


def records() -> Iterator[Record]:
    """Yield what a run says whose rank 2 is outvoted and slow, and whose rank 1 had a NaN."""
    for step in range(5):
        rows = {}
        for rank in range(WORLD):
            bad = rank == 2
            rows[rank] = Row(
                rank=rank, step=step, loss=2.0 + rank, step_seconds=0.2,
                flags=int(Flag.LOSS_NONFINITE) if rank == 1 else 0, data_seconds=0.0, host_bytes=2 << 30,
                backward_seconds=0.04 if bad else 0.1, backward_local_seconds=0.03,
                sync_wait_seconds=0.01 if bad else 0.07, forward_seconds=0.03, overhead_seconds=0.002,
                params_after_digest=Digest(5 + bad),
            )  # fmt: skip
        step_record = StepJudged(step=Step(step=step, optimizer=0, world=WORLD, rows=rows), overhead_ratio=0.01)
        yield step_record
    finding = Finding(
        code="RANK101", severity=Severity.CRITICAL, title="t", step=3, ranks=(2,), subject=(EVIL,), id="RANK101-1"
    )
    yield FindingRaised(finding=finding)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Write the run."""
    sink = RunDirectory(tmp_path / "run", 0)
    for record in (STARTED, *records()):
        sink.write(record)
    sink.close()
    return tmp_path / "run"


def shown(snapshot: Snapshot, height: int = 40) -> str:
    """Return what the terminal shows."""
    console = Console(file=io.StringIO(), width=160, highlight=False, markup=False, emoji=False)
    console.print(view(snapshot, height))
    return console.file.getvalue()  # type: ignore[attr-defined,no-any-return]


def test_a_run_directory_says_who_is_ill(directory: Path) -> None:
    """The ill ranks come first, values that the newest step lacks come from an earlier one."""
    snapshot = from_directory(directory)
    assert snapshot.differing["parameters"] == 1
    assert [rank.outvoted for rank in snapshot.ranks] == [(), (), ("parameters",), ()]
    assert snapshot.ranks[2].losses == [4.0] * 5
    assert snapshot.straggler == (2, pytest.approx(0.3))
    assert snapshot.overhead == pytest.approx(0.01)
    text = shown(snapshot)
    for part in ("ranks differ: parameters", "gradients not compared yet", "NaN or Inf", "rank 2 +30 %",
                 "overhead 1 % · slowest: rank 2 in 100 %", "RANK101 critical step 3 · rank 2 ·",
                 "all up", " outvoted"):  # fmt: skip
        assert part in text
    rows = [line.split()[0] for line in text.splitlines() if line.strip()[:1].isdecimal()]
    assert rows == ["2", "1", "0", "3"]


def test_own_time_waiting_and_cost_fit_into_80_columns(directory: Path) -> None:
    """Of each rank in one line, with what is wrong with it; no column for devices where there are none."""
    snapshot = from_directory(directory)
    assert [(rank.cost, rank.last) for rank in snapshot.ranks][2] == (pytest.approx(0.3), 1)
    console = Console(file=io.StringIO(), width=80, highlight=False, markup=False, emoji=False)
    console.print(view(snapshot, 40))
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert max(map(len, lines)) <= 80
    (head,) = (line for line in lines if line.startswith("rank ") and "own" in line)
    assert head.split() == ["rank", "step", "loss", "curve", "time", "own", "phases", "cost", "GiB", "state"]
    found = {line.split()[0]: line for line in lines if line.strip()[:1].isdecimal()}
    assert " ".join(found["2"].split()).startswith("2 4 4 ▁▁▁▁▁ 0.2 s 0.19 s fb...... 30 % 2 outvoted")
    assert " ".join(found["0"].split()).startswith("0 4 2 ▁▁▁▁▁ 0.2 s 0.13 s fb...www 0 % 2 ok")


def test_what_is_not_checked_is_shown(directory: Path) -> None:
    """With its reason; nothing where all is checked."""
    assert "not checked" not in shown(from_directory(directory))
    missed = Covered(coverage=Tally(2).coverage({0: RankCoverage(steps=9)}, apart="rank 1 did not come", certain=True))
    sink = RunDirectory(directory / "other", 0)
    sink.write(RunStarted(run_id="r", rank=0, world=2, directory=None, config={}, versions={}))
    sink.write(missed)
    assert "not checked: nothing is compared between the ranks: rank 1 did not come" in shown(
        from_directory(directory / "other")
    )


def test_hundreds_of_ranks_fit_on_the_screen_and_the_ill_ones_are_on_it() -> None:
    """The rest is counted."""
    ranks = [RankView(rank=rank, step=1, own_seconds=0.1) for rank in range(512)]
    ranks[300].outvoted = ("parameters",)
    text = shown(Snapshot(title="t", world=512, ranks=ranks, differing={"parameters": 1}), height=24)
    assert len(text.splitlines()) <= 24
    assert "300" in text
    assert "more ranks, none of them worse" in text


def test_names_from_the_job_cannot_control_the_terminal(directory: Path) -> None:
    """They are text."""
    assert "\x1b[2J" not in shown(from_directory(directory))
    assert r"[red]w\x1b[2J\n" in shown(from_directory(directory))


def test_the_command_finds_the_newest_run(
    directory: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Or says that there is none; a run that ended says so."""
    home = directory.parent
    monkeypatch.chdir(home)
    monkeypatch.setenv("COLUMNS", "160")
    assert main(["top", "--once"]) == 2
    assert "there is no run" in capsys.readouterr().err
    (home / "ddpdebug-runs").mkdir()
    directory.rename(home / "ddpdebug-runs" / "run")
    assert main(["top", "--once"]) == 0
    assert "outvoted" in capsys.readouterr().out
    for rank in range(WORLD):
        sink = RunDirectory(home / "ddpdebug-runs" / "run", rank)
        if rank:
            sink.write(replace(STARTED, rank=rank))
            sink.write(RunEnded(reason="finished", exit_code=0, steps={0: 5}))
    assert main(["top", "--once", "ddpdebug-runs/run"]) == 0
    assert "finished" in capsys.readouterr().out


def test_a_run_whose_ranks_were_killed_says_so() -> None:
    """It is neither up nor ended in order; of one rank alone it is missing."""
    ranks = [RankView(rank=rank, step=1, ended="killed") for rank in range(2)]
    assert " killed " in shown(Snapshot(title="t", world=2, ranks=ranks)).splitlines()[1]
    ranks[0].ended = ""
    assert "1 rank missing" in shown(Snapshot(title="t", world=2, ranks=ranks))


def test_where_nobody_can_tell_nobody_is_outvoted() -> None:
    """In words."""
    ranks = [
        RankView(rank=rank, step=1, outvoted=("parameters", "buffers") if rank else ("parameters",)) for rank in (0, 1)
    ]
    text = shown(Snapshot(title="t", world=2, ranks=ranks, differing={"parameters": 2, "buffers": 1}))
    assert "differs: parameters" in text
    assert "outvoted: buffers" in text
    named = Snapshot(title="t", world=2, ranks=ranks, differing={"parameters": 2, "buffers": 2}, blamed={1: "RANK101"})
    text = shown(named)
    assert "RANK101: parameters, buffers" in text  # as the finding below says
    assert "others differ: parameters" in text


def test_a_rank_that_is_slow_for_reasons_of_its_own_is_small_beside_a_long_step() -> None:
    """Ten milliseconds of a second are no straggler, however short the others' own work is."""
    ranks = [RankView(rank=rank, step=1, own_seconds=0.01 if rank else 0.02, mean_seconds=1.0) for rank in range(4)]
    found = Snapshot(title="t", world=4, ranks=ranks).straggler
    assert found == (0, pytest.approx(0.01))


def test_of_two_ranks_the_slow_one_is_behind_by_all_that_the_fast_one_waits() -> None:
    """Not by half of it, as behind the mean of both."""
    ranks = [RankView(rank=rank, step=1, own_seconds=0.7 + 0.2 * rank, mean_seconds=1.0) for rank in range(2)]
    assert Snapshot(title="t", world=2, ranks=ranks).straggler == (1, pytest.approx(0.2))


def test_the_first_step_is_no_step_of_the_mean(tmp_path: Path) -> None:
    """It has the start of the script and the compilation in it; nor is one of which nobody knows how long it waited."""
    run = RunDirectory(tmp_path / "run", 0)
    run.write(STARTED)
    for step in range(3):
        seconds, flags = (9.0, int(Flag.FIRST)) if step == 0 else (0.5, 0)
        rows = {
            rank: Row(rank=rank, step=step, step_seconds=seconds + (0 if step else rank), flags=flags,
                      backward_seconds=0.3 - 0.1 * rank, sync_wait_seconds=0.3 - 0.1 * rank)
            for rank in range(2)
        }  # fmt: skip
        run.write(StepJudged(step=Step(step=step, optimizer=0, world=2, rows=rows)))
    run.close()
    found = from_directory(tmp_path / "run")
    ranks = found.ranks[:2]
    assert [rank.own_seconds for rank in ranks] == pytest.approx([0.2, 0.3])
    assert [rank.wait_seconds for rank in ranks] == pytest.approx([0.3, 0.2])
    assert [sum(rank.phases.values()) for rank in ranks] == pytest.approx([0.2, 0.3])
    assert [phase_bar(rank).plain for rank in ranks] == ["...wwwww", ".....www"]
    assert [rank.cost for rank in ranks] == pytest.approx([0.0, 0.2])
    assert found.straggler == (1, pytest.approx(0.2))


@pytest.mark.parametrize(("state", "hangs"), [(WaitState.AT_WORK, False), (WaitState.STUCK, True)])
def test_whom_ranks_wait_for_is_shown_while_they_do(state: WaitState, hangs: bool, tmp_path: Path) -> None:
    """With the line; nothing before and after it."""
    run = RunDirectory(tmp_path / "run", 0)
    waiting = Waiting(state=state, ranks=(1, 3), phase="data", location="train.py:33", seconds={0: 12.0})
    run.write(STARTED)
    for record, text in ((waiting, f"waiting for ranks 1,3: {state.label} · train.py:33"), (Waiting(), "")):
        run.write(record)
        snapshot = from_directory(tmp_path / "run")
        assert (snapshot.waiting, snapshot.hangs) == (text, bool(text) and hangs)
        assert ("waiting for" in shown(snapshot)) == bool(text)
    run.close()


@pytest.mark.parametrize(
    "damaged", [7, {"state": "odd", "ranks": [1]}, {"state": "stuck"}, {"state": "stuck", "ranks": 3}]
)
def test_a_damaged_wait_is_none(damaged: object, directory: Path) -> None:
    """The rest of the run is shown all the same."""
    path = directory / "run.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "waiting": damaged}))
    assert from_directory(directory).waiting == ""


def test_a_loss_is_a_curve_of_blocks() -> None:
    """Of the newest steps; any numbers."""
    assert sparkline([3.0, 2.0, 1.0]) == "█▄▁"
    assert sparkline([1.0, 1.0]) == "▁▁"
    assert len(sparkline([-1e308, 1e308] * 40)) == 8
    assert sparkline([]) == ""


@pytest.mark.parametrize("keys", [b"q", b"?q"])
def test_q_leaves_and_a_question_mark_explains(keys: bytes, directory: Path) -> None:
    """As people expect in a terminal, which is then as it was."""
    controller, terminal = pty.openpty()
    environ = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "80", "LINES": "24"}
    words = [sys.executable, "-m", "ddpdebug", "top", str(directory), "--interval", "600"]
    process = subprocess.Popen(words, stdin=terminal, stdout=terminal, stderr=terminal, env=environ)
    os.close(terminal)
    seen, sent = b"", False
    with suppress(OSError):  # Linux says so where the other end is closed
        while data := os.read(controller, 65536):
            seen += data
            if b"q leaves" in seen and not sent:
                sent = True
                os.write(controller, keys)
    assert process.wait(60) == 0
    assert (b"without waiting for other ranks" in seen) is (b"?" in keys)
    os.close(controller)
