"""Run directories and bundles that were cut off, changed, or made to do harm: one line each, at once, never `clean`."""

from __future__ import annotations

import json
import os
import random
import shutil
import struct
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st
from run_records import ENDED, FINDING, judged, started
from torch import nn

from ddpdebug.commands import main
from ddpdebug.config.settings import Config
from ddpdebug.errors import UsageError
from ddpdebug.forensics.replay.bundle import JSON_FILE, TENSOR_FILE, write_bundle
from ddpdebug.forensics.replay.bundle_reading import read_bundle
from ddpdebug.isolation.guard import Guard
from ddpdebug.probes.forward_capture import ForwardCaptures
from ddpdebug.run_directory.writer import RunDirectory
from ddpdebug.schema.finding import Severity
from ddpdebug.sinks import FindingRaised, Saved

_QUIET = replace(FINDING, severity=Severity.INFO)


def make(folder: Path, findings: int = 3) -> Path:
    """Write a run of two ranks that is clean: its findings count for nothing."""
    for rank in (1, 0):
        sink = RunDirectory(folder, rank)
        sink.write(started(folder, rank))
        for step in range(5):
            sink.write(judged(step))
        sink.write(
            Saved(kind="fact", payload={"rank": 1, "topic": "end", "value": {"reason": "finished", "steps": {}}})
        )
        for step in range(findings):
            sink.write(FindingRaised(finding=replace(_QUIET, step=step, id=f"RANK101-{step}")))
        sink.write(ENDED)
        sink.close()
    return folder


def cut(text: bytes) -> bytes:
    """Take the end away."""
    return text[:-20]


def garble(text: bytes) -> bytes:
    """Spoil the second line."""
    first, _, rest = text.split(b"\n", 2)
    return b"\n".join([first, b'{"code": 7', rest])


def drop(text: bytes) -> bytes:
    """Take a whole line away."""
    return text.split(b"\n", 1)[1]


def empty(text: bytes) -> bytes:
    """Take everything away."""
    return text[:0]


@pytest.mark.parametrize(
    ("change", "word"), [(cut, "cut off"), (garble, "line 2"), (drop, "had 3 findings"), (empty, "had 3 findings")]
)
def test_findings_that_cannot_be_read_are_not_clean(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], change: Callable[[bytes], bytes], word: str
) -> None:
    """The verdict is `damaged` with an exit code of its own kind; report and top say so."""
    run = make(tmp_path / "run")
    assert main(["verdict", str(run)]) == 0
    assert "damaged" not in capfd.readouterr().out
    file = run / "findings.jsonl"
    file.write_bytes(change(file.read_bytes()))
    assert main(["verdict", str(run), "--json", str(tmp_path / "v.json")]) == 4
    told = capfd.readouterr().out
    assert "verdict: damaged" in told
    assert word in told
    assert json.loads((tmp_path / "v.json").read_text())["verdict"] == "damaged"
    assert main(["report", str(run)]) == 0
    page = (run / "report.html").read_text()
    assert "damaged" in page
    assert "nothing wrong was seen" not in page
    capfd.readouterr()
    assert main(["top", "--once", str(run)]) == 0
    assert "damaged: " in capfd.readouterr().out


def test_what_can_be_read_of_damaged_findings_counts(tmp_path: Path) -> None:
    """A finding at the threshold fails the check, whatever else is missing."""
    run = make(tmp_path / "run")
    file = run / "findings.jsonl"
    file.write_bytes(replace(FINDING, step=9).to_json().encode() + b"\n" + cut(file.read_bytes()))
    assert main(["verdict", str(run)]) == 1


def test_a_missing_file_of_findings_is_damage(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A run without findings has an empty one."""
    run = make(tmp_path / "run", findings=0)
    assert main(["verdict", str(run)]) == 0
    (run / "findings.jsonl").unlink()
    assert main(["verdict", str(run)]) == 4
    assert "findings.jsonl cannot be read" in capfd.readouterr().out


def test_a_run_json_that_cannot_be_read_is_not_clean(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Even where the starter of the ranks saw nothing wrong."""
    run = make(tmp_path / "run")
    record = {"run": "r1", "world": 2, "timed_out": False, "statuses": {"0": 0, "1": 0}, "places": {}}
    (run / "check.json").write_text(json.dumps(record))
    assert main(["verdict", str(run)]) == 0
    (run / "run.json").write_bytes(cut((run / "run.json").read_bytes()))
    assert main(["verdict", str(run)]) == 4
    assert "run.json cannot be read" in capfd.readouterr().out


@pytest.mark.parametrize("world", [10**12, 10**300, -1, 0, "two", 2.5, True, [2]])
@pytest.mark.parametrize("words", [["verdict"], ["report"], ["top", "--once"]])
def test_a_world_that_cannot_be_is_an_error_at_once(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], words: list[str], world: object
) -> None:
    """Nothing counts up to it."""
    run = make(tmp_path / "run")
    record = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps({**record, "world": world}))
    assert main([*words, str(run)]) == 2
    told = capfd.readouterr().err
    assert "run.json' is damaged: its world is" in told
    assert len(told.splitlines()) == 1


