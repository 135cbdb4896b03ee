"""The files of a run directory: their names, their format, and how to read them. Torch-free.

A directory may belong to a run that was killed, is still running, or was made by somebody else: readers skip what is
cut off or malformed, check every type, and never read beyond fixed bounds. This is the layout:

| file | written by | content |
|---|---|---|
| `run.json` | rank 0 | what ran; `outcome` is null until the run has ended |
| `findings.jsonl` | rank 0 | a finding a line, as soon as it is known; rewritten with final counts at the end |
| `ignored.jsonl` | rank 0 | findings that the user has asked to be silent about, in the same form |
| `steps.bin`, `steps.00001.bin`, ... | rank 0 | per file a header, then rows as `schema.row.encode` makes them |
| `observations.jsonl`, `observations.00001.jsonl`, ... | rank 0 | details and facts, with their place among the rows |
| `ranks/<rank>/place.json` | each rank | where this rank runs, and the address of its metrics |
| `ranks/<rank>/outcome.json` | each rank | how this rank ended |
| `ranks/<rank>/black_box` | each rank | what it did last, see `progress/black_box.py` |
| `ranks/<rank>/black_box.at` | each rank | where that lies, as long as it must lie on the rank's own host |
| `ranks/<rank>/findings.jsonl` | another rank than 0 | findings that it had to write in the place of rank 0 |
| `ranks/<rank>/stacks.txt` | `check`, each rank | where its threads were when the time was over, or a hang stood |
| `stacks.request` | `stacks`, `check` | a question, see `progress/asked.py`; gone once it was answered |
| `ranks/<rank>/stacks.json` | each rank | its answer |
| `ranks/<rank>/trouble.jsonl` | each rank | parts of ddpdebug that failed |
| `check.json` | `check` | what the one who started the ranks saw: exit statuses, whether the time was over |
| `ends.json` | `check` | exit statuses of ranks that the script has started by itself, by rank |
| `spawned/` | these ranks | their own run directory, where the script trains in its own process as well |
| `bundles/*/`, `ranks/<rank>/bundles/*/` | rank 0, each other rank | replay bundles; `docs/replay.md` |
| `ranks/<rank>/memory/` | each rank | summaries of failed allocations, see `forensics/memory/oom.py` |

Of more ranks than `schema.step.FLAT` a step's rows are mostly chosen ones; the observation `chosen` before them says
what these stand for.

Of `steps` and `observations` the first file and the newest are kept, at most `CAP_BYTES` together.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from itertools import groupby, islice
from pathlib import Path
from typing import Any

from ddpdebug.errors import UsageError
from ddpdebug.run_directory.segments import segment_paths
from ddpdebug.schema.announcements import End
from ddpdebug.schema.finding import Finding
from ddpdebug.schema.hangs import is_over
from ddpdebug.schema.progress import ranks_in, spans_of
from ddpdebug.schema.row import LAYOUT_VERSION, ROW_BYTES, Row, decode
from ddpdebug.schema.step import SUMS, Step, Summary, step_of
from ddpdebug.schema.wire import from_json

RUN = "run.json"
FINDINGS = "findings.jsonl"
IGNORED = "ignored.jsonl"
#: Marks of the findings that Grafana has: a line of JSON for each, `{"sent": id of the finding}`.
STEPS = "steps.bin"
OBSERVATIONS = "observations.jsonl"
RANKS = "ranks"
BUNDLES = "bundles"
OUTCOME = "outcome.json"
PLACE = "place.json"
BALLAST = ".ballast"
TROUBLE = "trouble.jsonl"
CHECK = "check.json"
ENDS = "ends.json"
SPAWNED = "spawned"
PREVIOUS = "previous-*"
STACKS = "stacks.txt"

CAP_BYTES = 64 << 20
#: Begins the text of ranks that are the bits of a number.
_BITS = "0x"
_MAX_DOCUMENT = 16 << 20
_MAX_FINDINGS = 1 << 30
#: Files that ranks have written in the place of rank 0, and bytes of them altogether.
_MAX_OWN, _MAX_OWN_BYTES = 1024, 64 << 20
#: More ranks than any job has; beyond it a number is damage, and must not be counted up to.
MAX_WORLD = 1 << 20
_MAX_LINE = CAP_BYTES // 8

#: A file of rows begins with a magic word, the layout's version, the bytes of a row and the number of the first row.
_LAST_STATE = ("params_after_digest", "foreign_params_digest", "state_digest")
_HEADER = struct.Struct("<8sIIQ")
_MAGIC = b"ddpdebug"


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """A detail or a fact of a run, and the number of rows before it."""

    rows: int
    kind: str
    payload: Mapping[str, Any]


def steps_header(first_row: int) -> bytes:
    """Return the header of a file of rows whose first row is the run's row `first_row`."""
    return _HEADER.pack(_MAGIC, LAYOUT_VERSION, ROW_BYTES, first_row)


