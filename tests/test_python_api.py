"""`DebugDDP`, `watch` and the monitor on real ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.jobs
_SCRIPT = Path(__file__).parent / "scripts" / "python_api.py"


def seen_by_ranks(way: str, folder: Path) -> list[dict[str, Any]]:
    """Run the script on two ranks; return what each wrote."""
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(_SCRIPT), way, str(folder)]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "DDPDEBUG_METRICS": "off", "DDPDEBUG_QUIET": "1"}
    done = subprocess.run(
        [sys.executable, *words], cwd=folder, env=env, capture_output=True, text=True, timeout=110, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


def test_debug_ddp_is_watched_from_its_construction_on(tmp_path: Path) -> None:
    """Both ranks know the finding, which names both because two cannot tell."""
    for seen in seen_by_ranks("wrapper", tmp_path):
        assert seen["findings"] == [["RANK104", 0, [0, 1], ["param_groups[0].lr"]]]


def test_watch_finds_a_named_replica_that_differs(tmp_path: Path) -> None:
    """The context manager closes the monitor; what it found stays."""
    for seen in seen_by_ranks("watch", tmp_path):
        ((code, _, ranks, subject),) = seen["findings"]
        assert (code, ranks) == ("RANK113", [0, 1])
        assert any("average" in name for name in subject)


def test_the_agreement_probe_leaves_no_trace(tmp_path: Path) -> None:
    """One batch through both ranks' modules shows that they compute different functions."""
    for seen in seen_by_ranks("agree", tmp_path):
        assert [finding[0] for finding in seen["findings"]] == ["RANK107"]
        assert seen["rng_untouched"]
        assert seen["training"]


def test_raise_ends_all_ranks_at_the_same_step_with_the_same_words(tmp_path: Path) -> None:
    """No rank is left waiting for one that has stopped."""
    first, second = seen_by_ranks("raise", tmp_path)
    assert first["error"] == second["error"]
    assert first["error"].startswith("RANK104 optimizer settings differ between ranks at step 0")
    assert first["steps"] == second["steps"] < 4000
