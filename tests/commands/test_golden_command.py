"""`ddpdebug check --golden` with something that has no facts."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

Command = Callable[..., subprocess.CompletedProcess[str]]
SCRIPT = Path(__file__).parent.parent / "support" / "scripts" / "train.py"


def test_wrong_files(command: Command, tmp_path: Path) -> None:
    """A file without facts, or none, is wrong usage before anything runs."""
    (tmp_path / "g.json").write_text("[]", encoding="utf-8")
    for words, message in (
        (("--golden", "g.json"), "g.json"),
        (("--golden", "no.json"), "no.json"),
    ):
        done = command("-m", "ddpdebug", "check", *words, SCRIPT, "clean", 6)
        assert (done.returncode, message in done.stderr) == (2, True), done.stderr
