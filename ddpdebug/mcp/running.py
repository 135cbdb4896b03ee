"""Programs that are run for an MCP client, if allowed: a check of a script, a replay of a bundle."""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

from ddpdebug.clock import utc_now
from ddpdebug.errors import UsageError
from ddpdebug.mcp.answers import Answers
from ddpdebug.mcp.directories import Directories
from ddpdebug.run_directory.reader import RUN

_FOLDER, _MAX_OUTPUT = "ddpdebug-runs", 4000
_MAX_RANKS, _MAX_STEPS, _MAX_SECONDS = 64, 100_000, 3600
#: Seconds that a check has beyond its own limit to end its ranks and to judge.
_GRACE = 120


class Running:
    """Scripts and bundles in some directories, run with the rights of this process."""

    def __init__(self, directories: Directories) -> None:
        self._directories = directories

    def check(
        self, script: str, args: Sequence[str] = (), nproc_per_node: int = 2, steps: int = 20, timeout: int = 600
    ) -> dict[str, Any]:
        """Run a training script for a few steps on several ranks of this machine, and return the verdict.

        Args:
            script: a file of Python in one of the directories that are served.
            args: its arguments.
            nproc_per_node: ranks, up to 64.
            steps: optimizer steps after which it is stopped.
            timeout: seconds after which it counts as a hang, up to 3600.
        """
        path, root = self._directories.inside(script)
        if not path.is_file() or path.suffix != ".py":
            raise UsageError(f"{script[:200]!r} is no file of Python")
        limits = {"nproc-per-node": _MAX_RANKS, "steps": _MAX_STEPS, "timeout": _MAX_SECONDS}
        given = dict(zip(limits, (nproc_per_node, steps, timeout), strict=True))
        for name, value in given.items():
            if not 1 <= value <= limits[name]:
                raise UsageError(f"{name} is from 1 to {limits[name]}")
        out = root / _FOLDER / f"{utc_now():%Y%m%dT%H%M%SZ}-{secrets.token_hex(3)}"
        words = [f"--{name}={value}" for name, value in given.items()]
        words = ["check", *words, f"--out={out}", "--metrics=off", "--quiet", str(path), *args]
        done = _run(words, root, timeout + _GRACE)
        run = out.relative_to(root).as_posix()
        state = Answers(self._directories).run_state(run) if (out / RUN).is_file() else {}
        return {**done, **state, "run": run}

    def replay(self, bundle: str, script: str, timeout: int = 300) -> dict[str, Any]:
        """Run a step with a non-finite value again from its bundle, in one process, and name the first bad operation.

        Args:
            bundle: the bundle's directory, as the evidence of a finding names it, in the directories that are served.
            script: the file of Python, there too, that has the model's class.
            timeout: seconds after which it is ended, up to 3600.
        """
        (step, root), (path, _) = self._directories.inside(bundle), self._directories.inside(script)
        if not path.is_file() or path.suffix != ".py":
            raise UsageError(f"{script[:200]!r} is no file of Python")
        if not 1 <= timeout <= _MAX_SECONDS:
            raise UsageError(f"timeout is from 1 to {_MAX_SECONDS}")
        with tempfile.TemporaryDirectory() as scratch:
            found = Path(scratch) / "result.json"
            done = _run(["replay", f"--script={path}", f"--json={found}", str(step)], root, timeout)
            return {**done, "result": json.loads(found.read_text(encoding="utf-8")) if found.is_file() else None}


def _run(words: Sequence[str], cwd: Path, seconds: float) -> dict[str, Any]:
    """Run ddpdebug in a process group of its own, and end that where it takes too long.

    Returns:
        Its exit code, and the end of what it has printed.
    """
    with tempfile.TemporaryFile() as output:
        try:
            code = _exit_code(words, cwd, output, seconds)
        except subprocess.TimeoutExpired:
            raise UsageError(f"ddpdebug {words[0]} took longer than {seconds} s and was ended") from None
        output.seek(max(0, output.tell() - _MAX_OUTPUT))
        return {"exit_code": code, "output_ends_with": output.read().decode("utf-8", "replace")}


def _exit_code(words: Sequence[str], cwd: Path, output: IO[bytes], seconds: float) -> int:
    with subprocess.Popen(  # noqa: S603 - our own command, whose script who has started the server lets run
        [sys.executable, "-m", "ddpdebug", *words],
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        start_new_session=True,
    ) as process:
        try:
            return process.wait(seconds)
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise
        finally:
            output.seek(0, os.SEEK_END)