class DamagedError(UsageError):
    """A file of a run directory holds what no run writes."""


def read_run(directory: Path) -> dict[str, Any]:
    """Return the content of `run.json`; raise ValueError if the directory is not that of a run.

    `world` is a number of ranks that a run can have, or absent; anything else raises DamagedError.
    """
    run = _document(directory / RUN)
    if run is None or not isinstance(run.get("run"), str):
        raise ValueError(f"{str(directory)!r} is not a run directory: it has no readable {RUN}")
    world = run.get("world")
    if world is not None and not (_is_count(world) and 1 <= world <= MAX_WORLD):
        shown = repr(world) if not isinstance(world, int) or abs(world) < 1 << 63 else "a huge number"
        raise DamagedError(
            f"{str(directory / RUN)!r} is damaged: its world is {shown[:60]}, not a number of ranks (1 to {MAX_WORLD})"
        )
    return run


def bytes_of_log(directory: Path) -> int:
    """Return the bytes of the rows and the observations of a run."""
    paths = [*segment_paths(directory / STEPS), *segment_paths(directory / OBSERVATIONS)]
    return sum(path.stat().st_size for path in paths)


def read_findings(directory: Path) -> list[Finding]:
    """Return the findings in the order in which they were raised; `damage` describes those that cannot be read.

    Behind them come those that other ranks have written in the place of rank 0; of one that both have, what rank 0 has
    counts, unless only the other knows that it is over. Ranks that have lost each other may each say that a third has
    left: who has said so first counts.
    """
    found = [finding for line in _lines(directory / FINDINGS) if (finding := Finding.read(line)) is not None]
    run = (_document(directory / RUN) or {}).get("run")
    places = {_name(finding): place for place, finding in enumerate(found) if finding.id is not None}
    shared = len(found)
    for file in _own_findings(directory / RANKS):
        for line in _lines(file):
            finding = Finding.read(line)
            if finding is None or finding.id is None or (run is not None and finding.run != run):
                continue
            place = places.setdefault(_name(finding), len(found))
            if place == len(found):
                found.append(finding)
            elif (place >= shared and found[place].id == finding.id) or (
                is_over(finding) and not is_over(found[place])
            ):
                found[place] = finding
    return found


def read_ignored(directory: Path) -> dict[str, int]:
    """Return the entries of `ignore` with the number of findings that each has suppressed; 0 for an unused one."""
    config = (_document(directory / RUN) or {}).get("config")
    given = config.get("ignore") if isinstance(config, dict) else None
    counts = dict.fromkeys((entry for entry in given if isinstance(entry, str)) if isinstance(given, list) else (), 0)
    for finding in read_ignored_findings(directory):
        if finding.ignored in counts:
            counts[finding.ignored] += 1
    return counts


def read_ignored_findings(directory: Path) -> list[Finding]:
    """Return the findings that `ignore` has suppressed."""
    return [finding for line in _lines(directory / IGNORED) if (finding := Finding.read(line)) is not None]


