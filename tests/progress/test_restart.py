"""A job that an elastic launcher starts once more, with real ranks: what was lost before is nobody's loss now."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from machine import PATIENCE

from ddpdebug.run_directory.reader import read_findings, read_outcomes
from ddpdebug.schema.hangs import is_hang

_SCRIPT = Path(__file__).resolve().parent / "scripts" / "restarts.py"


@pytest.mark.jobs
@pytest.mark.slow
def test_a_second_attempt_has_no_hang_of_the_first(tmp_path: Path) -> None:
    """All ranks come to their end, and what the run directory tells of this attempt has no rank that is missing."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", "1"]
    watched = ["-m", "ddpdebug", "run", "--metrics", "off", "--out", str(tmp_path / "run"), str(_SCRIPT)]
    job = subprocess.run(
        [sys.executable, *launcher, *watched],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert "KeyError: 'no such sample'" in job.stderr
    assert job.stdout.count("done") == 2, job.stderr
    assert [finding for finding in read_findings(tmp_path / "run") if is_hang(finding)] == []
    ends = {rank: outcome["reason"] for rank, outcome in read_outcomes(tmp_path / "run").items()}
    assert ends == {0: "finished", 1: "finished"}
    assert job.returncode == 0, job.stderr
