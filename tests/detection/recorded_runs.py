"""Recordings of runs of the corpus: what the rules were given, and what the run has reported. Torch-free.

A family of scripts has two files in `recorded/`: `<family>.jsonl.xz`, first the fields of a row, then a line for each
run, and `<family>.rows.xz`, the rows of these runs, a column behind the other. Times are kept to a microsecond, as
nanoseconds are noise that cannot be packed, and digests, which rules compare and nothing else, by the order in which
the run shows them first; all else is kept as it was. A field that rows have today and a recording lacks is not known
there, as it is where nobody has measured it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import lzma
import math
import re
import struct
import tempfile
from collections.abc import Iterable
from itertools import repeat
from pathlib import Path
from typing import Any

from ddpdebug.diagnosis.rejudge import rejudge
from ddpdebug.run_directory import reader
from ddpdebug.schema.finding import Finding
from ddpdebug.schema.row import LAYOUT_VERSION, ROW_BYTES, Row, decode, encode, layout

FOLDER = Path(__file__).with_name("recorded")
_REPOSITORY = Path(__file__).resolve().parents[2]
_KEPT = ("run", "world", "config", "versions", "outcome")  # of `run.json`
_PROSE = ("causes", "actions")
#: Seconds are kept in these units, as whole numbers; `_UNKNOWN` is NaN.
_UNIT, _UNKNOWN = 1e-6, -(1 << 63)
_PACKING = [{"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME, "dict_size": 64 << 20}]
_COLUMNS = [{**_PACKING[0], "lc": 0, "lp": 3, "pb": 3}]  # everything is eight bytes long


@dataclasses.dataclass(frozen=True)
class Recording:
    """One run of a script.

    Args:
        script: its name without the suffix.
        source: a digest of what the script was.
        run: of `run.json` what the rules are judged with.
        observations: the lines of `observations.jsonl`.
        rows: in the order in which the run judged them.
        stale: why it says nothing about today's rules; empty where it does.
    """

    script: str
    fault: bool
    source: str
    run: dict[str, Any]
    observations: list[dict[str, Any]]
    rows: list[Row]
    findings: list[Finding]
    stale: str = ""

    @property
    def name(self) -> tuple[str, bool]:
        """By what a run is known."""
        return self.script, self.fault


def family(script: str) -> str:
    """Return the archive that a script's runs lie in."""
    return re.split(r"[\d_]", script)[0]


def source_of(script: Path) -> str:
    """Return the digest by which a script is known as the one that was recorded."""
    return hashlib.sha256(script.read_bytes()).hexdigest()[:16]


def record(directory: Path, script: Path, *, fault: bool, findings: Iterable[Finding]) -> Recording:
    """Return what is kept of a run that has just ended in `directory`, without paths of this machine."""
    steps, observations = directory / reader.STEPS, directory / reader.OBSERVATIONS
    if list(directory.glob("steps.0*")) or list(directory.glob("observations.0*")):
        raise ValueError(f"{script.name} is too long to be recorded: its run has several files of rows")
    data = steps.read_bytes()[len(reader.steps_header(0)) :] if steps.exists() else b""
    run = reader.read_run(directory)
    told = {
        "run": {key: run.get(key) for key in _KEPT},
        "observations": [json.loads(line) for line in _text(observations).split("\n") if line],
        "findings": [_told(finding) for finding in findings],
    }
    text = json.dumps(told)
    for path, instead in ((str(directory.parent), "/scratch"), (str(_REPOSITORY), "/repository")):
        text = text.replace(json.dumps(path)[1:-1], instead)
    told = json.loads(text)
    rows = [decode(data, at) for at in range(0, len(data) - ROW_BYTES + 1, ROW_BYTES)]
    found = [Finding.from_json(json.dumps(line)) for line in told["findings"]]
    return Recording(
        script.stem, fault, source_of(script), told["run"], told["observations"], _settled(rows), found
    )  # fmt: skip


def judge(recording: Recording) -> list[Finding]:
    """Return what today's rules find in a recorded run."""
    with tempfile.TemporaryDirectory() as folder:
        lay_out(recording, Path(folder))
        return rejudge(Path(folder))


def lay_out(recording: Recording, directory: Path) -> None:
    """Write a recorded run as a run directory of today."""
    (directory / reader.RUN).write_text(json.dumps({**recording.run, "layout": layout()}))
    (directory / reader.STEPS).write_bytes(reader.steps_header(0) + b"".join(map(encode, recording.rows)))
    lines = [json.dumps(line) + "\n" for line in recording.observations]
    (directory / reader.OBSERVATIONS).write_text("".join(lines))


def decided(finding: Finding) -> tuple[object, ...]:
    """Return of a finding what the rules decide and what does not depend on how they word it."""
    return (finding.code, finding.step, finding.ranks, finding.subject, finding.severity, finding.phase)