def _name(finding: Finding) -> object:
    """Return by what a finding is known as the same in the files of two ranks."""
    return (finding.code, finding.ranks) if finding.code == "HANG503" else finding.id


def _own_findings(ranks: Path) -> list[Path]:
    """Return the findings that ranks have written by themselves, by rank: no more and no larger ones than a run has."""
    try:
        folders = [one for one in islice(ranks.iterdir(), MAX_WORLD) if one.name.isascii() and one.name.isdecimal()]
    except OSError:
        return []
    files, left = list[Path](), _MAX_OWN_BYTES
    for folder in sorted(folders, key=lambda one: (len(one.name), one.name)):
        file = folder / FINDINGS
        size = file.stat().st_size if file.is_file() else 0
        if 0 < size <= left and len(files) < _MAX_OWN:
            files.append(file)
            left -= size
    return files


def damage(directory: Path) -> list[str]:
    """Describe the damage of the findings file: unreadable lines, fewer findings than the run counted.

    Of a run that is being written, or was killed, the last line may be cut off.
    """
    file = directory / FINDINGS
    try:
        data = file.read_bytes() if file.stat().st_size <= _MAX_FINDINGS else None
    except OSError as error:
        return [f"{FINDINGS} cannot be read: {error.strerror or error}"]
    if data is None:
        return [f"{FINDINGS} is larger than {_MAX_FINDINGS} bytes: it was not made by a run"]
    words, lines = [], data.split(b"\n")
    cut = lines.pop()
    known = [len(line) < _MAX_LINE and Finding.read(line.decode("utf-8", "replace")) is not None for line in lines]
    bad = [number for number, fine in enumerate(known, 1) if not fine]
    if bad:
        shown = ", ".join(map(str, bad[:5])) + (", ..." if len(bad) > 5 else "")
        words.append(f"{len(bad)} of {len(lines)} lines of {FINDINGS} cannot be read (line {shown})")
    if cut:
        words.append(f"the last line of {FINDINGS} is cut off")
    outcome = (_document(directory / RUN) or {}).get("outcome")
    counts = outcome.get("findings") if isinstance(outcome, dict) else None
    if isinstance(counts, dict):
        counted = sum(count for count in counts.values() if _is_count(count) and 0 <= count < 1 << 40)
        if counted > sum(known):
            words.append(f"the run had {counted} findings, of which {sum(known)} can be read")
    return words


def read_outcomes(directory: Path) -> dict[int, dict[str, Any]]:
    """Return the outcome of each rank, by rank; ranks that were killed, and those of an earlier run, are absent."""
    run = read_run(directory)["run"]
    outcomes = {}
    for folder in (directory / RANKS).glob("*"):
        outcome = _document(folder / OUTCOME) if folder.name.isascii() and folder.name.isdecimal() else None
        if outcome is not None and outcome.get("run") == run and isinstance(outcome.get("reason"), str):
            outcomes[int(folder.name)] = outcome
    return dict(sorted(outcomes.items()))


def read_ends(directory: Path) -> dict[int, dict[str, Any]]:
    """Return the outcomes that ranks announced: the only account of a rank with another file system."""
    ends = {}
    for observed in read_observations(directory):
        payload, rank = observed.payload, observed.payload.get("rank")
        if observed.kind == "fact" and payload.get("topic") == End.topic and _is_count(rank):
            end = from_json(End, payload.get("value"))
            if end is not None:
                ends[int(str(rank))] = {"reason": end.reason, "steps": end.steps}
    return ends


def read_spawned(directory: Path, run: str) -> tuple[int, dict[int, int]] | None:
    """Return the number of ranks that the script of a run started itself, and their known exit statuses.

    None where it is another run, or one whose ranks the script has not started.
    """
    try:
        known = read_run(directory)
    except ValueError:
        return None
    if known.get("run") != run or known.get("spawned") is not True or "world" not in known:
        return None
    ends = (_document(directory / ENDS) or {}).items()
    statuses = {int(rank): code for rank, code in ends if rank.isdecimal() and isinstance(code, int)}
    return known["world"], {rank: code for rank, code in statuses.items() if rank < known["world"]}


