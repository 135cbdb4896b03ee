"""A check is not greener than what is known of the run: where files or streams go, its exit code still says it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from machine import PATIENCE

pytestmark = pytest.mark.jobs
SCRIPT = Path(__file__).parent.parent / "support" / "scripts" / "train.py"
Command = Callable[..., subprocess.CompletedProcess[str]]

_REMOVES = """
import os, runpy, shutil, sys
target, sys.argv = sys.argv[1], sys.argv[2:]
try:
    runpy.run_path(sys.argv[0], run_name="__main__")
finally:
    if os.environ.get("RANK", "0") == "0":
        shutil.rmtree(target)
"""


@pytest.mark.parametrize(
    "mode", [pytest.param("lr", marks=pytest.mark.smoke), pytest.param("clean", marks=pytest.mark.slow)]
)
def test_a_run_directory_that_is_gone_is_no_clean_check(mode: str, command: Command, tmp_path: Path) -> None:
    """What was found in it nobody knows, whether there was something or not."""
    (tmp_path / "removes.py").write_text(_REMOVES)
    words = ("-m", "ddpdebug", "check", "--nproc-per-node", 2, "--out", "o", "--json", "v.json")
    done = command(*words, "removes.py", "o", SCRIPT, mode, 30)
    record = json.loads((tmp_path / "v.json").read_text(encoding="utf-8"))
    assert (done.returncode, record["exit_code"]) == (4, 4), done.stderr
    assert "ddpdebug: verdict: damaged (exit 4)" in done.stderr
    assert "the run directory is gone" in done.stderr


@pytest.mark.slow
def test_a_file_that_cannot_be_written_is_no_clean_check(command: Command, tmp_path: Path) -> None:
    """The one that can be written says the same as the exit code."""
    (tmp_path / "removes.py").write_text(_REMOVES)
    words = ("-m", "ddpdebug", "check", "--nproc-per-node", 1, "--out", "o", "--json", "v.json")
    done = command(*words, "--junit", "reports/j.xml", "removes.py", "reports", SCRIPT, "clean", 8)
    record = json.loads((tmp_path / "v.json").read_text(encoding="utf-8"))
    assert (done.returncode, record["exit_code"], record["verdict"]) == (4, 4, "damaged"), done.stderr
    assert re.search(r"note: could not write '.*/reports/j\.xml'", done.stderr), done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("stderr", ["2>&-", "2>/dev/full"])
@pytest.mark.parametrize("mode, ranks, code", [("clean", 1, 0), ("lr", 2, 1)])
def test_without_stderr_the_exit_code_is_the_verdict(
    stderr: str, mode: str, ranks: int, code: int, tmp_path: Path
) -> None:
    """And not what the interpreter makes of a stream that it cannot flush."""
    if "full" in stderr and not Path("/dev/full").exists():
        pytest.skip("this system has no full device")
    environ = {key: value for key, value in os.environ.items() if key not in {"RANK", "WORLD_SIZE"}}
    environ.update(DDPDEBUG_METRICS="off", OMP_NUM_THREADS="1")
    words = f"-m ddpdebug check --nproc-per-node {ranks} --out o --json v.json '{SCRIPT}' {mode} 8"
    line = f"'{sys.executable}' {words} {stderr}"
    done = subprocess.run(["sh", "-c", line], cwd=tmp_path, env=environ, timeout=PATIENCE, check=False)
    record = json.loads((tmp_path / "v.json").read_text(encoding="utf-8"))
    assert (done.returncode, record["exit_code"]) == (code, code)
