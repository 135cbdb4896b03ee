"""What CI runs ends with the status of its first run: nothing is run again until it passes."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

_RUN = Path(__file__).resolve().parent.parent.parent / ".ci" / "run"
_TARGETS = ("triton", "lint", "site", "test", "test-slow", "detection")


def _ci(folder: Path, *failing: str) -> tuple[int, str]:
    """Run CI with programs that only say that they were called; `failing` targets of make fail."""
    for name, text in (
        ("make", f'echo "called $1"; case " {" ".join(failing)} " in *" $1 "*) exit 2;; esac'),
        ("apt-get", "exit 0"),
    ):
        (folder / name).write_text(f"#!/bin/sh\n{text}\n")
        (folder / name).chmod(0o755)
    env = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}"}
    done = subprocess.run([_RUN], env=env, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout


def test_all_passes(tmp_path: Path) -> None:
    """Each target runs once, and nothing again."""
    status, out = _ci(tmp_path)
    assert status == 0
    assert [line.split()[1] for line in out.splitlines() if line.startswith("called")] == list(_TARGETS)


@pytest.mark.parametrize("target", _TARGETS)
def test_what_fails_fails(target: str, tmp_path: Path) -> None:
    """Whichever it is."""
    assert _ci(tmp_path, target, "retest")[0] != 0
    assert _ci(tmp_path, target)[0] != 0


@pytest.mark.parametrize("target", ["test", "test-slow"])
def test_a_second_run_is_only_told(target: str, tmp_path: Path) -> None:
    """Tests that pass alone have failed all the same, and the log says that they do."""
    status, out = _ci(tmp_path, target)
    assert status != 0
    assert f"{target} failed; pass alone: yes" in out
    assert "called detection" in out
    assert f"{target} failed; pass alone: no" in _ci(tmp_path, target, "retest")[1]