def read_check(directory: Path) -> dict[str, Any] | None:
    """Return the content of `check.json`; None if there is none or it is of another run than `run.json`."""
    check = _document(directory / CHECK)
    if check is None or not isinstance(check.get("run"), str):
        return None
    run = _document(directory / RUN)
    return check if run is None or run.get("run") == check["run"] else None


def read_rows(directory: Path) -> Iterator[Row]:
    """Yield the kept rows in the order in which the run wrote them.

    Raise ValueError on rows of another layout: they were written by another version of ddpdebug.
    """
    for _, row in numbered_rows(directory):
        yield row


def numbered_rows(directory: Path) -> Iterator[tuple[int, Row]]:
    """Yield the kept rows with their numbers in the run; a gap in the numbers means rows that were deleted."""
    for path in segment_paths(directory / STEPS):
        with path.open("rb") as file:
            head = file.read(_HEADER.size)
            if len(head) < _HEADER.size:
                continue  # killed while it began
            magic, version, size, number = _HEADER.unpack(head)
            if magic != _MAGIC:
                raise ValueError(f"{str(path)!r} holds no rows of ddpdebug")
            if (version, size) != (LAYOUT_VERSION, ROW_BYTES):
                raise ValueError(
                    f"{str(path)!r} has row layout {version}, this ddpdebug reads {LAYOUT_VERSION}; "
                    f"use the version named in {RUN}"
                )
            while len(data := file.read(ROW_BYTES)) == ROW_BYTES:
                yield number, decode(data)
                number += 1


def read_newest(directory: Path, count: int) -> list[Row]:
    """Return at most the `count` newest rows of the newest file, oldest first; its cost does not grow with the run."""
    paths = segment_paths(directory / STEPS)
    if not paths:
        return []
    with paths[-1].open("rb") as file:
        head = file.read(_HEADER.size)
        if len(head) < _HEADER.size or _HEADER.unpack(head)[:3] != (_MAGIC, LAYOUT_VERSION, ROW_BYTES):
            return []
        rows = (paths[-1].stat().st_size - _HEADER.size) // ROW_BYTES
        file.seek(_HEADER.size + max(0, rows - count) * ROW_BYTES)
        data = file.read(min(rows, count) * ROW_BYTES)
    return [decode(data, at) for at in range(0, len(data) - ROW_BYTES + 1, ROW_BYTES)]


def numbered_steps(directory: Path) -> Iterator[tuple[int, Step]]:
    """Yield the kept steps (rows only) in the order in which they were judged, with the number of their first row.

    Raises:
        ValueError: this is not the directory of a run, or its rows have the layout of another version.
    """
    world = read_run(directory).get("world")
    rows = numbered_rows(directory)
    told = (one for one in read_observations(directory) if one.kind == "chosen")
    about = next(told, None)
    for (optimizer, step), group in groupby(rows, key=lambda item: (item[1].optimizer, item[1].step)):
        numbered = list(group)
        by_rank = {row.rank: row for _, row in numbered}
        number = numbered[0][0]
        while about is not None and about.rows < number:
            about = next(told, None)
        found = step_of(optimizer, step, by_rank, world or len(by_rank))
        known = about is not None and about.rows == number
        yield number, with_chosen(found, about.payload) if known and about is not None else found


def read_steps(directory: Path) -> Iterator[Step]:
    """Yield the kept steps in the order in which they were judged."""
    return (step for _, step in numbered_steps(directory))


def read_observations(directory: Path) -> Iterator[Observed]:
    """Yield the kept details and facts in order."""
    for path in segment_paths(directory / OBSERVATIONS):
        for line in _lines(path):
            record = _parsed(line)
            if record is None:
                continue
            rows, kind, payload = (record.get(name) for name in ("rows", "kind", "payload"))
            if isinstance(rows, int) and isinstance(kind, str) and isinstance(payload, dict):
                yield Observed(rows=rows, kind=kind, payload=payload)


