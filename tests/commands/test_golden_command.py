"""`ddpdebug check --record` and `--golden` on real jobs."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

Command = Callable[..., subprocess.CompletedProcess[str]]
SCRIPT = Path(__file__).parent.parent / "support" / "scripts" / "train.py"


@pytest.mark.jobs
@pytest.mark.slow
def test_record_and_follow(command: Command, tmp_path: Path) -> None:
    """The same script keeps to its path bit by bit; one with another learning rate leaves it where the rate changes."""
    check = ("-m", "ddpdebug", "check", "--nproc-per-node", 2, "--quiet", "--json", "v.json")
    done = command(*check, "--record", "g.json", SCRIPT, "clean", 6)
    assert (done.returncode, "can be compared bit by bit" in done.stderr) == (0, True), done.stderr
    done = command(*check, "--golden", "g.json", SCRIPT, "clean", 6)
    assert (done.returncode, "6 steps as recorded, bit by bit" in done.stderr) == (0, True), done.stderr
    text = SCRIPT.read_text(encoding="utf-8").replace("optimizer.zero_grad()", "optimizer.zero_grad(); a = step == 4")
    text = text.replace("optimizer.step()", "optimizer.param_groups[0]['lr'] += 0.01 * a; optimizer.step()")
    (tmp_path / "changed.py").write_text(text, encoding="utf-8")
    done = command(*check, "--golden", "g.json", "changed.py", "clean", 6)
    record = json.loads((tmp_path / "v.json").read_text(encoding="utf-8"))
    assert (done.returncode, record["verdict"]) == (1, "left the recorded path"), done.stderr
    assert (record["golden"]["step"], record["golden"]["parameter"]) == (4, "weight")


def test_wrong_files(command: Command, tmp_path: Path) -> None:
    """A golden file that is none, or is not there, is wrong usage before anything runs."""
    (tmp_path / "g.json").write_text("[]", encoding="utf-8")
    for words, message in (
        (("--golden", "g.json"), "no golden file"),
        (("--golden", "no.json"), "cannot be read"),
        (("--golden", "g.json", "--record", "h.json"), "do different things"),
    ):
        done = command("-m", "ddpdebug", "check", *words, SCRIPT, "clean", 6)
        assert (done.returncode, message in done.stderr) == (2, True), done.stderr
