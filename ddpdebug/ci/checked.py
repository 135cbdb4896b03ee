"""Runs `ddpdebug check` in a process of its own and returns its verdict."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple


class Checked(NamedTuple):
    """The result of a check: exit code, verdict and findings."""

    code: int  # its exit status
    verdict: str  # its word; empty where it has written none
    findings: Sequence[Mapping[str, Any]]  # gravest first


def checked(
    folder: Path,
    words: Sequence[str],
    *,
    python: Sequence[str] = (),
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
) -> Checked:
    """Check a script, with run directory and verdict in the existing directory `folder`.

    Args:
        words: after `ddpdebug check`.
        python: options of the interpreter.
    """
    file = folder / "verdict.json"
    done = subprocess.run(  # noqa: S603 - our own command, with the script that the caller names
        [
            sys.executable,
            *python,
            "-m",
            "ddpdebug",
            "check",
            "--quiet",
            f"--out={folder / 'run'}",
            f"--json={file}",
            *words,
        ],
        cwd=cwd,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        check=False,
    )
    try:
        record = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return Checked(done.returncode, "", ())
    return Checked(done.returncode, str(record["verdict"]), record["findings"])
