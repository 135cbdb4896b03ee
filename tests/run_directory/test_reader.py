"""Reading run directories that were cut off, damaged, or made by somebody else."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from ddpdebug.run_directory import reader as run_files
from ddpdebug.schema.finding import Finding, Severity
from ddpdebug.schema.row import Row, encode

GOOD = Finding(code="RANK101", severity=Severity.CRITICAL, title="t", step=3, ranks=(1,), subject=("w",))


def run_json(directory: Path, **fields: object) -> None:
    """Write a small run.json."""
    (directory / "run.json").write_text(json.dumps({"run": "r1", "world": 2, **fields}))


def test_a_directory_without_a_run_is_refused_by_name(tmp_path: Path) -> None:
    """The message says what is missing where."""
    with pytest.raises(ValueError, match=r"is not a run directory: it has no readable run\.json"):
        run_files.read_run(tmp_path)
    (tmp_path / "run.json").write_text('{"run": ')
    with pytest.raises(ValueError, match="is not a run directory"):
        run_files.read_run(tmp_path)


def test_missing_files_are_empty(tmp_path: Path) -> None:
    """A run killed at its beginning has no findings, rows or observations."""
    run_json(tmp_path)
    assert run_files.read_findings(tmp_path) == []
    assert run_files.read_outcomes(tmp_path) == {}
    assert list(run_files.read_rows(tmp_path)) == []
    assert list(run_files.read_observations(tmp_path)) == []


def test_a_line_that_is_cut_off_is_left_out(tmp_path: Path) -> None:
    """Also when what is there would be complete JSON."""
    line = GOOD.to_json()
    for end in (line[:40], line):
        (tmp_path / "findings.jsonl").write_text(f"{line}\n{end}")
        assert run_files.read_findings(tmp_path) == [GOOD]


@pytest.mark.parametrize(
    "bad",
    [
        "", "null", "[]", "{}", "nonsense", "\x00\xff", "[" * 100_000,
        '{"code": "X"}',
        '{"code": 1, "severity": "error", "title": "t"}',
        '{"code": "X", "severity": "bad", "title": "t"}',
        '{"code": "X", "severity": 3, "title": "t"}',
        '{"code": "X", "severity": "error", "title": "t", "ranks": ["a"]}',
        '{"code": "X", "severity": "error", "title": "t", "ranks": 3}',
        '{"code": "X", "severity": "error", "title": "t", "ranks": null}',
        '{"code": "X", "severity": "error", "title": "t", "subject": "abc"}',
        '{"code": "X", "severity": "error", "title": "t", "step": "3"}',
        '{"code": "X", "severity": "error", "title": "t", "count": true}',
        '{"code": "X", "severity": "error", "title": "t", "evidence": []}',
        '{"code": "X", "severity": "error", "title": "t", "location": {}}',
    ],
)  # fmt: skip
def test_malformed_findings_are_left_out(tmp_path: Path, bad: str) -> None:
    """Wrong types never reach the caller; the lines around are read."""
    line = GOOD.to_json()
    (tmp_path / "findings.jsonl").write_text(f"{line}\n{bad}\n{line}\n", encoding="utf-8")
    assert run_files.read_findings(tmp_path) == [GOOD, GOOD]


def test_an_endless_line_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory stays bounded whatever the file holds."""
    monkeypatch.setattr(run_files, "_MAX_LINE", 1000)
    (tmp_path / "findings.jsonl").write_text(f"{'x' * 5000}\n{GOOD.to_json()}\n")
    assert run_files.read_findings(tmp_path) == [GOOD]


def test_a_row_that_is_cut_off_is_left_out(tmp_path: Path) -> None:
    """The complete ones before it are read, and a file killed in its header is empty."""
    rows = [Row(rank=i, step=4) for i in range(2)]
    data = run_files.steps_header(0) + b"".join(map(encode, rows))
    (tmp_path / "steps.bin").write_bytes(data + data[:50])
    (tmp_path / "steps.00001.bin").write_bytes(data[:7])
    assert [row.rank for row in run_files.read_rows(tmp_path)] == [0, 1]


def test_rows_of_another_layout_are_refused(tmp_path: Path) -> None:
    """The message names both layouts and the way out."""
    header = bytearray(run_files.steps_header(0))
    header[8] ^= 1
    (tmp_path / "steps.bin").write_bytes(bytes(header))
    with pytest.raises(ValueError, match=r"has row layout \d+, this ddpdebug reads \d+; use the version named in run"):
        list(run_files.read_rows(tmp_path))
    (tmp_path / "steps.bin").write_bytes(b"x" * 100)
    with pytest.raises(ValueError, match="holds no rows of ddpdebug"):
        list(run_files.read_rows(tmp_path))


