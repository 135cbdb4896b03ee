"""The database of the hub: mirrored run directories, and tables derived from them. SQLite or Postgres, by URL.

What a run has written is the truth; a batch of it and all that follows from that are one transaction, so that a hub
that is killed, or has no room left, shows what it showed before. One batch of a run at a time, in however many hubs.
"""

from __future__ import annotations

import json
import os
import sqlite3
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set as AbstractSet
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any, cast

from sqlalchemy import (
    Connection,
    Engine,
    Table,
    case,
    create_engine,
    delete,
    event,
    func,
    insert,
    make_url,
    select,
    update,
)
from sqlalchemy.dialects import sqlite
from sqlalchemy.exc import ArgumentError, SQLAlchemyError

from ddpdebug.clock import time
from ddpdebug.errors import UsageError
from ddpdebug.hub import derived, states
from ddpdebug.hub.schema import VERSION, about, chunk, delivery, file, finding, forgotten, metadata, rank, run, summary
from ddpdebug.run_directory.mirror import (
    MAX_DOCUMENT,
    MAX_FILE,
    Held,
    Mirror,
    Piece,
    digest_of,
    is_document,
)
from ddpdebug.run_directory.reader import CHECK, FINDINGS, OUTCOME, RUN, read_findings
from ddpdebug.schema.finding import Finding
from ddpdebug.schema.run_state import RUN_KEY

#: Bytes and files of one run; steps and observations have 64 MiB each.
MAX_RUN, MAX_FILES = 256 << 20, 20_000
#: Bytes of a chunk that the next ones are added to.
_CHUNK = 64 << 10
#: A hub that has not looked for so many seconds stood still itself: what it did not hear says nothing.
_STOOD_STILL = 15.0
#: Seconds by which a clock is set, and for how long no run is too old after that: the new time may be wrong.
_JUMP, _SETTLED = 60.0, 3600.0
#: Seconds for which it is known what was sent and what was deleted.
_REMEMBERED = 30 * 86400.0


#: What a list of runs has of each.
_SHOWN = tuple(column for column in run.c if column.name not in {"document", "width"})


class NotWantedError(Exception):
    """A batch was refused: the hub has deleted its run, or it names no run."""


