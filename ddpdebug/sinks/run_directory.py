"""Writes the run directory: rank 0 the shared files, every rank its own under `ranks/<rank>/`. Torch-free.

Every method may raise OSError (a full disk, a read-only directory): the fan-out then switches this sink off. What was
written until then stays readable: `run_files` describes the files and reads them.
"""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ddpdebug import run_files as files
from ddpdebug.findings import Finding
from ddpdebug.observations import Flag, encode, layout
from ddpdebug.sinks import Covered, FindingRaised, Record, RunEnded, RunStarted, Saved, StepJudged, Trouble
from ddpdebug.sinks.segments import Segments, segment_paths

_MAX_TROUBLE_LINES = 100


class RunDirectory:
    """A sink that keeps the run on disk. Writes from one thread at a time."""

    def __init__(self, directory: Path, rank: int, *, cap_bytes: int = files.CAP_BYTES) -> None:
        self._directory = directory
        self._rank = rank
        self._own = directory / files.RANKS / str(rank)
        self._steps = Segments(directory / files.STEPS, cap=cap_bytes, header=self._steps_header)
        self._observations = Segments(directory / files.OBSERVATIONS, cap=cap_bytes)
        self._run: dict[str, Any] = {}
        self._run_id: str | None = None
        self._findings: dict[object, Finding] = {}
        self._rows = 0
        self._skipped: Counter[int] = Counter()  # optimizer -> steps that the numeric guard skipped
        self._trouble_lines = 0

    def write(self, record: Record) -> None:
        """Write one record; raise OSError when the directory does not take it."""
        match record:
            case RunStarted():
                self._start(record)
            case Trouble():
                self._trouble(record)
            case RunEnded():
                self._end(record)
            case _ if self._rank == 0:
                self._write_shared(record)

    def close(self) -> None:
        """Close the files."""
        self._steps.close()
        self._observations.close()

    def _write_shared(self, record: Record) -> None:
        match record:
            case StepJudged():
                rows = record.step.rows.values()
                self._steps.append(b"".join(map(encode, rows)))
                self._rows += len(rows)
                self._skipped[record.step.optimizer] += record.step.any(Flag.GUARD_SKIPPED)
            case FindingRaised():
                self._finding(record.finding)
            case Covered():
                self._run["coverage"] = record.coverage.to_json()
                if record.keep:
                    _replace_file(self._directory / files.RUN, [_json_line(self._run)])
            case Saved():
                line = {"rows": self._rows, "kind": record.kind, "payload": record.payload}
                self._observations.append(_json_line(line))

    def _steps_header(self) -> bytes:
        return files.steps_header(self._rows)

    def _start(self, record: RunStarted) -> None:
        self._own.mkdir(parents=True, exist_ok=True)
        self._run_id = record.run_id
        if self._rank != 0:
            return
        _set_aside(self._directory)
        self._run = {
            "run": record.run_id,
            "time": record.time,
            "world": record.world,
            "command": list(record.command),
            "node": record.node,
            "metrics_url": record.metrics_url,
            "versions": dict(record.versions),
            "config": dict(record.config),
            "layout": layout(),
            "coverage": None,
            "outcome": None,
        }
        _replace_file(self._directory / files.RUN, [_json_line(self._run)])
        (self._directory / files.FINDINGS).touch()

    def _finding(self, finding: Finding) -> None:
        key = finding.id or (
            finding.code,
            finding.step,
            finding.ranks,
            finding.subject,
            finding.phase,
            finding.location,
        )
        first = self._findings.get(key)
        if first is not None:
            self._findings[key] = _merged(first, finding)
            return
        self._findings[key] = finding if finding.run is not None else replace(finding, run=self._run_id)
        with (self._directory / files.FINDINGS).open("ab", buffering=0) as file:
            _write_all(file.fileno(), _finding_line(self._findings[key]))

    def _trouble(self, record: Trouble) -> None:
        if self._trouble_lines < _MAX_TROUBLE_LINES:
            self._trouble_lines += 1
            self._own.mkdir(parents=True, exist_ok=True)
            with (self._own / files.TROUBLE).open("ab", buffering=0) as file:
                _write_all(file.fileno(), _json_line({"part": record.part, "message": record.message}))

    def _end(self, record: RunEnded) -> None:
        self.close()
        outcome = {
            "reason": record.reason,
            "exit_code": record.exit_code,
            "steps": {str(optimizer): steps for optimizer, steps in record.steps.items()},
            "time": record.time,
        }
        self._own.mkdir(parents=True, exist_ok=True)
        own = {"run": self._run_id, "rank": self._rank, **outcome}
        _replace_file(self._own / files.OUTCOME, [_json_line(own)])
        if self._rank == 0:
            _replace_file(self._directory / files.FINDINGS, map(_finding_line, self._findings.values()))
            counts = Counter(finding.severity.label for finding in self._findings.values())
            skipped = {str(optimizer): steps for optimizer, steps in self._skipped.items() if steps}
            self._run["outcome"] = {**outcome, "findings": dict(counts), "skipped_steps": skipped}
            _replace_file(self._directory / files.RUN, [_json_line(self._run)])


def _merged(first: Finding, again: Finding) -> Finding:
    """Return what is known of a finding after it was reported again: by the detectors, or with evidence found later."""
    steps = [step for step in (first.last_step, again.last_step) if step is not None]
    return replace(
        again,
        time=first.time,
        run=first.run,
        count=max(first.count, again.count),
        last_step=max(steps, default=None),
        evidence={**first.evidence, **again.evidence},
    )


def _set_aside(directory: Path) -> None:
    """Move the shared files of an earlier run in this directory (an elastic restart, a second use) out of the way."""
    old = [directory / files.RUN, directory / files.FINDINGS]
    old += segment_paths(directory / files.STEPS) + segment_paths(directory / files.OBSERVATIONS)
    old = [path for path in old if path.is_file()]
    if not old:
        return
    number = 1
    while (directory / f"previous-{number}").exists():
        number += 1
    target = directory / f"previous-{number}"
    target.mkdir()
    for path in old:
        path.rename(target / path.name)


def _finding_line(finding: Finding) -> bytes:
    return _line(finding.to_json())


def _json_line(value: Mapping[str, Any]) -> bytes:
    return _line(json.dumps(_strict(value), ensure_ascii=False, allow_nan=False, default=str))


def _line(text: str) -> bytes:
    return text.encode("utf-8", "backslashreplace") + b"\n"  # a lone surrogate becomes its JSON escape


def _strict(value: Any) -> Any:
    """Return the value with texts for the numbers that JSON lacks."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): _strict(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_strict(item) for item in value]
    return value


def _write_all(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def _replace_file(path: Path, lines: Iterable[bytes]) -> None:
    """Write a file so that readers see the old or the new content, never a part."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("wb") as file:
            file.writelines(lines)
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
