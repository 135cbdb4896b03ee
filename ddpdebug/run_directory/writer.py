"""The writer of the run directory: rank 0 writes the shared files, every rank those in `ranks/<rank>/`. Torch-free.

Where the run cannot begin (a read-only directory), `write` raises OSError and the fan-out switches this sink off.
Later, what cannot be written is left out and said once; findings and how the run ended are tried again to the last.
What was written stays readable: `reader` describes the files and reads them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

from ddpdebug.disk import Ballast, Disk
from ddpdebug.run_directory import reader as files
from ddpdebug.run_directory.segments import Segments, segment_paths
from ddpdebug.schema.finding import Finding, strict_json
from ddpdebug.schema.hangs import is_over
from ddpdebug.schema.row import Flag, encode, layout
from ddpdebug.sinks import (
    Covered,
    FindingIgnored,
    FindingRaised,
    Record,
    RunEnded,
    RunStarted,
    Saved,
    StepJudged,
    Trouble,
    Waiting,
)

_MAX_TROUBLE_LINES = 100
_BALLAST = 64 << 10


class RunDirectory:
    """The sink that writes the run directory. Called by one thread at a time.

    Args:
        disk: says whether there is room, and makes the files.
        tell: called with a `Trouble` when something stops being written.
    """

    part: ClassVar[str] = "run_directory"  # what messages call it

    def __init__(
        self,
        directory: Path,
        rank: int,
        *,
        cap_bytes: int = files.CAP_BYTES,
        disk: Disk | None = None,
        tell: Callable[[Trouble], None] = lambda _: None,
    ) -> None:
        self._directory = directory
        self._rank = rank
        self._own = directory / files.RANKS / str(rank)
        self._disk, self._tell = disk or Disk(), tell
        options: dict[str, Any] = {"cap": cap_bytes, "disk": self._disk}
        self._steps = Segments(directory / files.STEPS, header=lambda: files.steps_header(self._rows), **options)
        self._observations = Segments(directory / files.OBSERVATIONS, what="observations", **options)
        self._ballast = Ballast(self._disk, self._own / files.BALLAST, _BALLAST if rank == 0 else _BALLAST // 8)
        self._run: dict[str, Any] = {}
        self._run_id: str | None = None
        self._findings: dict[str | None, Finding] = {}  # by id
        self._ignored: dict[str | None, Finding] = {}  # the same
        self._rows = 0
        self._skipped: Counter[int] = Counter()  # optimizer -> steps that the numeric guard skipped
        self._trouble_lines = 0
        self._off: set[str] = set()  # what a failed write has switched off
        self._said: set[str] = set()

    def write(self, record: Record) -> None:
        """Write one record; raise OSError if the directory cannot be made."""
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
                if record.step.looks_chosen:
                    self._observe("chosen", files.chosen_of(record.step))
                self._append(self._steps, b"".join(map(encode, rows)), "rows")
                self._rows += len(rows)
                self._skipped[record.step.optimizer] += record.step.any(Flag.GUARD_SKIPPED)
            case FindingRaised():
                self._finding(record.finding)
            case FindingIgnored(finding):
                if self._ignored.setdefault(finding.id, finding) is finding:
                    path = self._directory / files.IGNORED
                    self._must("ignored findings", lambda: self._disk.append(path, _line(finding.to_json())))
                self._ignored[finding.id] = finding
            case Waiting():
                self._waiting(record)
            case Covered():
                self._run["coverage"] = record.coverage.to_json()
                if record.keep:
                    with suppress(OSError):  # it is written again with the outcome
                        self._disk.replace(self._directory / files.RUN, [_json_line(self._run)])
            case Saved():
                must = record.payload.get("topic") == "end"  # all that there is of a rank on another node
                self._observe(record.kind, record.payload, must=must)

    def _observe(self, kind: str, payload: Mapping[str, Any], *, must: bool = False) -> None:
        line = {"rows": self._rows, "kind": kind, "payload": payload}
        self._append(self._observations, _json_line(line), "observations", must=must)

    def _append(self, segments: Segments, data: bytes, what: str, *, must: bool = False) -> None:
        """Write rows or observations, where there is room; a write that failed is the last of its kind."""
        if what in self._off and not must:
            self._disk.left_out[what] += 1
            return
        try:
            reason = segments.append(data, must=must)
        except OSError as error:
            self._off.add(what)
            self._disk.left_out[what] += 1
            reason = f"{type(error).__name__}: {error}"
        if reason is not None:
            self._say(what, reason)

    def _say(self, what: str, reason: str) -> None:
        """Report once, as a `Trouble`, that something is not written."""
        if what not in self._said:
            self._said.add(what)
            said = "the outcome is" if what == "outcome" else f"{what} are"
            self._tell(Trouble(part=f"sink:run_directory {what}", message=f"{said} not written: {reason}"))

    def _must(self, what: str, act: Callable[[], None]) -> bool:
        """Write what must be written, in the room of the ballast if need be; return whether that worked."""
        try:
            act()
        except OSError:
            self._ballast.drop()
            try:
                act()
            except OSError as error:
                self._disk.left_out[what] += 1
                self._say(what, f"{type(error).__name__}: {error}")
                return False
        return True

    def _start(self, record: RunStarted) -> None:
        self._disk.begin(self._directory)
        self._make_own()
        self._run_id = record.run_id
        place = {"run": record.run_id, "rank": self._rank, "node": record.node, "metrics_url": record.metrics_url}
        self._disk.replace(self._own / files.PLACE, [_json_line({**place, "local_rank": record.local_rank})])
        self._ballast.take()
        if self._rank != 0:
            return
        _set_aside(self._directory, self._disk)
        self._run = {
            "run": record.run_id,
            "time": record.time,
            "world": record.world,
            "spawned": record.spawned,
            "name": record.name,
            "owner": record.owner,
            "job": record.scheduler_job,
            "place": dict(record.place),
            "command": list(record.command),
            "node": record.node,
            "metrics_url": record.metrics_url,
            "versions": dict(record.versions),
            "config": dict(record.config),
            "layout": layout(),
            "coverage": None,
            "waiting": None,
            "outcome": None,
        }
        self._disk.replace(self._directory / files.RUN, [_json_line(self._run)])
        self._disk.append(self._directory / files.FINDINGS, b"")

    def _make_own(self) -> None:
        """Make this rank's folder, which the next run's rank 0 may have set aside."""
        self._disk.make_directory(self._own, below=self._directory)

    def _finding(self, finding: Finding) -> None:
        before = self._findings.get(finding.id)
        self._ignored.pop(finding.id, None)  # it is about more than was meant to be ignored
        self._findings[finding.id] = finding
        path, line = self._directory / files.FINDINGS, _line(finding.to_json())
        if before is None:
            self._must("findings", lambda: self._disk.append(path, line))
        elif is_over(finding) and not is_over(before):  # who reads along would end the job for it
            self._write_findings()
        # else the line is written again at the end

    def _write_findings(self) -> None:
        self._rewrite(files.FINDINGS, "findings", self._findings.values())

    def _rewrite(self, name: str, what: str, findings: Iterable[Finding]) -> None:
        lines = [_line(each.to_json()) for each in findings]
        self._must(what, lambda: self._disk.replace(self._directory / name, lines))

    def _waiting(self, record: Waiting) -> None:
        """Keep whom ranks wait for, for whoever looks now; how long they have waited the metrics have."""
        known = {"state": record.state.label, "ranks": list(record.ranks), "location": record.location}
        now = known if record.state else None
        if now != self._run["waiting"]:
            self._run["waiting"] = now
            with suppress(OSError):
                self._disk.replace(self._directory / files.RUN, [_json_line(self._run)])

    def _trouble(self, record: Trouble) -> None:
        if self._trouble_lines < _MAX_TROUBLE_LINES:
            self._trouble_lines += 1
            with suppress(OSError):  # the terminal and the metrics have it
                self._make_own()
                line = _json_line({"part": record.part, "message": record.message})
                self._disk.append(self._own / files.TROUBLE, line)

    def _end(self, record: RunEnded) -> None:
        self.close()
        self._ballast.drop()
        outcome: dict[str, Any] = {
            "reason": record.reason,
            "exit_code": record.exit_code,
            "steps": {str(optimizer): steps for optimizer, steps in record.steps.items()},
            "time": record.time,
        }
        if self._rank == 0:
            self._write_findings()
            if (self._directory / files.IGNORED).exists():
                self._rewrite(files.IGNORED, "ignored findings", self._ignored.values())
        if self._disk.left_out:
            outcome["not_written"] = dict(self._disk.left_out)
        own = _json_line({"run": self._run_id, "rank": self._rank, **outcome})
        if self._must("outcome", lambda: self._write_own(own)) and self._rank == 0:
            counts = Counter(finding.severity.label for finding in self._findings.values())
            skipped = {str(optimizer): steps for optimizer, steps in self._skipped.items() if steps}
            self._run["waiting"] = None
            self._run["outcome"] = {**outcome, "findings": dict(counts), "skipped_steps": skipped}
            run = _json_line(self._run)
            self._must("outcome", lambda: self._disk.replace(self._directory / files.RUN, [run]))

    def _write_own(self, line: bytes) -> None:
        self._make_own()
        self._disk.replace(self._own / files.OUTCOME, [line])


class OwnFindings:
    """The sink that writes findings to a rank's own folder, when rank 0 cannot write the shared file."""

    def __init__(self, directory: Path, rank: int, disk: Disk) -> None:
        self._file, self._disk = directory / files.RANKS / str(rank) / files.FINDINGS, disk

    def write(self, record: Record) -> None:
        """Append a finding; of several lines about one finding the newest counts."""
        if isinstance(record, FindingRaised):
            self._disk.append(self._file, _line(record.finding.to_json()))


def _set_aside(directory: Path, disk: Disk) -> None:
    """Move the shared files of an earlier run in this directory (an elastic restart, a second use) out of the way."""
    old = [directory / files.RUN, directory / files.FINDINGS, directory / files.IGNORED]
    old += segment_paths(directory / files.STEPS) + segment_paths(directory / files.OBSERVATIONS)
    old = [path for path in old if path.is_file()]
    if not old:
        return
    number = 1
    while (directory / f"previous-{number}").exists():
        number += 1
    target = directory / f"previous-{number}"
    disk.make_directory(target, below=directory)
    for path in old:
        path.rename(target / path.name)


def _json_line(value: Mapping[str, Any]) -> bytes:
    return _line(strict_json(value))


def _line(text: str) -> bytes:
    return text.encode("utf-8", "backslashreplace") + b"\n"  # a lone surrogate becomes its JSON escape