class Store:
    """The database of a hub's runs.

    Args:
        place: a file for SQLite, or a URL of SQLAlchemy (`postgresql+psycopg://...`).
        clock: seconds since the epoch.
        steady: seconds since any moment, by a clock that nobody sets.

    Raises:
        UsageError: the database cannot be opened, or was made by another version.
    """

    def __init__(
        self,
        place: str | Path,
        clock: Callable[[], float] = time.time,
        steady: Callable[[], float] = time.monotonic,
    ) -> None:
        self.clock, self._lock, self._begun = clock, threading.Lock(), clock()
        self._looked = self._begun
        #: When the last whole pass over the watched directories began; None where none are watched here.
        self.passed: float | None = None
        self._steady, self._ahead = steady, clock() - steady()
        self._set_at = self._pruned_at = float("-inf")
        self._puts: dict[tuple[str, tuple[str, ...], tuple[str, ...]], Any] = {}
        self.place = _shown(str(place))
        try:
            self._engine = _engine(place)
            self._is_sqlite = self._engine.dialect.name == "sqlite"
            self._prepare()
        except UsageError:
            raise
        except (SQLAlchemyError, ValueError, ImportError, OSError) as error:
            raise UsageError(f"the hub cannot open {self.place!r}: {_words(error)}") from None

    def close(self) -> None:
        """Close all connections."""
        self._engine.dispose()

    # --- transactions -------------------------------------------------------------------------------------------------

    @contextmanager
    def read(self) -> Iterator[Connection]:
        """Yield a connection for a consistent read."""
        with self._engine.connect() as connection:
            if not self._is_sqlite:
                connection.execution_options(isolation_level="REPEATABLE READ")
            yield connection

    @contextmanager
    def write(self, key: str = "") -> Iterator[Connection]:
        """Yield a connection whose changes form one transaction; one at a time for each run.

        Args:
            key: of the run that is written.
        """
        if self._is_sqlite:
            with self._lock, self._engine.execution_options(writes=True).begin() as connection:
                yield connection
            return
        with self._engine.begin() as connection:
            connection.execute(select(func.pg_advisory_xact_lock(func.hashtext(f"ddpdebug hub {key}"))))
            yield connection

    def put(self, connection: Connection, table: Table, rows: Sequence[Mapping[str, Any]], **other: _Change) -> None:
        """Insert rows; update the given columns of rows that exist.

        Args:
            other: column -> what a row that is there gets instead: always the same for the same columns of a table.
        """
        by_columns: dict[tuple[str, ...], list[dict[str, Any]]] = {}
        for row in rows:
            by_columns.setdefault(tuple(row), []).append(dict(row))
        for names, some in by_columns.items():
            known = (table.name, names, tuple(other))
            if known not in self._puts:  # making a statement takes longer than executing it
                self._puts[known] = self._put(table, names, other)
            connection.execute(self._puts[known], some)

    def _put(self, table: Table, names: Sequence[str], other: Mapping[str, _Change]) -> Any:
        statement = self._insert(table)
        keys = [column.name for column in table.primary_key]
        changes = {name: statement.excluded[name] for name in names if name not in keys}
        changes |= {name: make(statement.excluded) for name, make in other.items()}
        if not changes:
            return statement.on_conflict_do_nothing(index_elements=keys)
        return statement.on_conflict_do_update(index_elements=keys, set_=changes)

    def _insert(self, table: Table) -> Any:
        if self._is_sqlite:
            return sqlite.insert(table)
        from sqlalchemy.dialects import postgresql  # noqa: PLC0415 - it takes long, and most have none

        return postgresql.insert(table)

    def _prepare(self) -> None:
        with self.write() as connection:
            metadata.create_all(connection)
            self.put(connection, about, [{"name": "version", "value": str(VERSION)}], value=_kept(about.c.value))
            known = connection.execute(select(about.c.value).where(about.c.name == "version")).scalar_one()
        if known != str(VERSION):
            raise UsageError(
                f"this database was made by another version of ddpdebug (layout {known}, this one has {VERSION}); "
                "name another one, and import the runs again"
            )

    # --- what comes in ------------------------------------------------------------------------------------------------

    def receive(
        self, key: str, source: str, pieces: Iterable[Piece], *, all_files: bool = False, at: float | None = None
    ) -> dict[str, Held]:
        """Store pieces of a run's files; return size and digest of each of these files as stored now.

        Args:
            source: `push`, `watch` or `import`.
            all_files: return what there is of all files.
            at: when the run has written that; the default is now.

        Raises:
            NotWantedError: nothing of this run is taken.
        """
        if not RUN_KEY.fullmatch(key):
            raise NotWantedError(f"{key[:80]!r} names no run")
        with self.write(key) as connection:
            now = self.clock()
            deleted = connection.execute(select(forgotten.c.time).where(forgotten.c.run == key)).scalar()
            if deleted is not None:
                if deleted <= now and source != "import":
                    raise NotWantedError("the run was deleted here, for its age or for lack of room")
                connection.execute(delete(forgotten).where(forgotten.c.run == key))  # by a clock that was wrong
            self._welcome(connection, key, source, now, at)
            written = now if at is None else min(at, now)
            there, changed = self._apply(connection, key, list(pieces), written, all_files=all_files)
            self._derive(connection, key, changed, now, at)
            return there

    def _welcome(self, connection: Connection, key: str, source: str, now: float, at: float | None) -> None:
        begun = derived.seconds(f"{key[:4]}-{key[4:6]}-{key[6:11]}:{key[11:13]}:{key[13:16]}")
        if begun is None:
            raise NotWantedError(f"{key!r} names no run: its time is none")
        row = {"key": key, "run_id": key.partition("-")[2], "started": begun, "source": source, "state": "running"}
        times = {"first_seen": now, "last_seen": now if at is None else min(at, now), "changed": now}
        change = {each.name: _kept(each) for each in (run.c.state, run.c.first_seen, run.c.changed)}
        self.put(connection, run, [row | times], **change, last_seen=_larger(run.c.last_seen))

    def _apply(
        self, connection: Connection, key: str, pieces: Sequence[Piece], at: float, *, all_files: bool
    ) -> tuple[dict[str, Held], set[str]]:
        """Apply the pieces; return the files that they name, or all, and those that have changed."""
        named = {piece.path for piece in pieces if is_document(piece.path) is not None}
        files = select(file.c.path, file.c.size, file.c.digest).where(file.c.run == key)
        rows = connection.execute(files if all_files else files.where(file.c.path.in_(named)))
        there = {path: Held(size, digest) for path, size, digest in rows}
        total = connection.execute(select(run.c.bytes).where(run.c.key == key)).scalar_one()
        room = MAX_RUN - total
        changed, refused = set[str](), set[str]()
        for piece in pieces:
            path, held = piece.path, there.get(piece.path)
            if path not in named:
                continue
            if piece.replace and held == Held(len(piece.data), digest_of(piece.data)):
                continue  # a repeated one
            if piece.gone or piece.replace:
                self._remove(connection, key, path, unfold=piece.replace and held is not None)
                room += there.pop(path, Held(0, "")).size
                changed.add(path)
            if piece.gone:
                continue
            size, digest = there.get(path, Held(0, digest_of(b"")))
            data = piece.beyond(size)
            if data is None or (path in there and not data):
                continue
            most = MAX_DOCUMENT if is_document(path) else MAX_FILE
            if size + len(data) > most or len(data) > room or (path not in there and self._is_full(connection, key)):
                refused.add(path)
                continue
            if data:
                self._append(connection, key, path, size, data)
            there[path] = Held(size + len(data), digest_of(data, digest))
            room -= len(data)
            changed.add(path)
        left = [
            {"run": key, "path": path, "is_document": is_document(path), "changed": at}
            | {"size": there[path].size, "digest": there[path].digest}
            for path in changed & there.keys()
        ]
        self.put(connection, file, left)
        if MAX_RUN - room != total:
            connection.execute(update(run).where(run.c.key == key).values(bytes=MAX_RUN - room))
        return {path: held for path, held in there.items() if path not in refused}, changed

    def _is_full(self, connection: Connection, key: str) -> bool:
        count = connection.execute(select(func.count()).select_from(file).where(file.c.run == key)).scalar_one()
        return count >= MAX_FILES

    def _append(self, connection: Connection, key: str, path: str, size: int, data: bytes) -> None:
        mine = (chunk.c.run == key) & (chunk.c.path == path)
        last = select(chunk.c.start, func.length(chunk.c.data)).where(mine).order_by(chunk.c.start.desc()).limit(1)
        found = connection.execute(last).first()
        if found is not None and found[1] + len(data) <= _CHUNK:
            before = connection.execute(select(chunk.c.data).where(mine, chunk.c.start == found[0])).scalar_one()
            connection.execute(update(chunk).where(mine, chunk.c.start == found[0]).values(data=bytes(before) + data))
        else:
            connection.execute(insert(chunk).values(run=key, path=path, start=size, data=data))

    def _remove(self, connection: Connection, key: str, path: str, *, unfold: bool) -> None:
        """Delete a file; with `unfold` also what was concluded from rows, where it has some: it will be another one."""
        for table in (chunk, file):
            connection.execute(delete(table).where(table.c.run == key, table.c.path == path))
        if not unfold or not path.startswith("steps"):
            return
        connection.execute(delete(summary).where(summary.c.run == key))
        connection.execute(update(file).where(file.c.run == key, file.c.path.like("steps%")).values(folded=0))
        connection.execute(update(run).where(run.c.key == key).values(width=1, rate=None, last_step=None))
        connection.execute(update(rank).where(rank.c.run == key).values(last_step=None))

    # --- what follows from it -----------------------------------------------------------------------------------------

    def _derive(
        self, connection: Connection, key: str, changed: AbstractSet[str], now: float, at: float | None
    ) -> None:
        row = connection.execute(select(run).where(run.c.key == key)).mappings().one()
        new: dict[str, Any] = {}
        if RUN in changed:
            told = derived.document(self._content(connection, key, RUN))
            if derived.is_deep(told):
                raise NotWantedError(f"its {RUN} is nested too deep")
            new |= derived.of_run(told or {})
        document = json.loads(new.get("document") or row["document"] or "{}")
        if any(path.endswith(FINDINGS) or path == RUN for path in changed):
            new |= self._findings(connection, key, now)
        new |= self._rows(connection, key, changed, document, row, now if at is None else min(at, now))
        self._ranks(connection, key, changed, str(document.get("run")), document)
        # rows and observations change nothing of the state of a run that is known to go on
        if row["state"] not in states.LIVE or any(not path.startswith(("steps", "observations")) for path in changed):
            self._judge(connection, {**row, **new}, document, now, new)
        different = {name: value for name, value in new.items() if row[name] != value}
        if different:
            connection.execute(update(run).where(run.c.key == key).values(**different, changed=now))

    def _findings(self, connection: Connection, key: str, now: float) -> dict[str, Any]:
        with self.copied(connection, key, (RUN, "%" + FINDINGS)) as directory:
            found = [each for each in read_findings(directory) if not derived.is_deep(each.evidence)]
        rows = {one["id"]: one for place, each in enumerate(found) if (one := derived.of_finding(each, place))}
        mine = finding.c.run == key
        known = {
            each.id: (each.place, each.document)
            for each in connection.execute(select(finding.c.id, finding.c.place, finding.c.document).where(mine))
        }
        gone = known.keys() - rows.keys()
        if gone:
            connection.execute(delete(finding).where(mine, finding.c.id.in_(gone)))
        different = [one for one in rows.values() if known.get(one["id"]) != (one["place"], one["document"])]
        # seen one after the other, so that who asks for later ones misses none
        newest = connection.execute(select(func.max(finding.c.first_seen))).scalar()
        now = now if newest is None else max(now, newest)  # the clock may be set back
        stamped = [one | {"run": key, "first_seen": now + 1e-6 * place} for place, one in enumerate(different)]
        if stamped:
            self.put(connection, finding, stamped, first_seen=_kept(finding.c.first_seen))
        return {"findings": len(rows), "newest_finding": found[-1].code[:20] if found else None}

    def _rows(
        self,
        connection: Connection,
        key: str,
        changed: AbstractSet[str],
        document: Mapping[str, Any],
        row: Any,
        at: float,
    ) -> dict[str, Any]:
        layout = derived.layout_of(document)
        paths = self._steps(connection, key) if any(path == RUN or path.startswith("steps") for path in changed) else []
        if layout is None or not paths:
            return {}
        folding = derived.Folding(row["width"], derived.number(document.get("world")), row["rate"])
        for path in paths:
            self._fold(connection, key, path, lambda data, start: folding.take(data, start, layout))
        if not folding.last:
            return {}
        self._keep(connection, key, folding, row["width"])
        newest = max(folding.last.values())
        moved = row["last_step"] is None or newest > row["last_step"]
        steps = {"last_step": newest, "last_step_at": at} if moved else {}
        return {"width": folding.width, "rate": folding.rate, **steps}

    def _steps(self, connection: Connection, key: str) -> list[str]:
        found = connection.execute(select(file.c.path).where(file.c.run == key, file.c.path.like("steps%")))
        return sorted(found.scalars(), key=lambda path: (path != "steps.bin", path))

    def _fold(self, connection: Connection, key: str, path: str, take: Callable[[bytes, int], int]) -> None:
        """Give what has come of a file, and was not given yet, to a function that says how far it has got."""
        one = (file.c.run == key) & (file.c.path == path)
        folded = connection.execute(select(file.c.folded).where(one)).scalar()
        if folded is None:  # it has gone
            return
        until = take(self._content(connection, key, path, folded) or b"", folded)
        connection.execute(update(file).where(one).values(folded=until))

    def _keep(self, connection: Connection, key: str, folding: derived.Folding, width: int) -> None:
        mine, names = summary.c.run == key, derived.Bucket.__slots__
        buckets = folding.buckets
        if folding.width != width:
            rows = connection.execute(select(summary).where(mine).order_by(summary.c.rank, summary.c.bucket))
            old = [
                ((each.rank, each.bucket), derived.Bucket(*(getattr(each, name) for name in names))) for each in rows
            ]
            connection.execute(delete(summary).where(mine))
            times = folding.width // width
            wide = derived.merged(old, times)
            buckets = derived.merged([*wide.items(), *buckets.items()], 1)
        added = [
            {"run": key, "rank": r, "bucket": b, **{name: getattr(one, name) for name in names}}
            for (r, b), one in buckets.items()
        ]
        column = summary.c
        sums = (column.steps, column.loss_sum, column.losses, column.seconds_sum, column.differing)
        change = {each.name: _added(each) for each in sums}
        change |= {each.name: _larger(each) for each in (column.last_step, column.seconds_max)}
        change |= {"first_step": _smaller(column.first_step), "loss_last": _known(column.loss_last)}
        self.put(connection, summary, added, **change)
        newest = [{"run": key, "rank": r, "last_step": step} for r, step in folding.last.items()]
        self.put(connection, rank, newest)

    def _ranks(
        self, connection: Connection, key: str, changed: AbstractSet[str], run_id: str, document: Mapping[str, Any]
    ) -> None:
        world = min(derived.number(document.get("world")) or 0, derived.RANKS)
        rows: list[dict[str, Any]] = []
        for path in changed:
            if path.startswith("ranks/") and not path.endswith(FINDINGS):
                columns = derived.of_rank(path, self._content(connection, key, path) or b"", run_id)
                rows.append({"rank": int(path.split("/")[1]), **columns})
            elif path.startswith("observations"):

                def take(data: bytes, start: int) -> int:
                    whole = data.rfind(b"\n") + 1
                    rows.extend({"rank": r, **columns} for r, columns in derived.told(data[:whole]))
                    return start + whole

                self._fold(connection, key, path, take)
        if RUN in changed:
            waiting = document.get("waiting")
            connection.execute(update(rank).where(rank.c.run == key).values(phase=None))
            if isinstance(waiting, dict) and isinstance(ranks := waiting.get("ranks"), list):
                words = [derived.text(waiting.get(name)) for name in ("state", "location")]
                phase = " in ".join(filter(None, words))
                rows += [
                    {"rank": r, "phase": phase} for r in map(derived.number, ranks[: derived.RANKS]) if r is not None
                ]
        for one in rows:
            if 0 <= one["rank"] < world and len(one) > 1:
                self.put(connection, rank, [{"run": key, **one}])

    def _judge(
        self,
        connection: Connection,
        row: Mapping[str, Any],
        document: Mapping[str, Any],
        now: float,
        new: dict[str, Any],
    ) -> None:
        """Put the state of a run among what is new of it."""
        key = row["key"]
        found = connection.execute(select(finding.c.document).where(finding.c.run == key)).scalars()
        outcomes = {}
        paths = select(file.c.path).where(file.c.run == key, file.c.path.like(f"ranks/%/{OUTCOME}"))
        for path in connection.execute(paths.limit(derived.RANKS)).scalars():
            outcome = derived.document(self._content(connection, key, path))
            if outcome is not None and outcome.get("run") == document.get("run"):
                outcomes[int(path.split("/")[1])] = outcome
        check = derived.document(self._content(connection, key, CHECK))
        check = check if check is not None and check.get("run") == document.get("run") else None
        until = now if row["source"] != "watch" or self.passed is None else min(now, self.passed)
        silent = until - max(row["last_seen"], self._begun if row["source"] != "import" else 0.0)
        state = states.state_of(
            states.Told(document, outcomes, check),
            [Finding.from_json(each) for each in found],
            silent,
            states.PATIENCE[row["source"]],
        )
        new |= {
            "state": state.state,
            "outcome": state.outcome,
            "exit_code": state.exit_code,
            "severity": state.severity,
        }

    def look_again(self) -> list[str]:
        """Update the states of runs that went silent or are heard again; return those whose state changed."""
        now = self.clock()
        self._begun = min(self._begun, now)  # the clock may be set back
        if now - self._looked > _STOOD_STILL:
            self._begun = now
        try:
            found = self._look(now)
        except SQLAlchemyError:  # whoever pushes cannot be heard either
            self._begun = now
            raise
        self._looked = now
        return found

    def _look(self, now: float) -> list[str]:
        found = []
        with self.read() as connection:
            live = list(connection.execute(select(run.c.key, run.c.last_seen).where(run.c.state.in_(states.LIVE))))
        for key, seen in live:
            if abs(now - seen) < min(states.PATIENCE.values()):
                continue
            with self.write(key) as connection:
                row = connection.execute(select(run).where(run.c.key == key)).mappings().first()
                if row is None:
                    continue
                new: dict[str, Any] = {}
                if row["last_seen"] > now:  # the clock was set back
                    new["last_seen"] = now
                self._judge(connection, {**row, **new}, json.loads(row["document"] or "{}"), now, new)
                different = {name: value for name, value in new.items() if row[name] != value}
                if different:
                    connection.execute(update(run).where(run.c.key == key).values(**different, changed=now))
                    found.append(key)
        return found

    # --- what is asked ------------------------------------------------------------------------------------------------

    def is_over(self, key: str, digest: str | None = None) -> bool:
        """Whether a run is known and has ended; with a digest, whether that of its stored `run.json` is the same."""
        with self.read() as connection:
            state = connection.execute(select(run.c.state).where(run.c.key == key)).scalar()
            known = select(file.c.digest).where(file.c.run == key, file.c.path == RUN)
            return (
                state is not None
                and state not in states.LIVE
                and (digest is None or connection.execute(known).scalar() == digest)
            )

    def runs(self, limit: int = 1000, **filters: Any) -> list[dict[str, Any]]:
        """Return the columns of runs but for `document`, the newest first.

        Args:
            filters: `state` and `code` (of several each, separated by commas), `owner`, `job`, `name`; `before`, the
                key of the last one that is known; `changed`, a time since when something of them has.
        """
        statement = select(*_SHOWN).order_by(run.c.key.desc()).limit(limit)
        if states_ := filters.get("state"):
            statement = statement.where(run.c.state.in_(derived.text(states_).split(",")))
        if codes := filters.get("code"):
            found = select(finding.c.run).where(finding.c.code.in_(derived.text(codes).split(",")))
            statement = statement.where(run.c.key.in_(found))
        for name in ("owner", "job", "name"):
            if (value := filters.get(name)) is not None:
                statement = statement.where(run.c[name] == derived.text(value))
        if before := filters.get("before"):
            statement = statement.where(run.c.key < derived.text(before))
        if (since := filters.get("changed")) is not None:
            statement = statement.where(run.c.changed > since)
        with self.read() as connection:
            return [dict(row) for row in connection.execute(statement).mappings()]

    def run(self, key: str) -> dict[str, Any] | None:
        """Return all columns of a run; None if there is none."""
        key = derived.text(key)
        with self.read() as connection:
            row = connection.execute(select(run).where(run.c.key == key)).mappings().first()
            if row is None:
                return None
            found = connection.execute(select(finding.c.document).where(finding.c.run == key).order_by(finding.c.place))
            ranks = connection.execute(select(rank).where(rank.c.run == key).order_by(rank.c.rank)).mappings()
            files = connection.execute(select(file).where(file.c.run == key).order_by(file.c.path)).mappings()
            steps = connection.execute(
                select(summary).where(summary.c.run == key).order_by(summary.c.rank, summary.c.bucket)
            ).mappings()
            return {
                **row,
                "document": json.loads(row["document"] or "{}"),
                "findings": [json.loads(each) for each in found.scalars()],
                "ranks": [_without(each, "run") for each in ranks],
                "steps": [_without(each, "run", "bucket") for each in steps],
                "files": {each["path"]: {"size": each["size"], "digest": each["digest"]} for each in files},
            }

    def findings(
        self, since: float = float("-inf"), limit: int = 1000, code: str | None = None
    ) -> list[dict[str, Any]]:
        """Return findings that were first seen after a time, in that order, each as its run has written it."""
        statement = (
            select(finding.c.run, finding.c.id, finding.c.first_seen, finding.c.open, finding.c.document)
            .where(finding.c.first_seen > since)
            .order_by(finding.c.first_seen)
            .limit(limit)
        )
        if code:
            statement = statement.where(finding.c.code.in_(derived.text(code).split(",")))
        with self.read() as connection:
            rows = connection.execute(statement).mappings().all()
        return [{**_without(row, "document"), "finding": json.loads(row["document"])} for row in rows]

    def targets(self) -> list[tuple[str, int, str, str]]:
        """Return run, rank, node and address of the metrics endpoints of live runs."""
        statement = (
            select(rank.c.run, rank.c.rank, rank.c.node, rank.c.metrics_url)
            .join(run, run.c.key == rank.c.run)
            .where(run.c.state.in_(states.LIVE), rank.c.metrics_url.is_not(None), rank.c.outcome.is_(None))
            .order_by(rank.c.run, rank.c.rank)
        )
        with self.read() as connection:
            return [(row.run, row.rank, row.node or "", row.metrics_url) for row in connection.execute(statement)]

    def counts(self) -> tuple[dict[str, int], dict[tuple[str, str], int], int]:
        """Return the number of runs by state, of findings by code and severity, and of mirrored bytes."""
        by_state = select(run.c.state, func.count()).group_by(run.c.state)
        by_code = select(finding.c.code, finding.c.severity, func.count()).group_by(finding.c.code, finding.c.severity)
        with self.read() as connection:
            runs = {row[0]: row[1] for row in connection.execute(by_state)}
            found = {(code, severity): count for code, severity, count in connection.execute(by_code)}
            size = connection.execute(select(func.coalesce(func.sum(run.c.bytes), 0))).scalar_one()
        return runs, found, int(size)

    # --- mirrored files -----------------------------------------------------------------------------------------------

    def content(self, key: str, path: str) -> bytes | None:
        """Return a mirrored file of a run; None if there is none."""
        with self.read() as connection:
            return self._content(connection, derived.text(key), derived.text(path))

    def _content(self, connection: Connection, key: str, path: str, start: int = 0) -> bytes | None:
        mine = (chunk.c.run == key) & (chunk.c.path == path)
        first = select(func.max(chunk.c.start)).where(mine, chunk.c.start <= start).scalar_subquery()
        rows = connection.execute(
            select(chunk.c.start, chunk.c.data).where(mine, chunk.c.start >= first).order_by(chunk.c.start)
        ).all()
        if not rows:
            known = connection.execute(select(file.c.path).where(file.c.run == key, file.c.path == path)).first()
            return None if known is None else b""
        return b"".join(bytes(data) for _, data in rows)[start - rows[0][0] :]

    @contextmanager
    def copied(self, connection: Connection, key: str, patterns: Sequence[str] = ("%",)) -> Iterator[Path]:
        """Yield a temporary directory with mirrored files of a run, for the readers of a run directory.

        Args:
            patterns: of paths, as SQL has them.
        """
        with tempfile.TemporaryDirectory(prefix="ddpdebug-hub-") as name:
            directory = Path(name)
            for pattern in patterns:
                files = select(file.c.path, file.c.changed).where(file.c.run == key, file.c.path.like(pattern))
                for path, changed in connection.execute(files).all():
                    target = directory / path
                    target.parent.mkdir(parents=True, exist_ok=True)
                    target.write_bytes(self._content(connection, key, path) or b"")
                    os.utime(target, (changed, changed))  # by this a reader says how old a step is
            yield directory

    # --- what goes ----------------------------------------------------------------------------------------------------

    def forget(self, keep: float, most: float) -> list[str]:
        """Delete runs that are over and older than `keep` seconds, and the oldest beyond `most` bytes; return them."""
        now, steady, gone = self.clock(), self._steady(), []
        if abs(now - steady - self._ahead) > _JUMP:
            self._ahead, self._set_at = now - steady, steady
        keep = float("inf") if steady - self._set_at < _SETTLED else keep
        with self.read() as connection:
            rows = connection.execute(
                select(run.c.key, run.c.last_seen, run.c.bytes, run.c.state).order_by(run.c.last_seen)
            )
            runs = [tuple(row) for row in rows]
        left = sum(size for _, _, size, _ in runs)
        for key, seen, size, state in runs:
            if state not in states.LIVE and (now - seen > keep or left > most):
                self.delete(key)
                left -= size
                gone.append(str(key))
        if gone and self._is_sqlite:
            with self._lock, closing(self._engine.raw_connection()) as connection, suppress(sqlite3.Error):
                # each step of this statement gives one page back, and only a script takes all of them
                cast("sqlite3.Connection", connection.driver_connection).executescript("PRAGMA incremental_vacuum")
        if steady - self._pruned_at > _SETTLED and keep < float("inf"):
            self._pruned_at, old = steady, now - max(keep, _REMEMBERED)
            with self.write("outgoing") as connection:
                connection.execute(delete(delivery).where(delivery.c.next_at < old))
                connection.execute(delete(forgotten).where(forgotten.c.time < old))
        return gone

    def delete(self, key: str) -> None:
        """Delete a run; later pieces of it are refused."""
        with self.write(key) as connection:
            self.put(connection, forgotten, [{"run": key, "time": self.clock()}])
            for table in (chunk, file, finding, summary, rank):
                connection.execute(delete(table).where(table.c.run == key))
            connection.execute(delete(run).where(run.c.key == key))