def write(folder: Path, recordings: Iterable[Recording]) -> None:
    """Write recordings in the place of earlier ones of the same runs; the other families' files stay as they are."""
    folder.mkdir(exist_ok=True)
    families: dict[str, list[Recording]] = {}
    for one in recordings:
        families.setdefault(family(one.script), []).append(one)
    for name, new in families.items():
        kept = {one.name: one for one in read(folder, name) if not one.stale}
        kept.update((one.name, one) for one in new)
        _write_family(folder, name, [kept[key] for key in sorted(kept)])


def read(folder: Path, name: str = "*", scripts: Path | None = None) -> list[Recording]:
    """Return the recordings of a family, or of all; with the folder of the scripts, the stale ones are marked."""
    found = [one for file in sorted(folder.glob(f"{name}.jsonl.xz")) for one in _read_family(file)]
    return [_dated(one, scripts / f"{one.script}.py") for one in found] if scripts is not None else found


def _dated(one: Recording, script: Path) -> Recording:
    if not script.exists():
        return dataclasses.replace(one, stale="the script is gone")
    changed = source_of(script) != one.source
    return dataclasses.replace(one, stale="the script has changed") if changed else one


def _write_family(folder: Path, name: str, recordings: list[Recording]) -> None:
    kinds = dict(zip(Row._fields, layout()["format"][1:], strict=True))
    lines: list[dict[str, Any]] = [{"layout": LAYOUT_VERSION, "fields": kinds}]
    for one in recordings:
        about = {"script": one.script, "fault": one.fault, "source": one.source, "rows": len(one.rows)}
        findings = [_told(finding) for finding in one.findings]
        lines.append({**about, "run": one.run, "findings": findings, "observations": one.observations})
    text = "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines)
    rows = [row for one in recordings for row in one.rows]
    columns = [_packed(field, kinds[field], [getattr(row, field) for row in rows]) for field in Row._fields]
    (folder / f"{name}.jsonl.xz").write_bytes(lzma.compress(text.encode(), filters=_PACKING))
    (folder / f"{name}.rows.xz").write_bytes(lzma.compress(b"".join(columns), filters=_COLUMNS))


def _read_family(file: Path) -> list[Recording]:
    about, *runs = [json.loads(line) for line in lzma.decompress(file.read_bytes()).splitlines()]
    data = lzma.decompress(file.with_name(file.name.replace(".jsonl.", ".rows.")).read_bytes())
    known = dict(zip(Row._fields, layout()["format"][1:], strict=True))
    lost = [field for field, kind in about["fields"].items() if known.get(field) != kind]
    count = sum(run["rows"] for run in runs)
    columns = {
        field: _unpacked(field, kind, data[at * count * 8 : (at + 1) * count * 8])
        for at, (field, kind) in enumerate(about["fields"].items())
        if field not in lost
    }
    unknown = Row._field_defaults
    rows = [
        *map(Row._make, zip(*(columns.get(name, repeat(unknown[name], count)) for name in Row._fields), strict=True))
    ]
    stale = f"rows have no {', '.join(lost[:3])} any more" if lost else ""
    found, first = list[Recording](), 0
    for run in runs:
        own, first = rows[first : first + run["rows"]], first + run["rows"]
        findings = [Finding.from_json(json.dumps(line)) for line in run["findings"]]
        ours = (run["run"], run["observations"], own, findings)
        found.append(Recording(run["script"], run["fault"], run["source"], *ours, stale))
    return found


def _settled(rows: list[Row]) -> list[Row]:
    """Return the rows of a run as they come back from the archive."""
    seconds = [field for field in Row._fields if field.endswith("_seconds")]
    digests = [field for field in Row._fields if field.endswith("_digest")]
    numbers = {0: 0}
    return [
        row._replace(
            **{field: _back(_units(getattr(row, field))) for field in seconds},
            **{field: numbers.setdefault(getattr(row, field), len(numbers)) for field in digests},
        )
        for row in rows
    ]


def _packed(field: str, kind: str, values: list[Any]) -> bytes:
    if field.endswith("_seconds"):
        kind, values = "q", [_units(value) for value in values]
    return struct.pack(f"<{len(values)}{kind}", *values)


def _unpacked(field: str, kind: str, data: bytes) -> list[Any]:
    seconds = field.endswith("_seconds")
    values = struct.unpack(f"<{len(data) // 8}{'q' if seconds else kind}", data)
    return [_back(value) for value in values] if seconds else list(values)


def _units(seconds: float) -> int:
    return round(seconds / _UNIT) if math.isfinite(seconds) else _UNKNOWN


def _back(units: int) -> float:
    return units * _UNIT if units != _UNKNOWN else math.nan


def _told(finding: Finding) -> dict[str, Any]:
    told: dict[str, Any] = json.loads(finding.to_json())
    return {key: value for key, value in told.items() if key not in _PROSE}


def _text(path: Path) -> str:
    return path.read_text() if path.exists() else ""
