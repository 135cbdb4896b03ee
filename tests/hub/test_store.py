"""The store: what it shows follows from the mirrored files, in whatever pieces and however often these come."""

from __future__ import annotations

import itertools
import json
import os
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st
from sqlalchemy import func, select, text
from sqlalchemy.exc import OperationalError, SQLAlchemyError

from ddpdebug.commands import main
from ddpdebug.errors import UsageError
from ddpdebug.hub import schema
from ddpdebug.hub.derived import BUCKETS
from ddpdebug.hub.store import NotWantedError, Store
from ddpdebug.run_directory.mirror import Held, Mirror, Piece, digest_of, is_document
from ddpdebug.run_directory.reader import read_findings, read_rows
from ddpdebug.schema.finding import Finding, Severity
from ddpdebug.schema.hangs import ENDED
from tests.hub.runs import HUNG, MadeUp, bring, finding


class Clock:
    """A clock that stands until it is set."""

    def __init__(self, now: float = 1_800_000_000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def store(tmp_path: Path, clock: Clock) -> Store:
    return Store(tmp_path / "hub.sqlite", clock, steady=clock)


def wait(store: Store, clock: Clock, seconds: float) -> list[str]:
    """Let time pass as it does in a hub, which looks every few seconds; return whose state has changed."""
    found: list[str] = []
    for _ in range(int(seconds)):
        clock.now += 1
        found += store.look_again()
    return found


def mirrored(directory: Path) -> dict[str, bytes]:
    """Return the files of a run directory that a hub has."""
    paths = {str(path.relative_to(directory)): path for path in directory.rglob("*") if path.is_file()}
    return {name: path.read_bytes() for name, path in paths.items() if is_document(name) is not None}


def held(store: Store, key: str) -> dict[str, bytes]:
    """Return what a store has of a run."""
    run = store.run(key)
    assert run is not None
    return {path: store.content(key, path) or b"" for path in run["files"] if path != "bundles.json"}


def shown(store: Store, key: str) -> dict[str, Any]:
    """Return what is shown of a run, without what depends on when it was heard of."""
    run = store.run(key)
    assert run is not None
    times = ("first_seen", "last_seen", "changed", "last_step_at", "source")
    return {name: value for name, value in run.items() if name not in times}


def same(store: Store, run: MadeUp, directory: Path) -> None:
    """Assert that the store shows what the run directory has."""
    found = store.run(run.key)
    assert found is not None
    assert held(store, run.key) == mirrored(directory)
    assert found["findings"] == [json.loads(each.to_json()) for each in read_findings(directory)]
    rows = list(read_rows(directory))
    for rank in range(run.world):
        mine = [row for row in rows if row.rank == rank]
        buckets = [each for each in found["steps"] if each["rank"] == rank]
        assert sum(each["steps"] for each in buckets) == len(mine)
        assert sum(each["loss_sum"] for each in buckets) == pytest.approx(sum(row.loss for row in mine))
        assert buckets[-1]["last_step"] == max(row.step for row in mine)
    assert found["last_step"] == max(row.step for row in rows)


def test_import(tmp_path: Path, store: Store) -> None:
    """An imported run is in the store as it is in its directory, and its state follows from that."""
    run = MadeUp(findings=[finding(), finding("NUM301", severity=Severity.WARNING)])
    directory = run.write(tmp_path / "run")
    bring(store, directory)
    same(store, run, directory)
    found = store.run(run.key)
    assert found is not None
    assert (found["state"], found["outcome"], found["exit_code"]) == ("finished", "findings", 0)
    assert (found["severity"], found["newest_finding"], found["world"]) == ("critical", "NUM301", 2)
    # with two ranks nobody can tell which one left the other
    assert {each["rank"]: each["differing"] for each in found["steps"] if each["first_step"] == 30} == {0: 1, 1: 1}
    assert sum(each["differing"] for each in found["steps"] if each["first_step"] < 30) == 0
    assert [each["last_step"] for each in found["ranks"]] == [39, 39]
    assert found["rate"] == pytest.approx(5.0)


_RUN = MadeUp(findings=[finding(), finding("NUM301")], steps=7)
_CUTS = st.lists(st.integers(0, 9000), max_size=6)


@pytest.mark.slow
@settings(max_examples=20)
@given(cuts=_CUTS, again=st.lists(st.integers(0, 30), max_size=5), restart=st.booleans())
def test_pieces_in_any_way(
    tmp_path_factory: pytest.TempPathFactory, cuts: list[int], again: list[int], restart: bool
) -> None:
    """However files are cut into pieces, and whichever of these come again later, what is shown is the same."""
    folder = tmp_path_factory.mktemp("store")
    directory = _RUN.write(folder / "run")
    whole, store = Store(folder / "whole.sqlite"), Store(folder / "hub.sqlite")
    bring(whole, directory)
    pieces = []
    for path, data in mirrored(directory).items():
        if is_document(path):
            pieces.append(Piece(path, 0, data, replace=True))
            continue
        edges = sorted({0, len(data), *(cut for cut in cuts if cut < len(data))})
        pieces += [Piece(path, a, data[a:b]) for a, b in itertools.pairwise(edges)] or [Piece(path)]
    for place in sorted(again):
        if place < len(pieces) and not pieces[place].replace:
            pieces.insert(min(len(pieces), place + 3), pieces[place])
    for piece in pieces:
        store.receive(_RUN.key, "push", [piece])
        if restart:
            store.close()
            store = Store(folder / "hub.sqlite")
    bring(store, directory)
    assert shown(store, _RUN.key) == shown(whole, _RUN.key)
    whole.close()
    store.close()


def test_gap_is_not_filled(store: Store) -> None:
    """What begins beyond what is there is not taken, and the answer says from where on to go on."""
    assert store.receive(_RUN.key, "push", [Piece("steps.bin", 5, b"later")]) == {}
    first = store.receive(_RUN.key, "push", [Piece("steps.bin", 0, b"01234")])
    assert first == {"steps.bin": Held(5, digest_of(b"01234"))}
    assert store.receive(_RUN.key, "push", [Piece("steps.bin", 9, b"later")]) == first
    both = store.receive(_RUN.key, "push", [Piece("steps.bin", 3, b"34567")])
    assert both == {"steps.bin": Held(8, digest_of(b"01234567"))}


def test_empty_files(store: Store) -> None:
    """A file that is empty at first grows like any other one."""
    assert store.receive(_RUN.key, "push", [Piece("findings.jsonl")]) == {"findings.jsonl": Held(0, digest_of(b""))}
    assert store.content(_RUN.key, "findings.jsonl") == b""
    store.receive(_RUN.key, "push", [Piece("findings.jsonl", 0, b"{}")])
    assert store.content(_RUN.key, "findings.jsonl") == b"{}"
    assert store.content(_RUN.key, "steps.bin") is None


def test_only_files_of_runs(store: Store) -> None:
    """A path that is no mirrored file of a run is not taken, whatever it looks like."""
    names = (
        "../run.json",
        "/etc/passwd",
        "ranks/../run.json",
        "ranks/01/place.json",
        "steps.bin\n",
        "bundles/x",
        "x" * 9,
    )
    assert store.receive(_RUN.key, "push", [Piece(name, 0, b"x") for name in names]) == {}
    for key in ("../x", "20261121T080000Z-", "20269921T080000Z-aa", "x' OR '1'='1", ""):
        with pytest.raises(NotWantedError):
            store.receive(key, "push", [])


def test_findings_rewritten(tmp_path: Path, store: Store, clock: Clock) -> None:
    """Findings that are written anew replace those that were there, and keep when they were first seen."""
    run = MadeUp(findings=[finding("HANG501"), finding("NUM301")], ended=None)
    directory = run.write(tmp_path / "run")
    mirror = Mirror(directory)
    mirror.bring(lambda pieces, all_files: store.receive(run.key, "push", pieces, all_files=all_files))
    before = {each["id"]: each["first_seen"] for each in store.findings()}
    assert store.run(run.key)["state"] == "hung"  # type: ignore[index]
    clock.now += 10
    over = finding("HANG501", evidence={ENDED: 4.0})
    new = directory / "new"
    new.write_text("".join(each.to_json() + "\n" for each in (over, finding("NUM302"))))
    new.replace(directory / "findings.jsonl")
    mirror.bring(lambda pieces, all_files: store.receive(run.key, "push", pieces, all_files=all_files))
    same(store, run, directory)
    after = {each["id"]: each["first_seen"] for each in store.findings()}
    assert after.keys() == {"HANG501-1", "NUM302-1"}
    assert after["HANG501-1"] == before["HANG501-1"]
    assert store.run(run.key)["state"] == "ill"  # type: ignore[index]


def test_segments_go(tmp_path: Path, store: Store) -> None:
    """A segment that the run has deleted goes from the hub too; what was concluded from it stays."""
    run = MadeUp(ended=None)
    directory = run.write(tmp_path / "run")
    (directory / "steps.00001.bin").write_bytes((directory / "steps.bin").read_bytes()[:24])
    mirror = Mirror(directory)
    send = lambda pieces, all_files: store.receive(run.key, "push", pieces, all_files=all_files)  # noqa: E731
    mirror.bring(send)
    assert store.content(run.key, "steps.00001.bin") is not None
    (directory / "steps.00001.bin").unlink()
    mirror.bring(send)
    assert store.content(run.key, "steps.00001.bin") is None
    same(store, run, directory)


def test_other_rows(tmp_path: Path, store: Store) -> None:
    """Where a file of rows is another one than it was, the summary is made anew."""
    run = MadeUp(ended=None)
    bring(store, run.write(tmp_path / "run"))
    other = MadeUp(ended=None, steps=9)
    directory = other.write(tmp_path / "other")
    bring(store, directory)
    same(store, other, directory)


def test_many_steps(tmp_path: Path, store: Store) -> None:
    """A run has so many buckets however long it is, and together they have all its steps."""
    run = MadeUp(steps=3 * BUCKETS + 5, world=1)
    directory = run.write(tmp_path / "run")
    mirror = Mirror(directory)
    while pieces := mirror.pieces(50_000):
        mirror.learn(store.receive(run.key, "push", pieces))
    same(store, run, directory)
    with store.read() as connection:
        assert connection.execute(select(func.count()).select_from(schema.summary)).scalar_one() <= BUCKETS


def test_rows_of_another_version(tmp_path: Path, store: Store) -> None:
    """Rows of another layout are summarised by the layout that their run names."""
    run = MadeUp(ended=None)
    directory = run.write(tmp_path / "run")
    row = struct.Struct("<qqqQdd")
    told = json.loads((directory / "run.json").read_text())
    fields = ["rank", "step", "optimizer", "flags", "loss", "step_seconds"]
    told["layout"] = {"version": 5, "format": row.format, "fields": fields}
    (directory / "run.json").write_text(json.dumps(told))
    rows = b"".join(row.pack(rank, step, 0, 0, 2.5, 0.1) for step in range(4) for rank in (0, 1))
    (directory / "steps.bin").write_bytes(struct.pack("<8sIIQ", b"ddpdebug", 5, row.size, 0) + rows + b"cut")
    bring(store, directory)
    found = store.run(run.key)
    assert found is not None
    assert sum(each["steps"] for each in found["steps"]) == 8
    assert found["last_step"] == 3


@pytest.mark.parametrize(
    "hostile",
    [
        {"world": 10**400, "name": "a\0b\ud800", "command": ["x\0"] * 1000, "layout": {"format": "<" + "Q" * 600}},
        {"world": -1, "layout": {"version": 1, "format": "<999999999Q", "fields": ["a"]}, "outcome": [], "waiting": 3},
        {"outcome": {"reason": 5, "exit_code": 10**30}, "waiting": {"state": "stuck", "ranks": [10**30, "x", None]}},
        {"layout": {"version": {}, "format": 3, "fields": [[]]}, "command": "rm", "node": {"a": 1}, "config": None},
    ],
)
def test_hostile_run(tmp_path: Path, store: Store, hostile: dict[str, Any]) -> None:
    """A run.json that no run writes is shown as far as it says anything, and breaks nothing."""
    run = MadeUp(ended=None)
    directory = run.write(tmp_path / "run")
    told = {**json.loads((directory / "run.json").read_text()), **hostile}
    (directory / "run.json").write_text(json.dumps(told))
    (directory / "findings.jsonl").write_text('{"code":"A"}\n[[[\n' + "[" * 100_000 + "\n" + finding().to_json() + "\n")
    (directory / "check.json").write_text("[" * 100_000)
    (directory / "steps.bin").write_bytes((directory / "steps.bin").read_bytes()[:24] + os.urandom(752 * 20))
    bring(store, directory)
    found = store.run(run.key)
    assert found is not None
    assert found["state"] in {"running", "ill", "hung"}
    assert [each["code"] for each in found["findings"]] == ["RANK104"]
    assert store.runs()[0]["key"] == run.key


_FIELDS = ["rank", "step", "optimizer", "flags", "loss", "step_seconds"]


@pytest.mark.parametrize(
    ("form", "row", "shown"),
    [
        ("<qqqddd", (0, 1, 0, 0.0, 1.0, 0.1), None),
        ("<dqqqdd", (0.5, 1, 0, 0, 1.0, 0.1), None),
        ("<qdqqdd", (0, 1.5, 0, 0, 1.0, 0.1), None),
        ("<qqqqdd", (0, 1, 0, 0, 1.0, 5e-324), 1),
        ("<qqqqdd", (0, 1, 0, 0, 1.0, 1.7e308), 1),
    ],
)
def test_rows_that_no_run_writes(
    tmp_path: Path, store: Store, form: str, row: tuple[float, ...], shown: int | None
) -> None:
    """Rows of any layout, with any number in them, are left out or shown, and leave no rate that is none."""
    run = MadeUp(ended=None)
    directory = run.write(tmp_path / "run")
    told = json.loads((directory / "run.json").read_text())
    told["layout"] = {"version": 5, "format": form, "fields": _FIELDS}
    (directory / "run.json").write_text(json.dumps(told))
    rows = struct.pack(form, *row) * 3
    (directory / "steps.bin").write_bytes(struct.pack("<8sIIQ", b"ddpdebug", 5, struct.calcsize(form), 0) + rows)
    bring(store, directory)
    found = store.runs()[0]
    assert (found["last_step"], found["rate"]) == (shown, None)


@pytest.mark.parametrize("depth", [70, 900])
def test_deep_finding(tmp_path: Path, store: Store, depth: int) -> None:
    """A finding that holds lists within lists beyond any sense is left out; the others of its run are shown."""
    directory = MadeUp(ended=None, findings=[finding()]).write(tmp_path / "run")
    deep = finding("NUM301").to_json().replace('"evidence": {', '"evidence": {"x": ' + "[" * depth + "]" * depth + ", ")
    with (directory / "findings.jsonl").open("a") as file:
        file.write(deep + "\n")
    bring(store, directory)
    assert [each["finding"]["code"] for each in store.findings()] == ["RANK104"]
    assert store.runs()[0]["newest_finding"] == "RANK104"


@pytest.mark.parametrize("depth", [70, 900])
def test_deep_run(tmp_path: Path, store: Store, depth: int) -> None:
    """A run.json nested beyond any sense is refused in words."""
    directory = MadeUp(ended=None).write(tmp_path / "run")
    told = (directory / "run.json").read_text().rstrip()
    (directory / "run.json").write_text(told[:-1] + ', "deep": ' + "[" * depth + "]" * depth + "}")
    with pytest.raises(NotWantedError, match="nested too deep"):
        bring(store, directory)
    assert held(store, MadeUp().key) == {}


def test_links_are_not_followed(tmp_path: Path, store: Store) -> None:
    """Who lays links into a run directory does not see other files of whoever runs the hub."""
    secret = tmp_path / "secret"
    secret.mkdir()
    (secret / "place.json").write_text('{"secret": 1}')
    run = MadeUp(ended=None)
    directory = run.write(tmp_path / "run")
    (directory / "check.json").symlink_to(secret / "place.json")
    (directory / "ranks" / "7").symlink_to(secret)
    os.mkfifo(directory / "ends.json")
    bring(store, directory)
    found = store.run(run.key)
    assert found is not None
    assert not {"check.json", "ranks/7/place.json", "ends.json"} & found["files"].keys()


def test_another_run_in_the_directory(tmp_path: Path, store: Store) -> None:
    """A run that begins in the directory of another one is not taken for it."""
    directory = MadeUp(ended=None).write(tmp_path / "run")
    mirror = Mirror(directory)
    MadeUp(run="bbbbbb").write(directory)
    with pytest.raises(ValueError, match="another run"):
        mirror.pieces()


@pytest.mark.parametrize(
    ("run", "state"),
    [
        (MadeUp(ended=None), "running"),
        (MadeUp(ended=None, findings=[finding(severity=Severity.WARNING)]), "running"),
        (MadeUp(ended=None, findings=[finding()]), "ill"),
        (MadeUp(ended=None, findings=[finding()], waits=HUNG), "hung"),
        (MadeUp(ended=None, findings=[finding("HANG502")]), "hung"),
        (MadeUp(), "finished"),
        (MadeUp(ended="interrupted"), "cancelled"),
        (MadeUp(ended="exception: ValueError: no"), "failed"),
        (MadeUp(ended="hang: HANG501 a rank waits", findings=[finding("HANG501")]), "failed"),
    ],
)
def test_states(tmp_path: Path, store: Store, run: MadeUp, state: str) -> None:
    """The state of a run follows from what it has written."""
    bring(store, run.write(tmp_path / "run"), "push")
    assert store.runs()[0]["state"] == state


@pytest.mark.parametrize(("source", "patience"), [("push", 30), ("watch", 180)])
def test_lost_and_heard_again(tmp_path: Path, store: Store, clock: Clock, source: str, patience: float) -> None:
    """A run of which nobody hears is lost, and is back once it is heard of."""
    run = MadeUp(ended=None)
    bring(store, run.write(tmp_path / "run"), source)
    assert wait(store, clock, patience) == []
    assert wait(store, clock, 1) == [run.key]
    assert store.runs()[0]["state"] == "lost"
    store.receive(run.key, source, [])
    assert store.runs()[0]["state"] == "running"


def test_restart_of_the_hub(tmp_path: Path, clock: Clock) -> None:
    """Runs are not lost because the hub itself was away."""
    run = MadeUp(ended=None)
    store = Store(tmp_path / "hub.sqlite", clock)
    bring(store, run.write(tmp_path / "run"), "push")
    store.close()
    clock.now += 3600
    store = Store(tmp_path / "hub.sqlite", clock)
    assert store.look_again() == []
    assert wait(store, clock, 31) == [run.key]


@pytest.mark.parametrize("why", ["stood still", "database away"])
def test_hub_that_did_not_hear(
    tmp_path: Path, store: Store, clock: Clock, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    """Runs are not lost because the hub stood still itself, or could not store what it was told."""
    run = MadeUp(ended=None)
    bring(store, run.write(tmp_path / "run"), "push")
    if why == "stood still":
        clock.now += 3600
        assert store.look_again() == []
    else:

        def fail(*_: object) -> None:
            raise SQLAlchemyError

        with monkeypatch.context() as patched:
            patched.setattr(store, "write", fail)
            with pytest.raises(SQLAlchemyError):
                wait(store, clock, 31)
    assert wait(store, clock, 30) == []
    assert wait(store, clock, 1) == [run.key]


def test_clock_set_back(tmp_path: Path, store: Store, clock: Clock) -> None:
    """A run that was heard of in the future, by a clock that was wrong, is lost when its time is over all the same."""
    run = MadeUp(ended=None)
    bring(store, run.write(tmp_path / "run"), "push")
    clock.now -= 7200
    store.look_again()
    assert wait(store, clock, 31) == [run.key]


def test_ends_of_other_ranks(tmp_path: Path, store: Store, clock: Clock) -> None:
    """Where rank 0 was killed and another rank has told how it failed, the run has failed and is not lost."""
    run = MadeUp(ended=None)
    directory = run.write(tmp_path / "run")
    (directory / "ranks" / "1").mkdir()
    told = {"run": run.run, "rank": 1, "reason": "exception: ValueError: no", "exit_code": 1, "steps": {}}
    (directory / "ranks" / "1" / "outcome.json").write_text(json.dumps(told))
    bring(store, directory, "push")
    assert store.runs()[0]["state"] == "running"
    wait(store, clock, 31)
    assert store.runs()[0]["state"] == "failed"


def test_old_runs_go(tmp_path: Path, store: Store, clock: Clock) -> None:
    """Runs that are over are deleted for their age or for lack of room, for good; those that go on stay."""
    for number in range(4):
        run = MadeUp(run=f"run{number}", ended=None if number == 0 else "finished", steps=9)
        bring(store, run.write(tmp_path / run.run), "push")
        clock.now += 100
    assert store.forget(keep=250, most=1e12) == [MadeUp(run="run1").key]
    size = store.runs()[0]["bytes"]
    assert store.forget(keep=1e9, most=2.5 * size) == [MadeUp(run="run2").key]
    assert {run["run_id"] for run in store.runs()} == {"run0", "run3"}
    assert store.content(MadeUp(run="run2").key, "steps.bin") is None
    with pytest.raises(NotWantedError):
        bring(store, tmp_path / "run2", "push")
    bring(store, tmp_path / "run2", "import")
    bring(store, tmp_path / "run2", "push")
    assert {run["run_id"] for run in store.runs()} == {"run0", "run2", "run3"}


def test_clock_that_is_wrong(tmp_path: Path, clock: Clock) -> None:
    """A clock that is set deletes nothing for its age; what a wrong one has deleted is taken again."""
    steady = Clock(0.0)
    store, run = Store(tmp_path / "hub.sqlite", clock, steady), MadeUp(findings=[finding()])
    bring(store, run.write(tmp_path / "run"), "push")
    clock.now += 40 * 86400
    assert store.forget(keep=30 * 86400, most=1e12) == []
    steady.now, clock.now = steady.now + 3601, clock.now + 3601
    assert store.forget(keep=30 * 86400, most=1e12) == [run.key]
    clock.now -= 40 * 86400
    bring(store, tmp_path / "run", "push")
    assert store.runs()[0]["key"] == run.key


def test_findings_after_the_clock_was_set_back(tmp_path: Path, store: Store, clock: Clock) -> None:
    """Who asks for later findings misses none that came while the clock was behind."""
    bring(store, MadeUp(findings=[finding()]).write(tmp_path / "a"))
    first = store.findings()[0]["first_seen"]
    clock.now -= 60
    bring(store, MadeUp(run="bbbbbb", findings=[finding("NUM301")]).write(tmp_path / "b"))
    assert [each["finding"]["code"] for each in store.findings(since=first - 5)] == ["RANK104", "NUM301"]


def test_file_shrinks(tmp_path: Path, store: Store, clock: Clock) -> None:
    """The room of what was deleted is given back."""
    bring(store, MadeUp(steps=2000).write(tmp_path / "run"))
    clock.now += 100
    store.forget(keep=50, most=1e12)
    with store.read() as connection:
        assert connection.execute(text("PRAGMA freelist_count")).scalar_one() == 0


def test_what_is_remembered(store: Store, clock: Clock) -> None:
    """What was sent, and what was deleted, is known for a month, and not for ever."""
    told = {"target": "t", "run": "r", "finding": "f", "next_at": clock.now}
    with store.write() as connection:
        connection.execute(schema.delivery.insert().values(**told))
        store.put(connection, schema.forgotten, [{"run": "r", "time": clock.now}])
    for days, left in ((29, 1), (2, 0)):
        clock.now += days * 86400
        store.forget(keep=86400, most=1e12)
        with store.read() as connection:
            for table in (schema.delivery, schema.forgotten):
                assert connection.execute(select(func.count()).select_from(table)).scalar_one() == left


def test_filters(tmp_path: Path, store: Store) -> None:
    """Runs are listed by state and code, also where the filter is SQL."""
    for run in (MadeUp(run="a"), MadeUp(run="b", ended=None, findings=[finding()])):
        bring(store, run.write(tmp_path / run.run), "push")
    assert [run["run_id"] for run in store.runs()] == ["b", "a"]
    assert [run["run_id"] for run in store.runs(state="ill,hung")] == ["b"]
    assert [run["run_id"] for run in store.runs(code="RANK104")] == ["b"]
    assert [run["run_id"] for run in store.runs(before=MadeUp(run="b").key)] == ["a"]
    assert store.runs(state="x' OR '1'='1") == store.runs(owner="' OR 1=1 --") == []


def test_databases_that_are_none(tmp_path: Path) -> None:
    """What cannot be opened, and what another version has made, is said in words."""
    (tmp_path / "text").write_text("no database, and longer than a header of one is: " + "x" * 200)
    with pytest.raises(UsageError, match="cannot open"):
        Store(tmp_path / "text")
    with pytest.raises(UsageError, match="SQLite or Postgres"):
        Store("mysql://localhost/x")
    for url in ("postgresql+psycopg://nobody:secret@127.0.0.1:9/x", "postgresql+psycopg://nobody:secret@here:port/x"):
        with pytest.raises(UsageError, match="cannot open 'postgresql") as told:
            Store(url)
        assert "secret" not in str(told.value)
    store = Store(tmp_path / "hub.sqlite")
    with store.write() as connection:
        connection.execute(schema.about.update().values(value="0"))
    store.close()
    with pytest.raises(UsageError, match="another version"):
        Store(tmp_path / "hub.sqlite")


def test_finding_without_an_id(tmp_path: Path, store: Store) -> None:
    """Findings that have no name are told apart by their place."""
    run = MadeUp(findings=[finding()], ended=None)
    directory = run.write(tmp_path / "run")
    nameless = Finding(code="NUM301", severity=Severity.ERROR, title="t")
    with (directory / "findings.jsonl").open("a") as file:
        file.write(nameless.to_json() + "\n" + nameless.to_json() + "\n")
    bring(store, directory)
    assert [each["id"] for each in store.findings()] == ["RANK104-1", "NUM301#1", "NUM301#2"]


def _send(store: Store, key: str) -> Any:
    return lambda pieces, all_files: store.receive(key, "push", pieces, all_files=all_files)


def test_another_database(tmp_path: Path, store: Store) -> None:
    """A hub whose database was replaced gets a run that goes on anew, also where nothing comes of it any more."""
    run = MadeUp(ended=None, findings=[finding()])
    directory = run.write(tmp_path / "run")
    mirror, other = Mirror(directory), Store(tmp_path / "other.sqlite")
    mirror.bring(_send(store, run.key))
    mirror.greet(_send(store, run.key))
    assert mirror.bring(_send(store, run.key)) == 0
    mirror.greet(_send(other, run.key))
    mirror.bring(_send(other, run.key))
    same(other, run, directory)
    third = Store(tmp_path / "third.sqlite")
    with (directory / "steps.bin").open("ab") as file:
        file.write((directory / "steps.bin").read_bytes()[24:])
    mirror.bring(_send(third, run.key))
    assert held(third, run.key) == mirrored(directory)
    for each in (other, third):
        each.close()
    mirror.close()


def test_file_that_is_full(tmp_path: Path, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a file that the hub takes no more of, no more is sent, until all is compared at the end."""
    run = MadeUp(ended=None)
    directory = run.write(tmp_path / "run")
    mirror, sent = Mirror(directory), list[str]()

    def send(pieces: Sequence[Piece], all_files: bool) -> dict[str, Held]:
        sent.extend(piece.path for piece in pieces)
        return store.receive(run.key, "push", pieces, all_files=all_files)

    mirror.bring(send)
    monkeypatch.setattr("ddpdebug.hub.store.MAX_FILE", (directory / "steps.bin").stat().st_size)
    sent.clear()
    for _ in range(4):
        with (directory / "steps.bin").open("ab") as file:
            file.write(bytes(752))
        mirror.bring(send)
    assert sent == ["steps.bin"]
    monkeypatch.undo()
    mirror.verify()
    mirror.bring(send)
    assert held(store, run.key) == mirrored(directory)
    mirror.close()


def test_segment_goes_although_a_batch_was_lost(tmp_path: Path, store: Store) -> None:
    """A file that is not there any more goes from the hub, also where the hub did not hear of it the first time."""
    run = MadeUp(ended=None)
    directory = run.write(tmp_path / "run")
    (directory / "observations.00001.jsonl").write_text("{}\n")
    mirror = Mirror(directory)
    mirror.bring(_send(store, run.key))
    (directory / "observations.00001.jsonl").unlink()

    def fail(*_: object) -> dict[str, Held]:
        raise OSError

    with pytest.raises(OSError):
        mirror.bring(fail)
    mirror.bring(_send(store, run.key))
    assert held(store, run.key) == mirrored(directory)
    assert mirror.bring(_send(store, run.key)) == 0
    mirror.close()


def test_import_holds_nothing_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Many runs may be imported at once, and what cannot be stored is said of the run."""
    for name in ("a", "b", "c"):
        MadeUp(run=name, steps=2).write(tmp_path / "runs" / name)

    def held_open() -> int:
        return sum(str(tmp_path / "runs") in os.path.realpath(each) for each in Path("/proc/self/fd").iterdir())

    words = ["hub", "import", str(tmp_path / "runs"), "--data", str(tmp_path / "hub.sqlite")]
    assert main(words) == 0
    assert held_open() == 0

    def fail(*_: object, **__: object) -> None:
        raise OperationalError("", {}, ValueError("the disk is full"))

    monkeypatch.setattr(Store, "receive", fail)
    assert main(words) == 1
    assert capsys.readouterr().err.count("is not imported: the disk is full") == 3
