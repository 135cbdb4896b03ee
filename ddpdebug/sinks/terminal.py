"""The terminal sink: a line at the start, a block for each finding, a summary at the end. Torch-free.

Only rank 0 prints. Each output is one write, so that other processes' lines do not get into it. On a terminal it begins
by clearing the current line, which is where tqdm keeps its bar; tqdm draws it again below. Without a terminal there are
plain lines without escape codes, one line per item and never wrapped, so that logs can be searched.

The one-line status goes to the title of the terminal's window (tmux and screen show it too): any place in the text
would be overwritten by the job's own prints, or overwrite them. The title that was there comes back at the end.
"""

from __future__ import annotations

import math
import os
import textwrap
import unicodedata
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, TextIO

from ddpdebug.clock import time
from ddpdebug.errors import essence
from ddpdebug.printing import fresh_line, standard_error, write
from ddpdebug.schema.coverage import Coverage, Weight
from ddpdebug.schema.finding import Finding, Severity
from ddpdebug.schema.row import Flag
from ddpdebug.schema.run_state import run_key
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
from ddpdebug.sinks.agreement import dissenters, is_certified
from ddpdebug.sinks.prometheus.discovery import scrape_snippet
from ddpdebug.sinks.text import (
    ENDED,
    HANG,
    SEPARATOR,
    Part,
    bits_text,
    brief,
    element_text,
    evidence_lines,
    findings_text,
    first_cause,
    ignored_texts,
    where,
)
from ddpdebug.sinks.words import clean, counted, number, percent, ranks_text

_CLEAR_LINE = "\r\x1b[K"
_TITLE, _SAVE_TITLE, _RESTORE_TITLE = "\x1b]2;{}\x07", "\x1b[22;2t", "\x1b[23;2t"
#: Consoles that have no window would print the title.
_NO_TITLE = frozenset({"linux", "dumb"})
_MAX_BLOCKS = 20
_MAX_GAPS = 3
_MAX_WIDTH = 120
_LABEL_WIDTH = 10
#: What DDP's broadcast is there for; it matters once ranks are found to differ in something that is not broadcast.
_UNTIL_IT_MATTERS = "RANK111"
#: Evidence that is found out later and worth a second block: the first differing element.
_LOCATED = frozenset({"index", "values"})
#: Styles of the terminal, by their numbers; a badge is bold, black or white, on a colour.
_BOLD, _DIM, _CYAN, _COMMAND = "1", "2", "36", "1;32"
_BADGE = {
    Severity.INFO: "1;30;46",
    Severity.WARNING: "1;30;43",
    Severity.ERROR: "1;37;41",
    Severity.CRITICAL: "1;37;41",
}
_INDENT = 12
#: Lines of a finding's block, its title among them.
_MAX_LINES = 8
_LINE = {"what": _BOLD, "perhaps": _DIM, "where": _CYAN}
_ASCII = str.maketrans({"·": "-", "…": "~"})