_Change = Callable[[Any], Any]  # what a row gets that was to be inserted and is there, of the one that was


def _kept(column: Any) -> _Change:
    return lambda _: column


def _known(column: Any) -> _Change:
    return lambda new: func.coalesce(new[column.name], column)


def _added(column: Any) -> _Change:
    return lambda new: column + new[column.name]


def _larger(column: Any) -> _Change:
    return lambda new: case((new[column.name] > column, new[column.name]), else_=column)


def _smaller(column: Any) -> _Change:
    return lambda new: case((new[column.name] < column, new[column.name]), else_=column)


def copy_run(store: Store, mirror: Mirror, source: str, *, at: float | None = None) -> int:
    """Bring a store up to date with a run directory; return the number of pieces that were copied.

    Args:
        at: when the run has written what is there; the default is now.

    Raises:
        NotWantedError: the store does not take the run.
        ValueError, OSError: the directory is another run's now, or cannot be read.
    """
    return mirror.bring(lambda pieces, all_files: store.receive(mirror.key, source, pieces, all_files=all_files, at=at))


def _shown(place: str) -> str:
    """Return the name of a database without the password that may be in it."""
    if "://" not in place:
        return place
    try:
        return make_url(place).render_as_string(hide_password=True)
    except (ArgumentError, ValueError):  # a port that is no number
        return f"{place.partition('://')[0]}://..."


