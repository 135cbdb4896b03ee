"""The run directory as it is written; `test_reader` reads broken ones."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from run_records import ENDED, FINDING, judged, started

from ddpdebug.run_directory import reader as run_files
from ddpdebug.run_directory.writer import RunDirectory
from ddpdebug.schema.row import LAYOUT_VERSION, ROW_BYTES
from ddpdebug.schema.run_state import WaitState
from ddpdebug.sinks import FindingIgnored, FindingRaised, Saved, Trouble, Waiting


@pytest.fixture(autouse=True)
def closing(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Close every sink of a test, as the fan-out does at the end of a run."""
    made: list[RunDirectory] = []
    create = RunDirectory.__init__

    def remember(self: RunDirectory, *args: Any, **options: Any) -> None:
        create(self, *args, **options)
        made.append(self)

    monkeypatch.setattr(RunDirectory, "__init__", remember)
    yield
    for sink in made:
        sink.close()


def test_a_whole_run_can_be_read_back(tmp_path: Path) -> None:
    """What ran, the findings, the steps, the details and how each rank ended."""
    for rank in (1, 0):
        sink = RunDirectory(tmp_path, rank)
        sink.write(started(tmp_path, rank))
        sink.write(judged(0))
        sink.write(Saved(kind="fact", payload={"rank": 1, "topic": "structure:0", "value": float("nan")}))
        sink.write(judged(1))
        sink.write(FindingRaised(finding=FINDING))
        sink.write(ENDED)
    run = run_files.read_run(tmp_path)
    assert (run["run"], run["world"], run["command"]) == ("r1", 2, ["train.py", "--lr", "1e-3"])
    assert run["layout"]["version"] == LAYOUT_VERSION
    assert run["outcome"]["findings"] == {"critical": 1}
    assert run_files.read_findings(tmp_path) == [FINDING]
    steps = list(run_files.read_steps(tmp_path))
    assert repr(steps) == repr([judged(0).step, judged(1).step])  # NaN is not equal to itself
    (observed,) = run_files.read_observations(tmp_path)
    assert (observed.rows, observed.kind, observed.payload["value"]) == (2, "fact", "nan")
    outcomes = run_files.read_outcomes(tmp_path)
    assert list(outcomes) == [0, 1]
    assert outcomes[1]["steps"] == {"0": 3}


def test_what_is_ignored_has_a_file_of_its_own(tmp_path: Path) -> None:
    """With the newest count, and until it is about more than was meant; an entry without use is counted too."""
    sink, entries = RunDirectory(tmp_path, 0), ["RANK101 # known", "RCP805"]
    sink.write(replace(started(tmp_path), config={"ignore": entries}))
    silent = replace(FINDING, ignored=entries[0])
    sink.write(FindingIgnored(silent))
    sink.write(FindingIgnored(replace(silent, id="RANK101-2")))
    assert run_files.read_findings(tmp_path) == []
    assert run_files.read_ignored(tmp_path) == {entries[0]: 2, "RCP805": 0}
    sink.write(FindingIgnored(replace(silent, count=7)))
    sink.write(FindingRaised(finding=replace(FINDING, id="RANK101-2")))
    sink.write(ENDED)
    assert run_files.read_ignored(tmp_path) == {entries[0]: 1, "RCP805": 0}
    assert json.loads((tmp_path / "ignored.jsonl").read_text())["count"] == 7
    assert [finding.id for finding in run_files.read_findings(tmp_path)] == ["RANK101-2"]
    (tmp_path / "ignored.jsonl").write_text('{"code": 1}\nno JSON\n')
    assert run_files.read_ignored(tmp_path) == dict.fromkeys(entries, 0)


def test_other_ranks_write_only_their_own_folder(tmp_path: Path) -> None:
    """Rank 0 owns the shared files."""
    sink = RunDirectory(tmp_path, 1)
    for record in (started(tmp_path, 1), judged(0), FindingRaised(finding=FINDING), Saved(kind="fact"), ENDED):
        sink.write(record)
    assert sorted(p.relative_to(tmp_path).as_posix() for p in tmp_path.rglob("*") if p.is_file()) == [
        "ranks/1/outcome.json",
        "ranks/1/place.json",
    ]


def test_everything_is_on_disk_as_soon_as_it_is_known(tmp_path: Path) -> None:
    """A run that is killed at any point leaves a readable directory."""
    sink = RunDirectory(tmp_path, 0)
    sink.write(started(tmp_path))
    assert run_files.read_run(tmp_path)["outcome"] is None
    assert run_files.read_findings(tmp_path) == []
    sink.write(judged(0))
    assert len(list(run_files.read_rows(tmp_path))) == 2
    sink.write(FindingRaised(finding=FINDING))
    assert run_files.read_findings(tmp_path) == [FINDING]
    sink.write(Trouble(part="probe:loss", message="broken"))
    line = (tmp_path / "ranks/0/trouble.jsonl").read_text()
    assert json.loads(line) == {"part": "probe:loss", "message": "broken"}
    assert run_files.read_outcomes(tmp_path) == {}


