"""Starting commands as a user does."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from machine import PATIENCE

Command = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def command(tmp_path: Path) -> Command:
    """Run `python <words>` in an empty folder."""
    (tmp_path / "pyproject.toml").touch()
    environ = {key: value for key, value in os.environ.items() if key not in {"RANK", "WORLD_SIZE"}}
    environ.update(DDPDEBUG_METRICS="off", OMP_NUM_THREADS="1")

    def run(*words: object, cwd: Path = tmp_path, **more: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, *map(str, words)],
            cwd=cwd,
            env={**environ, **more},
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            check=False,
        )

    return run