def test_outcomes_of_other_runs_and_odd_folders_are_left_out(tmp_path: Path) -> None:
    """A rank counts when its folder is a number and the outcome is of this run."""
    run_json(tmp_path)
    for name, content in {
        "0": {"run": "r1", "reason": "finished"},
        "1": {"run": "r0", "reason": "finished"},
        "2": {"run": "r1"},
        "²": {"run": "r1", "reason": "finished"},
        "x": {"run": "r1", "reason": "finished"},
    }.items():
        (tmp_path / "ranks" / name).mkdir(parents=True)
        (tmp_path / "ranks" / name / "outcome.json").write_text(json.dumps(content))
    (tmp_path / "ranks" / "3").mkdir()
    assert run_files.read_outcomes(tmp_path) == {0: {"run": "r1", "reason": "finished"}}


def _own(directory: Path, name: str, *findings: Finding) -> None:
    (directory / "ranks" / name).mkdir(parents=True)
    (directory / "ranks" / name / "findings.jsonl").write_text("".join(f"{one.to_json()}\n" for one in findings))


def test_findings_of_other_ranks_are_merged_by_id(tmp_path: Path) -> None:
    """The newest line of each; what rank 0 has counts, unless another rank knows that it is over."""
    run_json(tmp_path)
    first, second = (replace(GOOD, code="HANG501", run="r1", id=f"HANG501-{number}") for number in ("0.1", "1.1"))
    over = replace(first, evidence={"ended_after_seconds": 8.0})
    (tmp_path / "findings.jsonl").write_text(f"{first.to_json()}\n")
    _own(tmp_path, "1", second, replace(second, count=2), over)
    _own(tmp_path, "2", replace(first, title="other words"))
    _own(tmp_path, "²", replace(first, id="HANG501-9.9"))
    _own(tmp_path, "x", replace(first, id="HANG501-9.8"))
    _own(tmp_path, "3", replace(first, id="HANG501-3.1", run="r0"))
    assert run_files.read_findings(tmp_path) == [over, replace(second, count=2)]


def test_a_rank_that_has_left_is_told_once(tmp_path: Path) -> None:
    """Whoever says so after the ranks have lost each other."""
    run_json(tmp_path)
    left = [replace(GOOD, code="HANG503", run="r1", ranks=(0,), id=f"HANG503-{rank}.1") for rank in (1, 3)]
    other = replace(left[1], id="HANG503-3.2", ranks=(2,))
    _own(tmp_path, "1", left[0], replace(left[0], count=2))
    _own(tmp_path, "3", left[1], other)
    assert run_files.read_findings(tmp_path) == [replace(left[0], count=2), other]


def test_findings_of_other_ranks_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In number and size, and a run whose name is no text has none."""
    run_json(tmp_path)
    for rank in range(4):
        _own(tmp_path, str(rank), replace(GOOD, run="r1", id=f"HANG501-{rank}.1"))
    monkeypatch.setattr(run_files, "_MAX_OWN", 2)
    assert [one.id for one in run_files.read_findings(tmp_path)] == ["HANG501-0.1", "HANG501-1.1"]
    monkeypatch.setattr(run_files, "_MAX_OWN_BYTES", 10)
    assert run_files.read_findings(tmp_path) == []
    run_json(tmp_path, run=[])
    monkeypatch.undo()
    assert run_files.read_findings(tmp_path) == []


def test_malformed_observations_are_left_out(tmp_path: Path) -> None:
    """Only lines with a place, a kind and a payload count."""
    good = '{"rows": 4, "kind": "detail", "payload": {"rank": 1}}'
    (tmp_path / "observations.jsonl").write_text(f'{good}\n{{"rows": "4"}}\n[]\n{good[:-4]}\n')
    assert [(o.rows, o.kind, o.payload) for o in run_files.read_observations(tmp_path)] == [(4, "detail", {"rank": 1})]


def test_reading_needs_no_torch() -> None:
    """A report is made where torch is not installed."""
    modules = "ddpdebug.run_directory.reader, ddpdebug.sinks.terminal"
    code = f"import sys, {modules}; sys.exit(bool({{'torch', 'rich'}} & {{*sys.modules}}))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
