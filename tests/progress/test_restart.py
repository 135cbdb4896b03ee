"""A job that an elastic launcher starts once more, with real ranks: who was lost before is nobody's loss now."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from machine import PATIENCE, free_port

from ddpdebug.run_directory.reader import read_findings, read_outcomes
from ddpdebug.schema.hangs import is_hang

_SCRIPT = Path(__file__).resolve().parent / "scripts" / "restarts.py"


def _attempt(number: int, folder: Path) -> tuple[list[int], list[str]]:
    """Run the ranks as the launcher does; not by it, whose second attempt may find the addresses of the first."""
    common = {"OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    common |= {"TORCHELASTIC_RESTART_COUNT": str(number), "TORCHELASTIC_MAX_RESTARTS": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "ddpdebug", "run", "--metrics", "off", "--out", str(folder), str(_SCRIPT)],
            env={**os.environ, **common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    output = [rank.communicate(timeout=PATIENCE)[0] for rank in ranks]
    return [rank.returncode for rank in ranks], output


@pytest.mark.jobs
@pytest.mark.slow
def test_a_second_attempt_has_no_hang_of_the_first(tmp_path: Path) -> None:
    """All ranks come to their end, and what the run directory tells of this attempt has no rank that is missing."""
    folder = tmp_path / "run"
    statuses, output = _attempt(0, folder)
    assert statuses == [1, 1], output
    assert [finding.ranks for finding in read_findings(folder) if is_hang(finding)] == [(1,)], output
    statuses, output = _attempt(1, folder)
    assert statuses == [0, 0], output
    assert [finding for finding in read_findings(folder) if is_hang(finding)] == []
    ends = {rank: outcome["reason"] for rank, outcome in read_outcomes(folder).items()}
    assert ends == {0: "finished", 1: "finished"}
