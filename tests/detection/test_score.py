"""The score of the corpus is only worth something when a run that never began counts against it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

_SCORE = Path(__file__).with_name("score.py")


def test_a_script_that_did_not_run_is_neither_found_nor_clean():
    """An environment in which no run starts fails the score of faults and of healthy scripts alike, and says why."""
    env = {**os.environ, "DDPDEBUG_NO_SUCH_OPTION": "1"}
    words = ["--only", "clean_lbfgs_closure,data901_same_seed"]
    done = subprocess.run([sys.executable, str(_SCORE), *words], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stdout.count("did not run, exit status 2") == 3
    assert "unknown option DDPDEBUG_NO_SUCH_OPTION" in done.stdout
    assert "0 passed, 3 failed" in done.stdout