def last_state(step: Step) -> dict[str, Any]:
    """Return the record of the comparison after the last step (`Flag.LAST_STATE`): digests in hexadecimal, by rank."""
    rows = {
        str(rank): {"flags": row.flags, **{name: f"{getattr(row, name):016x}" for name in _LAST_STATE}}
        for rank, row in step.rows.items()
    }
    about = {"chosen": chosen_of(step)} if step.looks_chosen else {}
    return {"optimizer": step.optimizer, "step": step.step, "rows": rows, **about}


def chosen_of(step: Step) -> dict[str, Any]:
    """Return the record of the ranks that a step's chosen rows stand for."""
    if not step.chosen:
        return {"chosen": False}
    kinds = {str(lowest): _set_text(ranks) for lowest, ranks in step.kinds.items()}
    told = None if step.told is None else asdict(step.told)
    return {"chosen": True, "kinds": kinds, "others": _set_text(step.others), "told": told}


def with_chosen(step: Step, about: Mapping[str, Any]) -> Step:
    """Return a step whose rows stand for the recorded ranks; the step as it is if the record is malformed."""
    if about.get("chosen") is not True:
        return replace(step, chosen=False)
    try:
        kinds = {int(lowest): _ranks_of(ranks, step.world) for lowest, ranks in about["kinds"].items()}
        others, told = _ranks_of(about["others"], step.world), about["told"]
        sums = {str(name): (int(count), float(total)) for name, (count, total) in told["sums"].items()}
        summary = Summary(some=int(told["some"]), common=int(told["common"]), sums=sums)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
        return step
    if not kinds.keys() <= step.rows.keys() or not SUMS.keys() <= sums.keys():
        return step
    return replace(step, chosen=True, kinds=kinds, others=others, told=summary)


def _set_text(ranks: Collection[int]) -> str:
    """Return ranks as spans, or as the bits of a number where that is shorter: of scattered ones it is bounded."""
    spans, highest = spans_of(ranks), max(ranks, default=0)
    if len(spans) <= len(_BITS) + highest // 4:
        return spans
    bits = bytearray(highest // 8 + 1)
    for rank in ranks:
        bits[rank // 8] |= 1 << rank % 8
    return f"{_BITS}{int.from_bytes(bits, 'little'):x}"


def _ranks_of(text: str, world: int) -> frozenset[int]:
    if text.startswith(_BITS):
        bits = int(text, 16)
        return frozenset(rank for rank in range(min(world, bits.bit_length())) if bits >> rank & 1)
    return frozenset(rank for rank in ranks_in(text) if rank < world)


def read_last_state(payload: Mapping[str, Any], world: int) -> Step | None:
    """Return the step from a record of `last_state`; None if it is malformed."""
    try:
        step, optimizer, rows = int(payload["step"]), int(payload["optimizer"]), {}
        for rank, told in payload["rows"].items():
            digests: dict[str, Any] = {name: int(told[name], 16) for name in _LAST_STATE}
            rows[int(rank)] = Row(rank=int(rank), step=step, optimizer=optimizer, flags=int(told["flags"]), **digests)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
        return None
    found, about = step_of(optimizer, step, rows, world), payload.get("chosen")
    return with_chosen(found, about) if isinstance(about, dict) else found


def _lines(path: Path) -> Iterator[str]:
    """Yield the complete lines of a file; one that is cut off, or endless, is left out."""
    if not path.is_file():
        return
    with path.open("rb") as file:
        while line := file.readline(_MAX_LINE):
            if line.endswith(b"\n"):
                yield line.decode("utf-8", "replace")
            else:
                while line and not line.endswith(b"\n"):
                    line = file.readline(_MAX_LINE)


def _document(path: Path) -> dict[str, Any] | None:
    if not path.is_file() or path.stat().st_size > _MAX_DOCUMENT:
        return None
    return _parsed(path.read_bytes().decode("utf-8", "replace"))


def _parsed(text: str) -> dict[str, Any] | None:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
