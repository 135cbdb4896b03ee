"""The same hub on a real Postgres: the same rows as with SQLite, also from two hubs at the same time."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from run_records import ENDED, FINDING, judged, started
from sqlalchemy import create_engine, func, select, text

from ddpdebug.hub.schema import metadata
from ddpdebug.hub.store import Store
from ddpdebug.run_directory.mirror import Mirror
from ddpdebug.run_directory.writer import RunDirectory
from ddpdebug.sinks import FindingRaised, Saved

_NOW = datetime(2026, 11, 21, 2, 10, tzinfo=UTC).timestamp()
_RUNS = 4


@pytest.fixture
def database(postgres: str) -> Iterator[str]:
    """An empty database."""
    server = create_engine(postgres, isolation_level="AUTOCOMMIT")
    with server.connect() as connection:
        connection.execute(text("CREATE DATABASE hub"))
    yield postgres.rpartition("/")[0] + "/hub"
    with server.connect() as connection:
        connection.execute(text("DROP DATABASE hub WITH (FORCE)"))
    server.dispose()


@pytest.fixture
def directories(tmp_path: Path) -> list[Path]:
    """Runs with rows, findings, announcements with a NUL in them, and ends; the last one has none."""
    made = []
    for number in range(_RUNS):
        folder = tmp_path / f"run{number}"
        sink = RunDirectory(folder, 0)
        sink.write(started(folder, run_id=f"r{number}"))
        for step in range(40 * (number + 1)):
            sink.write(judged(step))
        sink.write(Saved(kind="fact", payload={"rank": 1, "topic": "structure:0", "value": "a\0b"}))
        for each in range(number):
            sink.write(
                FindingRaised(finding=replace(FINDING, id=f"RANK101-{each}", title="differ \0 '; DROP TABLE run"))
            )
        if number != _RUNS - 1:
            sink.write(ENDED)
        sink.close()
        made.append(folder)
    return made


def _take(store: Store, directory: Path, room: int = 16 << 10) -> None:
    """Mirror a directory in small pieces, to the end."""
    mirror = Mirror(directory)
    try:
        while pieces := mirror.pieces(room):
            mirror.learn(store.receive(mirror.key, "push", pieces))
    finally:
        mirror.close()


def _rows(store: Store) -> dict[str, list[Any]]:
    """Return all that is in a database; how bytes are cut into chunks is chance, what they are together is not."""
    with store.read() as connection:
        tables = {
            name: sorted(map(repr, connection.execute(select(table)).all()))
            for name, table in metadata.tables.items()
            if name != "chunk"
        }
        chunk = metadata.tables["chunk"]
        bytes_of = dict[tuple[str, str], bytes]()
        for one in connection.execute(select(chunk).order_by(chunk.c.run, chunk.c.path, chunk.c.start)):
            key = (one.run, one.path)
            bytes_of[key] = bytes_of.get(key, b"") + bytes(one.data)
    return {**tables, "chunk": sorted(bytes_of.items())}


@pytest.mark.smoke
def test_the_same_rows_as_with_sqlite(database: str, directories: list[Path], tmp_path: Path) -> None:
    stores = Store(tmp_path / "hub.db", clock=lambda: _NOW), Store(database, clock=lambda: _NOW)
    for store in stores:
        for directory in directories:
            _take(store, directory)
    lite, post = map(_rows, stores)
    assert len(lite["run"]) == _RUNS
    assert len(lite["finding"]) == sum(range(_RUNS))
    assert lite == post
    for store in stores:
        store.close()
    again = Store(database, clock=lambda: _NOW)
    assert _rows(again) == lite
    again.close()


@pytest.mark.smoke
def test_two_hubs_take_the_same_runs_at_the_same_time(database: str, directories: list[Path], tmp_path: Path) -> None:
    """Runs are pushed to both of them, as behind a proxy that gives each request to another one."""
    lite, hubs = Store(tmp_path / "hub.db", clock=lambda: _NOW), [Store(database, clock=lambda: _NOW) for _ in range(2)]
    for directory in directories:
        _take(lite, directory)
    wrong: list[BaseException] = []

    def take(hub: Store) -> None:
        try:
            for directory in directories:
                _take(hub, directory, room=16 << 10)
        except BaseException as error:  # noqa: BLE001 - told by the test
            wrong.append(error)

    threads = [threading.Thread(target=take, args=(hub,)) for hub in hubs for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    first, second = map(_rows, hubs)
    assert first == second == _rows(lite)
    for store in (lite, *hubs):
        store.close()


def test_two_hubs_begin_at_the_same_time(database: str) -> None:
    """Each makes the tables, if the other has not."""
    wrong: list[BaseException] = []

    def begin() -> None:
        try:
            Store(database).close()
        except BaseException as error:  # noqa: BLE001 - told by the test
            wrong.append(error)

    threads = [threading.Thread(target=begin) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_a_page_sees_one_moment(database: str, directories: list[Path]) -> None:
    """What comes in while a page is being made is on the next one; and no key is one that Postgres cannot read."""
    store = Store(database, clock=lambda: _NOW)
    _take(store, directories[0])
    with store.read() as connection:
        before = connection.execute(select(func.count()).select_from(metadata.tables["run"])).scalar_one()
        _take(store, directories[1])
        assert connection.execute(select(func.count()).select_from(metadata.tables["run"])).scalar_one() == before
    assert len(store.runs()) == before + 1
    assert store.run("a\0b") is store.content("a\0b", "run.json") is store.content("a", "run\0.json") is None
    store.close()