class Terminal:
    """The sink that prints, on one rank only.

    Args:
        speaks: the rank that this one is, where it says what rank 0 cannot.
        status: show the current step in the window's title, on a terminal only.
        status_seconds: at most this often.
    """

    def __init__(
        self,
        rank: int,
        stream: TextIO | None = None,
        *,
        speaks: int = 0,
        status: bool = True,
        status_seconds: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._rank, self._speaks = rank, speaks
        self._stream = stream if stream is not None else standard_error()
        self._tty = _is_terminal(self._stream)
        self._color = self._tty and not os.environ.get("NO_COLOR")
        self._status = status and self._tty and os.environ.get("TERM") not in _NO_TITLE
        self._status_seconds = status_seconds
        self._clock = clock
        self._next_status = -math.inf
        self._has_title = False
        self._world = 1
        self._directory = ""
        self._findings: dict[str | None, Finding] = {}  # by id
        self._causes: set[str] = set()  # of parts that are off
        self._unsaid: list[Finding] = []  # until another finding makes them matter
        self._summary = Summary()

    def write(self, record: Record) -> None:
        """Print a record, if it concerns a person."""
        if self._rank != 0:
            return
        match record:
            case RunStarted():
                self._start(record)
            case StepJudged():
                self._summary.count(record)
                self._show_skip(record)
                self._show_status(record)
            case Saved(kind="last_state"):
                self._summary.count_last(record.payload)
            case FindingRaised() | FindingIgnored():
                self._hear(record.finding)
            case Trouble():
                self._trouble(record)
            case Waiting(line=line) if line:
                self._print(f"ddpdebug: {clean(line, 600)}\n")
            case Covered():
                self._summary.coverage = record.coverage
                self._print("".join(f"ddpdebug: {clean(line, 500)}\n" for line in record.say))
            case RunEnded():
                self._end(record)

    def _start(self, record: RunStarted) -> None:
        self._world = record.world
        self._summary.ignored.update({entry: set() for entry in record.config.get("ignore") or ()})
        self._directory = clean(record.directory) if record.directory is not None else ""
        place = self._directory
        if hub := record.config.get("hub"):
            place = f"{clean(str(hub)).rstrip('/')}/runs/{run_key(record.time, record.run_id)}"
        lines = [SEPARATOR.join(filter(None, [f"watching {counted(record.world, 'rank')}", place]))]
        if record.metrics_url is not None and record.config.get("shows_metrics"):
            lines[0] += f"{SEPARATOR}{clean(record.metrics_url)}"
            lines.append(f"for prometheus.yml: {clean(scrape_snippet(record))}")
        self._print("".join(f"ddpdebug: {line}\n" for line in lines))

    def _trouble(self, record: Trouble) -> None:
        """Print one line for each cause: `trouble.jsonl` has every part, of every rank."""
        message = clean(record.message, 300)
        if record.follows or message in self._causes:
            return
        self._causes.add(message)
        said = f"{clean(record.part, 60)} has switched itself off: {message}" if record.is_failure else message
        goes_on = "" if record.part.startswith("device") else " (the job goes on)"
        self._print(f"ddpdebug: {said}{goes_on}\n")

    def _hear(self, finding: Finding) -> None:
        self._summary.hear(finding)
        if not finding.ignored:
            self._finding(finding)

    def _finding(self, finding: Finding) -> None:
        known = self._findings.get(finding.id)
        self._findings[finding.id] = finding
        if known is None:
            if (other := _other_speaker(finding, self._speaks)) is not None:
                what = f"{finding.code}, {clean(finding.title, 200)} ({where(finding, self._world)})"
                self._print(f"ddpdebug: reported by rank {other}, because rank 0 could not: {what}\n")
                return
            if finding.code == _UNTIL_IT_MATTERS:
                self._unsaid.append(finding)
                return
            if finding.code.startswith("RANK") and finding.severity > Severity.INFO:
                unsaid, self._unsaid = self._unsaid, []
                for one in unsaid:
                    self._print(self._block(one))
            if len(self._findings) <= _MAX_BLOCKS:
                self._print(self._block(finding))
            elif len(self._findings) == _MAX_BLOCKS + 1:
                self._print(f"ddpdebug: {_MAX_BLOCKS} findings shown, the others are in the run directory only\n")
            return
        added = {name: value for name, value in finding.evidence.items() if name not in known.evidence}
        if ENDED in added and _other_speaker(finding, self._speaks) is None:
            seconds, who = finding.evidence[ENDED], ranks_text(finding.ranks, self._world)
            at = "" if finding.step is None else f" at step {finding.step}"
            self._print(f"ddpdebug: the hang{at} is over after {number(seconds, 2)} s: {who} went on\n")
        if added.keys() & _LOCATED and len(self._findings) <= _MAX_BLOCKS:
            added.pop("consequences", None)
            place = "" if finding.step is None else f" of step {finding.step}"
            text = element_text(finding.evidence) or SEPARATOR.join(evidence_lines(added))
            then = f"; {first_cause(finding)}" if bits_text(finding.evidence) else ""
            self._print(f"ddpdebug: {clean(finding.code, 20)}{place}: {text}{then}\n")

    def _end(self, record: RunEnded) -> None:
        self._summary.end(record.steps)
        if self._summary.coverage is not None:
            codes = [finding.code for finding in self._findings.values()]
            self._summary.coverage = self._summary.coverage.beside(codes)
        items = self._summary.items(self._world)
        if self._findings or self._summary.checked(self._world):
            items.insert(0, findings_text(self._findings.values()))
        if record.reason != "finished":
            items.insert(0, clean(essence(record.reason), 200))
        if self._findings and self._directory:
            items.append(f"{self._directory}/findings.jsonl")
        items += ignored_texts({entry: len(ids) for entry, ids in self._summary.ignored.items()})
        text = f"ddpdebug: {SEPARATOR.join(items)}\n"
        self._print(f"{text}{_RESTORE_TITLE if self._has_title else ''}")
        self._has_title = False

    def _block(self, finding: Finding) -> str:
        title, content = clean(finding.title, 200), brief(finding, self._world)
        if self._tty:
            return _styled_block(finding, title, content, width=self._width(), color=self._color)
        lines = [f"ddpdebug: {finding.severity.label} {clean(finding.code, 20)}: {title}"]
        for label, texts in content:
            lines += [f"  {label if i == 0 else '':{_LABEL_WIDTH}}{text}" for i, text in enumerate(texts)]
        return "\n".join(lines) + "\n"

    def _show_skip(self, record: StepJudged) -> None:
        if record.step.any(Flag.GUARD_SKIPPED):
            self._print(f"ddpdebug: step {record.step.step} was skipped by the numeric guard\n")

    def _show_status(self, record: StepJudged) -> None:
        if not self._status or self._clock() < self._next_status:
            return
        self._next_status = self._clock() + self._status_seconds
        row = min(record.step.rows.items())[1]
        known = not math.isnan(row.loss) or row.has(Flag.LOSS_NONFINITE)
        loss = f"loss {number(row.loss)}" if known else ""
        items = [f"step {record.step.step}", loss, findings_text(self._findings.values())]
        text = f"ddpdebug: {SEPARATOR.join(filter(None, items))}"[:_MAX_WIDTH]
        self._put(f"{'' if self._has_title else _SAVE_TITLE}{_TITLE.format(text)}")
        self._has_title = True

    def _print(self, text: str) -> None:
        if text:
            self._put(f"{_CLEAR_LINE if self._tty else fresh_line(self._stream)}{text}")

    def _put(self, text: str) -> None:
        encoding = getattr(self._stream, "encoding", None) or "utf-8"
        try:
            text.encode(encoding)
        except UnicodeEncodeError:
            text = text.translate(_ASCII).encode(encoding, "backslashreplace").decode(encoding)
        write(self._stream, text)

    def _width(self) -> int:
        try:
            columns = os.get_terminal_size(self._stream.fileno()).columns
        except (OSError, ValueError):
            columns = 0
        return max(40, min(_MAX_WIDTH, columns or 100))  # some pseudo-terminals say 0


def _other_speaker(finding: Finding, own: int) -> int | None:
    """Return the rank that has reported a hang in another one's place, None where that is this one, or none did."""
    judge = str(finding.evidence.get(HANG, "")).partition(":")[0]
    return int(judge) if judge.isdecimal() and int(judge) != own else None


#: The overhead from which on it is explained.
_HIGH_OVERHEAD = 0.05
#: The overhead of a run whose steps took fewer seconds than this is printed in seconds.
_SHORT_RUN = 60.0
#: Where it was higher than lately by this factor, as while every step is checked at first, both are said.
_LESS = 1.2


class Summary:
    """The counts behind the summary line: steps, agreement between the ranks, overhead."""

    def __init__(self) -> None:
        self.steps: Counter[int] = Counter()
        self.skipped = 0
        self.compared = 0
        self.disagreed = 0
        self.local = False  # local SGD: compared where the replicas were averaged
        self.sharded = False  # perhaps no other rank holds its parameters
        self._parted: dict[int, int] = {}  # optimizer -> newest step in which ranks disagreed
        self._apart = 0  # of these, those that trained apart: if the replicas are averaged later, it was meant so
        self.overhead = self.lately = self.seconds = math.nan
        self.interval = 1
        self.last: dict[int, int] = {}  # optimizer -> newest step
        self.last_states: set[tuple[int, int]] = set()  # (optimizer, step) that was compared once more afterwards
        self.coverage: Coverage | None = None
        self.ignored: dict[str, set[str | None]] = {}  # entry of `ignore` -> ids of what it has kept silent

    def hear(self, finding: Finding) -> None:
        """Update the counts of ignored findings; a finding that is not ignored any more leaves them."""
        for entry, ids in self.ignored.items():
            (ids.add if entry == finding.ignored else ids.discard)(finding.id)

    def count(self, record: StepJudged) -> None:
        """Count a judged step."""
        outvoted = dissenters(record.step)
        self.steps[record.step.optimizer] += record.steps
        self.last[record.step.optimizer] = record.step.step
        if "parameters" in outvoted:
            self.last_states.add((record.step.optimizer, record.step.step))
        self.skipped += record.step.any(Flag.GUARD_SKIPPED)
        self.sharded |= record.step.any(Flag.SHARDED)
        sharded = record.step.any(Flag.SHARDED) and "optimizer_state" in outvoted  # what there is to compare
        parted = any(outvoted.values())  # in settings too, which are compared in steps that are not checked
        certain = sharded or is_certified(record.step)
        self.compared += certain or parted or bool({"parameters", "gradients"} & outvoted.keys())
        if parted:
            self.disagreed += 1
            self._parted[record.step.optimizer] = record.step.step
        if record.step.any(Flag.LOCAL_ONLY):
            self.disagreed, self._apart = self.disagreed - self._apart, 0
            self.local |= "parameters" not in outvoted
        elif record.step.all(Flag.UNSYNCED_BACKWARD) or record.step.all(Flag.NO_DDP):
            self._apart += parted
        self.overhead, self.lately = record.overhead_of_run, record.overhead_ratio
        self.seconds = record.overhead_seconds
        self.interval = record.interval

    def end(self, steps: Mapping[int, int]) -> None:
        """Take each optimizer's last step on this rank: the last steps may have had no rows."""
        for optimizer, last in self.last.items():  # an optimizer that is made in the middle of a run begins there
            taken = max(last, steps.get(optimizer, 0) - 1)
            self.steps[optimizer] += taken - last
            self.last[optimizer] = taken

    def count_last(self, payload: Mapping[str, Any]) -> None:
        """Count the comparison of the final parameters, if all ranks gave theirs."""
        rows = payload["rows"].values()
        known = [row for row in rows if int(row["params_after_digest"], 16) or int(row["foreign_params_digest"], 16)]
        if len(known) == len(rows) > 1:
            self.last_states.add((payload["optimizer"], payload["step"]))
        intended = self.local or any(row["flags"] & int(Flag.LOCAL_ONLY | Flag.IN_JOIN) for row in rows)
        counted = self._parted.get(payload["optimizer"]) == payload["step"]
        parted = not (intended or counted) and len({row["params_after_digest"] for row in known}) > 1
        self.disagreed += parted
        self.compared += parted

    def checked(self, world: int) -> bool:
        """Whether enough was compared to print `no findings`."""
        essential = self.coverage is not None and any(gap.weight is Weight.ESSENTIAL for gap in self.coverage.gaps)
        return bool(self.steps) and (world == 1 or self.compared > 0) and not essential

    def items(self, world: int) -> list[str]:
        """Return the parts of the line; agreement is stated only for what was compared."""
        gaps = () if self.coverage is None else self.coverage.missed
        unchecked = [f"not checked: {'; '.join(clean(gap.words, 400) for gap in gaps[:_MAX_GAPS])}"] if gaps else []
        if len(gaps) > _MAX_GAPS:
            unchecked.append(f"{len(gaps) - _MAX_GAPS} more in run.json")
        total = sum(self.steps.values())
        if not total:
            return unchecked or ["no optimizer step was seen, so nothing was checked"]
        items = [counted(total, "step"), *self._agreement(world, said=bool(gaps))]
        items += unchecked
        if self.seconds < _SHORT_RUN * self.overhead:  # a share of a short run says nothing
            items.append(f"overhead {self.seconds:.1f} s")
        elif math.isfinite(self.overhead):
            less = self.interval > 1 and self.lately < self.overhead / _LESS and self.overhead > _HIGH_OVERHEAD
            items.append(f"overhead {percent(self.overhead)}" + (f", {percent(self.lately)} lately" if less else ""))
        if self.interval > 1:
            items.append(f"full check every {self.interval} steps")
        return items

    def _agreement(self, world: int, *, said: bool) -> list[str]:
        items = [f"{self.skipped} skipped by the numeric guard"] if self.skipped else []
        if world == 1:
            items.append("one rank, nothing to compare")
        elif not (self.compared or self.disagreed) or (self.coverage is not None and self.coverage.own):
            items += [] if said else ["nothing was compared between the ranks"]
        elif self.disagreed:
            items.append(f"the ranks disagreed in {self.disagreed} of the {self.compared} that were compared")
        else:
            items.append(f"the ranks agreed in all {self.compared} that were compared")
        if self.local:
            items.append("replicas that may differ, between averages or after a Join, are not compared there")
        elif self.sharded and self.compared and not self.last_states:
            items.append("sharded parameters have no replicas to compare")
        elif world > 1 and self.compared and not self.last.items() <= self.last_states:
            items.append("the last step's parameters were not compared")
        return items


def _is_terminal(stream: TextIO) -> bool:
    try:
        return stream.isatty() and os.environ.get("TERM") != "dumb"
    except (AttributeError, ValueError):
        return False


def _styled_block(finding: Finding, title: str, content: list[Part], *, width: int, color: bool) -> str:
    """Return the block with the terminal's escape codes.

    Without the help of rich: it draws from Python's global random numbers when it is imported, which are the job's.
    """

    def styled(text: str, codes: str) -> str:
        return f"\x1b[{codes}m{text}\x1b[0m" if color and codes and text else text

    code = clean(finding.code, 20)
    badge = styled(f" {code} ", _BADGE[finding.severity]) if color else code
    found = [f"{badge}{styled(f' {finding.severity.label}  {title}', _BOLD)}  {styled('ddpdebug', _DIM)}"]
    rows = [(label, line) for label, lines in content for line in lines]
    wrapped = [_wrapped(line, width - _INDENT) for _, line in rows]
    while sum(map(len, wrapped)) >= _MAX_LINES and (longest := max(wrapped, key=len))[1:]:
        longest[-2:] = [f"{longest[-2]} …"]
    before = ""
    for (label, line), lines in zip(rows, wrapped, strict=True):
        codes = _COMMAND if line.startswith("ddpdebug explain ") else _LINE.get(label, "")
        for j, part in enumerate(lines):
            margin = f"  {label if label != before and j == 0 else ''}".ljust(_INDENT)
            found.append(styled(margin, _DIM) + styled(part, codes))
        before = label
    return "".join(f"{line}\n" for line in found)


def _wrapped(line: str, width: int) -> list[str]:
    """Return a text's lines of at most `width` cells; some characters take two."""
    cells = "".join(f"{c}\0" if unicodedata.east_asian_width(c) in {"W", "F"} else c for c in line)
    parts = textwrap.wrap(cells, max(1, width), break_on_hyphens=False, replace_whitespace=False, expand_tabs=False)
    return [part.replace("\0", "").rstrip() for part in parts] or [""]
