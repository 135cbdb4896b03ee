"""Starts the job on hosts, plain and attached, and returns what came of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
sys.path.append(str(HERE))
from network import Host  # noqa: E402

PORT = 29500
#: A job that takes longer does not end.
_SECONDS = 400
_NOT_OURS = ("DDPDEBUG_", "PYTEST_", "PYTHON", "RANK", "WORLD_", "LOCAL_", "MASTER_", "TORCHELASTIC_", "GLOO_", "NCCL_")


@dataclass(kw_only=True)
class Outcome:
    """How a job has ended on all hosts."""

    statuses: list[int]
    texts: list[str]  # of each rank, both streams
    trained: dict[int, dict[str, Any]]  # by rank
    seconds: float
    findings: list[dict[str, Any]] = field(default_factory=list)
    run: dict[str, Any] = field(default_factory=dict)

    @property
    def training(self) -> tuple[Any, ...]:
        """What must be the same with ddpdebug and without."""
        return self.statuses, self.trained

    @property
    def text(self) -> str:
        """All that was printed."""
        return "\n".join(self.texts)


def train(
    hosts: Sequence[Host],
    folder: Path,
    *words: str,
    attached: Sequence[str] | None = None,
    ranks: int = 2,
    env: Mapping[str, str] | None = None,
    master: str | None = None,
) -> Outcome:
    """Run the job with `ranks` ranks on each host.

    Args:
        attached: options of `ddpdebug run`; None: the plain job.
        master: what the ranks are told of the first host; its address by default.
    """
    folder.mkdir(parents=True)
    kept = {key: value for key, value in os.environ.items() if not key.startswith(_NOT_OURS)}
    kept |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "MASTER_PORT": str(PORT)}
    kept |= {"MASTER_ADDR": master or hosts[0].address, "WORLD_SIZE": str(ranks * len(hosts)), **(env or {})}
    watching = [] if attached is None else ["-m", "ddpdebug", "run", "--out", str(folder / "run"), *attached]
    job = [sys.executable, *watching, str(HERE / "job.py"), "--out", str(folder), *words]
    started = time.monotonic()
    with ExitStack() as stack:
        launched = []
        for rank in range(ranks * len(hosts)):
            text = stack.enter_context(tempfile.TemporaryFile())
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank % ranks), "LOCAL_WORLD_SIZE": str(ranks)}
            streams: dict[str, Any] = {"stdout": text, "stderr": subprocess.STDOUT, "stdin": subprocess.DEVNULL}
            command = hosts[rank // ranks].command(job)
            process = subprocess.Popen(command, env={**kept, **own}, **streams, cwd=folder)
            stack.callback(_end, process)
            launched.append((process, text))
        statuses = [process.wait(max(1.0, started + _SECONDS - time.monotonic())) for process, _ in launched]
        seconds, texts = time.monotonic() - started, []
        for _, text in launched:
            text.seek(0)
            texts.append(text.read().decode("utf-8", "replace"))
    trained = {int(file.stem): json.loads(file.read_text()) for file in folder.glob("*.json")}
    found = folder / "run" / "findings.jsonl"
    findings = [json.loads(line) for line in found.read_text().splitlines()] if found.exists() else []
    run = folder / "run" / "run.json"
    whole = json.loads(run.read_text()) if run.exists() else {}
    return Outcome(statuses=statuses, texts=texts, trained=trained, seconds=seconds, findings=findings, run=whole)


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.kill()
        process.wait()