def test_the_end_brings_the_final_counts_and_all_evidence(tmp_path: Path) -> None:
    """A finding seen again is one line, by its id: what came last holds all that is known."""
    sink = RunDirectory(tmp_path, 0)
    sink.write(started(tmp_path))
    sink.write(FindingRaised(finding=FINDING))
    located = replace(FINDING, evidence={**FINDING.evidence, "index": [4, 17]})
    sink.write(FindingRaised(finding=located, new=False))
    sink.write(FindingRaised(finding=located.seen_again(60), new=False))
    sink.write(FindingRaised(finding=replace(FINDING, subject=("other",), id="RANK101-2")))
    assert [f.count for f in run_files.read_findings(tmp_path)] == [1, 1]
    sink.write(ENDED)
    first, second = run_files.read_findings(tmp_path)
    assert (first.count, first.last_step, first.time) == (2, 60, FINDING.time)
    assert first.evidence == {"differing": 3, "index": [4, 17]}
    assert second.subject == ("other",)


def test_a_hang_that_is_over_is_on_disk_at_once(tmp_path: Path) -> None:
    """Who reads along would end the job for it; its line stands once."""
    hang = replace(FINDING, code="HANG501", id="HANG501-1", evidence={"hang": "0:1"})
    sink = RunDirectory(tmp_path, 0)
    for record in (started(tmp_path, 0), FindingRaised(finding=FINDING), FindingRaised(finding=hang)):
        sink.write(record)
    over = replace(hang, evidence={**hang.evidence, "ended_after_seconds": 8.5})
    sink.write(FindingRaised(finding=over, new=False))
    assert run_files.read_findings(tmp_path) == [FINDING, over]


def test_a_value_that_json_lacks_costs_nothing_but_itself(tmp_path: Path) -> None:
    """The finding is written with the value's text, and so is what comes after it."""
    sink = RunDirectory(tmp_path, 0)
    sink.write(started(tmp_path))
    sink.write(FindingRaised(finding=replace(FINDING, evidence={"file": Path("a/b"), "norm": float("nan"), "n": 3})))
    sink.write(FindingRaised(finding=replace(FINDING, id="RANK101-2")))
    first, second = run_files.read_findings(tmp_path)
    assert first.evidence == {"file": "a/b", "norm": "nan", "n": 3}
    assert second.evidence == FINDING.evidence


def test_an_earlier_run_in_the_directory_is_set_aside(tmp_path: Path) -> None:
    """An elastic restart does not mix with what was there."""
    for run_id in ("r1", "r2", "r3"):
        sink = RunDirectory(tmp_path, 0)
        sink.write(started(tmp_path, run_id=run_id))
        sink.write(judged(0))
    assert run_files.read_run(tmp_path)["run"] == "r3"
    assert len(list(run_files.read_rows(tmp_path))) == 2
    assert run_files.read_run(tmp_path / "previous-1")["run"] == "r1"
    assert len(list(run_files.read_rows(tmp_path / "previous-2"))) == 2


def test_the_directory_stays_bounded(tmp_path: Path) -> None:
    """The first and the newest steps are kept, and their numbers say where the gap is."""
    sink = RunDirectory(tmp_path, 0, cap_bytes=100 * ROW_BYTES)
    sink.write(started(tmp_path))
    for step in range(500):
        sink.write(judged(step))
    assert sum(path.stat().st_size for path in tmp_path.glob("steps*.bin")) <= 100 * ROW_BYTES
    steps = [step.step for step in run_files.read_steps(tmp_path)]
    numbers = [number for number, _ in run_files.numbered_rows(tmp_path)]
    assert steps[0] == 0
    assert steps[-1] == 499
    assert len(steps) > 30
    assert [number // 2 for number in numbers[::2]] == steps


def test_texts_that_are_no_unicode_are_written(tmp_path: Path) -> None:
    """A path with undecodable bytes in it does not stop the sink."""
    sink = RunDirectory(tmp_path, 0)
    sink.write(replace(started(tmp_path), command=("\udcff.py",)))
    sink.write(FindingRaised(finding=replace(FINDING, location="\udcff.py:3")))
    assert run_files.read_findings(tmp_path)[0].location == "\udcff.py:3"
    assert run_files.read_run(tmp_path)["command"] == ["\udcff.py"]


def test_a_read_only_place_is_an_error_of_the_system() -> None:
    """The fan-out switches the sink off then; nobody, root included, makes a directory there."""
    place = Path("/proc/self/run")
    with pytest.raises(OSError, match="run"):
        RunDirectory(place, 0).write(started(place))


def test_a_file_in_the_way_is_an_error_of_the_system(tmp_path: Path) -> None:
    """The same where the directory cannot be made."""
    (tmp_path / "run").write_text("")
    with pytest.raises(OSError, match="directory"):
        RunDirectory(tmp_path / "run", 0).write(started(tmp_path))


def test_whom_ranks_wait_for_stands_in_the_run_while_they_do(tmp_path: Path) -> None:
    """Written when it changes only, and null again when it is over, or the run."""
    sink = RunDirectory(tmp_path, 0)
    sink.write(started(tmp_path))
    assert run_files.read_run(tmp_path)["waiting"] is None
    waiting = Waiting(state=WaitState.STUCK, ranks=(1,), location="train.py:33", seconds={0: 9.0})
    sink.write(waiting)
    expected = {"state": "stuck", "ranks": [1], "location": "train.py:33"}
    assert run_files.read_run(tmp_path)["waiting"] == expected
    before = (tmp_path / "run.json").stat()
    sink.write(replace(waiting, seconds={0: 11.0}))
    assert (tmp_path / "run.json").stat().st_ino == before.st_ino
    sink.write(Waiting())
    assert run_files.read_run(tmp_path)["waiting"] is None
    sink.write(waiting)
    sink.write(ENDED)
    assert run_files.read_run(tmp_path)["waiting"] is None