def _engine(place: str | Path) -> Engine:
    if "://" in str(place):
        kind = make_url(str(place)).get_backend_name()
        if kind not in {"sqlite", "postgresql"}:
            raise UsageError(f"a hub keeps its runs in SQLite or Postgres, not in {kind}")
        engine = create_engine(str(place), pool_pre_ping=True)
    else:
        path = Path(place)
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            path.touch(mode=0o600)  # runs are for whom the hub lets see them
        engine = create_engine(f"sqlite:///{path.absolute()}", connect_args={"timeout": 30})
    if engine.dialect.name == "sqlite":
        event.listen(engine, "connect", _set_up_sqlite)
        event.listen(engine, "begin", _begin_sqlite)
    return engine


def _set_up_sqlite(connection: Any, _: object) -> None:
    connection.isolation_level = None  # transactions are begun below
    for pragma in ("auto_vacuum = INCREMENTAL", "journal_mode = WAL", "synchronous = NORMAL", "foreign_keys = OFF"):
        connection.execute(f"PRAGMA {pragma}")


def _begin_sqlite(connection: Connection) -> None:
    writes = connection.get_execution_options().get("writes")
    connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")


def _without(row: Mapping[Any, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name not in names}


def _words(error: Exception) -> str:
    return str(getattr(error, "orig", None) or error).splitlines()[0][:300]
