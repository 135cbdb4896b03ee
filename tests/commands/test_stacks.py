"""`ddpdebug stacks`, of runs that go on, have ended, or are none."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from machine import free_port, until

from ddpdebug.commands import main, stacks
from ddpdebug.disk import Disk
from ddpdebug.progress import black_box
from ddpdebug.schema.progress import Call, RankProgress
from ddpdebug.schema.wire import to_json

_STOPS = Path(__file__).parent.parent / "progress" / "scripts" / "stops.py"
_EVIL = "\x1b[2J<b>"


def _run(folder: Path, *, world: int = 3, ended: str = "") -> None:
    record = {"run": "r1", "world": world, "outcome": {"reason": ended} if ended else None}
    (folder / "ranks").mkdir(parents=True)
    (folder / "run.json").write_text(json.dumps(record), encoding="utf-8")


def _box(folder: Path, look: RankProgress, ended: str = "") -> None:
    (folder / "ranks" / str(look.rank)).mkdir()
    box = black_box.BlackBox(folder / "ranks" / str(look.rank) / black_box.NAME, Disk())
    box.beat({**to_json(look), "ended": ended})
    box.close()


def test_a_run_that_has_ended(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The black boxes say what each rank did last, once; of one that ended well, that; what a job wrote is escaped."""
    _run(tmp_path, world=4, ended="exception: KeyError")
    calls = (Call(group="g", number=6, operation="all_reduce", location="train.py:41"),)
    for rank in (0, 2):
        look = RankProgress(rank=rank, same=9.0, waits=calls, stack=(f"train.py:41 ({_EVIL})",))
        _box(tmp_path, look, "exception: KeyError")
    _box(tmp_path, RankProgress(rank=3, step=59, phase="backward", stack=("threading.py:1139 (wait)",)), "finished")
    assert main(["stacks", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "has ended (exception: KeyError)" in out
    assert "ranks 0,2: ended by exception: KeyError" in out
    assert "rank 3: finished after step 59\n" in out
    assert "threading.py" not in out
    assert out.count("did last") == 1
    assert "it waited in all_reduce #6 at train.py:41" in out
    assert "rank 1: nothing is known" in out
    assert "\x1b" not in out
    assert main(["stacks", str(tmp_path), "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert (record["groups"][0]["ranks"], record["unknown"]) == ([0, 2], [1])


@pytest.mark.parametrize(
    "made, message",
    [("nothing", "not a run directory"), ("empty", "no black boxes"), ("alone", "one rank waits for nobody")],
)
def test_errors(made: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each says what is missing."""
    if made != "nothing":
        _run(tmp_path, world=1 if made == "alone" else 2)
    assert main(["stacks", str(tmp_path)]) == 2
    assert message in capsys.readouterr().err


def test_another_users_run(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Its ranks are not asked."""
    _run(tmp_path, world=2)
    _box(tmp_path, RankProgress(rank=0))
    monkeypatch.setattr(stacks.os, "getuid", lambda: tmp_path.stat().st_uid + 1)
    assert main(["stacks", str(tmp_path), "--all-threads"]) == 2
    assert "belongs to" in capsys.readouterr().err
    assert not (tmp_path / "stacks.request").exists()


@pytest.mark.slow
@pytest.mark.slow
def test_a_run_that_goes_on(tmp_path: Path) -> None:
    """Ranks wait, one that is stopped shows what it did last, and live ones answer with all their threads."""
    port, out = free_port(), tmp_path / "out"
    line = [sys.executable, "-m", "ddpdebug", "run", "--metrics", "off", "--out", str(out)]
    line += [str(_STOPS), "sigstop", "2", "5", "600"]
    ranks = []
    for number in range(3):
        place = {"RANK": number, "LOCAL_RANK": number, "WORLD_SIZE": 3, "MASTER_PORT": port}
        environ = {**os.environ, "OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1"}
        environ |= {name: str(value) for name, value in place.items()}
        with (tmp_path / f"{number}.log").open("wb") as log:
            ranks.append(
                subprocess.Popen(line, env=environ, cwd=tmp_path, stdout=log, stderr=log, start_new_session=True)
            )

    def ask(*words: str) -> dict[str, object]:
        done = subprocess.run(
            [sys.executable, "-m", "ddpdebug", *words, str(out)], capture_output=True, text=True, check=False
        )
        return json.loads(done.stdout) if done.stdout.startswith("{") else {"text": done.stdout + done.stderr}

    def grouped() -> bool:
        groups = ask("stacks", "--json").get("groups")
        states = (
            {rank: group["state"] for group in groups for rank in group["ranks"]} if isinstance(groups, list) else {}
        )
        return states == {0: "live", 1: "live", 2: "silent"} and "wait" in str(ask("top", "--once")["text"])

    try:
        assert until(grouped, 200.0, pause=0.5), ask("stacks")
        told = str(ask("stacks")["text"])
        assert ": waits in " in told
        assert f"{_STOPS}:" in told
        assert "rank 2 (no sign of life, last seen): " in told
        assert "stopped by a signal" in told
        threads = ask("stacks", "--json", "--all-threads")["groups"]
        assert isinstance(threads, list)
        found = {rank: group["threads"] for group in threads for rank in group["ranks"]}
        assert all(any(name.startswith("MainThread") for name in found[rank]) for rank in (0, 1)), found
        assert found[2] is None
        top = str(ask("top", "--once")["text"])
        assert "for rank 2: no sign of life" in top
        assert not (out / "stacks.request").exists()
    finally:
        for rank in ranks:
            os.killpg(rank.pid, signal.SIGKILL)
            rank.wait()