def test_many_findings_are_judged_one_by_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Findings are not compared with each other: the work grows with their number, not with its square."""
    run = make(tmp_path / "run", findings=0)
    lines = [replace(FINDING, step=step, severity=Severity.ERROR).to_json() for step in range(2000)]
    (run / "findings.jsonl").write_text("\n".join(lines) + "\n")

    def compared(self: object, other: object) -> bool:
        raise AssertionError("two findings were compared")

    monkeypatch.setattr("ddpdebug.schema.finding.Finding.__eq__", compared)
    assert main(["verdict", str(run)]) == 1
    assert main(["report", str(run)]) == 0
    assert main(["top", "--once", str(run)]) == 0


# --- anything -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run directory to damage copies of."""
    return make(tmp_path_factory.mktemp("healthy") / "run")


_LITERALS = [b"null", b"-1", b"1e999", b"[]", b"{}", b'"\\ud800"', b"true", b"9" * 400, b"[" * 3000, b"\x00", b"\xff"]


def mutated(data: bytes, seed: int) -> bytes:
    """Change a file in one to four places: cut, flip, repeat, or put a value where another was."""
    draw = random.Random(seed)
    for _ in range(draw.randint(1, 4)):
        at = draw.randrange(len(data) + 1)
        to = min(len(data), at + draw.choice((1, 2, 8, 60)))
        how = draw.randrange(6)
        if how == 0:
            data = data[:at]
        elif how == 1:
            data = data[:at] + bytes(draw.randrange(256) for _ in range(to - at)) + data[to:]
        elif how == 2:
            data = data[:to] + data[at:to] + data[to:]
        elif how == 3:
            data = data[:at] + data[to:]
        else:  # a value of JSON
            start = data.rfind(b": ", 0, at) + 2
            ends = [found for found in (data.find(end, start) for end in (b", ", b"}", b"\n")) if found > 0]
            data = data[:start] + draw.choice(_LITERALS) + data[min(ends, default=start) :]
    return data


_FUZZ = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.mark.smoke
@_FUZZ
@given(seed=st.integers(0, 1 << 32), files=st.sets(st.integers(0, 7), min_size=1, max_size=3))
def test_a_damaged_run_directory_is_no_traceback(
    healthy: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], seed: int, files: set[int]
) -> None:
    """Each reader ends with one of its exit codes."""
    run = tmp_path / "run"
    shutil.rmtree(run, ignore_errors=True)
    shutil.copytree(healthy, run)
    paths = sorted(path for path in run.rglob("*") if path.is_file())
    for number in files:
        path = paths[number % len(paths)]
        path.write_bytes(mutated(path.read_bytes(), seed))
    for words, codes in ((["verdict"], range(5)), (["report"], (0, 2)), (["top", "--once"], (0, 2))):
        code = main([*words, str(run)])
        assert code in codes
        assert "Traceback" not in capfd.readouterr().err


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle to damage copies of."""
    model, captures = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)), ForwardCaptures(Guard(lambda *_: None))
    captures.begin(model, (torch.randn(2, 3), {"scale": 2.0, "kind": "x"}), {}, 0)
    return write_bundle(tmp_path_factory.mktemp("bundles"), "b", captures.current[0], {"code": "NUM301", "step": 1})


@_FUZZ
@given(seed=st.integers(0, 1 << 32), name=st.sampled_from([JSON_FILE, TENSOR_FILE]))
def test_a_damaged_bundle_is_a_usage_error(bundle: Path, tmp_path: Path, seed: int, name: str) -> None:
    """Or can be read, where the damage is in a number."""
    copy = tmp_path / "bundle"
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(bundle, copy)
    (copy / name).write_bytes(mutated((copy / name).read_bytes(), seed))
    with suppress(UsageError):
        read_bundle(copy)


def test_tensors_larger_than_the_memory_are_not_read(bundle: Path, tmp_path: Path) -> None:
    """A sparse file of 2 TiB takes no disk, and would take all memory."""
    copy = tmp_path / "bundle"
    shutil.copytree(bundle, copy)
    size = 1 << 41
    head = json.dumps({"x": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}).encode()
    (copy / TENSOR_FILE).write_bytes(struct.pack("<Q", len(head)) + head)
    os.truncate(copy / TENSOR_FILE, 8 + len(head) + size)
    with pytest.raises(UsageError, match="bytes of memory to read them"):
        read_bundle(copy)


@pytest.mark.parametrize("text", ["tool = 5", "tool = [1]", "tool = 'x'"])
def test_a_tool_that_is_no_table(tmp_path: Path, text: str) -> None:
    """In pyproject.toml."""
    (tmp_path / "pyproject.toml").write_text(text)
    with pytest.raises(UsageError, match=r"\[tool\] of .* is not a table"):
        Config.load({}, {}, tmp_path)


@pytest.mark.parametrize("name", ["out", "junit", "json", "sd_dir"])
def test_a_path_with_a_nul_byte(tmp_path: Path, name: str) -> None:
    """The system takes none."""
    with pytest.raises(UsageError, match="is not valid"):
        Config.load({name: "a\0b"}, {}, tmp_path)
