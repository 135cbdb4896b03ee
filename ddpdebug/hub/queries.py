"""Queries for the pages: a few statements per page, none of which reads rows of a run.

Every text that a browser has sent is a bound parameter.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import Connection, Row, Select, and_, case, distinct, exists, false, func, or_, select, true

from ddpdebug.hub import schema
from ddpdebug.hub.states import LIVE
from ddpdebug.reports.html import Points
from ddpdebug.schema.finding import Severity

PAGE = 50
MAX_FINDINGS, MAX_RANKS, MAX_MEMBERS, MAX_GROUPS = 200, 512, 200, 200
#: So many points has the small curve of a run.
_SPARK = 64
#: So many ranks have a lane of their own where ranks were outvoted.
_LANES = 16

_run, _finding, _summary = schema.run.c, schema.finding.c, schema.summary.c
_SHOWN = [column for column in _run if column.name != "document"]

_gravity = case(*((_finding.severity == one.label, int(one)) for one in Severity), else_=-1)
_urgency = case({"hung": 0, "ill": 1}, value=_run.state, else_=case((_run.state.in_(LIVE), 2), else_=3))
_worst = case({one.label: int(one) for one in Severity}, value=_run.severity, else_=-1)
SORTS = {
    "urgency": (_urgency, _worst.desc(), _run.last_seen.desc()),
    "newest": (_run.started.desc(),),
    "last seen": (_run.last_seen.desc(),),
    "findings": (_run.findings.desc(),),
    "step rate": (func.coalesce(_run.rate, -1).desc(),),
    "owner": (_run.owner, _run.started.desc()),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """The filter, order and page of the list of runs."""

    state: str = ""
    q: str = ""
    code: str = ""
    sort: str = "urgency"
    page: int = 0

    @property
    def narrow(self) -> bool:
        """Whether the filter excludes runs."""
        return bool(self.state or self.q or self.code)


def runs(connection: Connection, asked: Asked) -> tuple[list[Row[Any]], bool]:
    """Return a page of runs, and whether there are more."""
    found = _asked(select(*_SHOWN), asked)
    if asked.state:
        found = found.where(_run.state == asked.state)
    found = found.order_by(*SORTS[asked.sort], _run.key).limit(PAGE + 1).offset(asked.page * PAGE)
    rows = list(connection.execute(found))
    return rows[:PAGE], len(rows) > PAGE


def counts(connection: Connection, asked: Asked) -> dict[str, int]:
    """Return the number of runs in each state that pass the rest of the filter."""
    found = _asked(select(_run.state, func.count().label("runs")), asked).group_by(_run.state)
    return {row.state: row.runs for row in connection.execute(found)}


def _asked(statement: Select[Any], asked: Asked) -> Select[Any]:
    if asked.q:
        columns = (_run.key, _run.name, _run.owner, _run.job, _run.node, _run.command)
        statement = statement.where(or_(*(column.icontains(asked.q, autoescape=True) for column in columns)))
    if asked.code:
        same = and_(_finding.run == _run.key, _finding.code.startswith(asked.code.upper(), autoescape=True))
        statement = statement.where(exists().where(same))
    return statement


def run(connection: Connection, key: str) -> Row[Any] | None:
    """Return a run with its document; None if there is none."""
    return connection.execute(select(schema.run).where(_run.key == key)).one_or_none()


def sparks(connection: Connection, shown: Sequence[Row[Any]]) -> dict[str, list[tuple[int, float]]]:
    """Return the losses of rank 0 of each run, thinned to the points of a small curve."""
    curves: dict[str, list[tuple[int, float]]] = {one.key: [] for one in shown}
    alike: dict[tuple[int, int], list[str]] = {}
    for one in shown:
        stride = max(1, (one.last_step or 0) // one.width // _SPARK)
        alike.setdefault((one.width, stride), []).append(one.key)
    every = (
        and_(_summary.run.in_(keys), _summary.first_step // width % stride == 0)
        for (width, stride), keys in alike.items()
    )
    picked = or_(false(), *every)
    loss = _summary.loss_sum / _summary.losses
    found = select(_summary.run, _summary.first_step, loss).where(picked, _summary.rank == 0, _summary.losses > 0)
    for key, step, value in connection.execute(found.order_by(_summary.run, _summary.bucket)):
        curves[key].append((step, value))
    return curves


@dataclass(frozen=True, slots=True, kw_only=True)
class Curves:
    """Series of a run for its charts: over all ranks together, and the outvoted ranks over the steps."""

    steps: tuple[int, int] = (0, 1)
    loss: Mapping[str, Points] = field(default_factory=dict)
    seconds: Mapping[str, Points] = field(default_factory=dict)
    agreement: Mapping[str, Points] = field(default_factory=dict)


def curves(connection: Connection, key: str) -> Curves:
    """Return the chart series of a run."""
    loss, seconds = _summary.loss_sum / func.nullif(_summary.losses, 0), _summary.seconds_sum / _summary.steps
    found = select(
        func.min(_summary.first_step),
        func.max(_summary.last_step),
        func.max(loss),
        func.avg(loss),
        func.min(loss),
        func.avg(seconds),
        func.max(_summary.seconds_max),
        func.max(_summary.differing),
        func.count(),
    ).where(_summary.run == key)
    rows = connection.execute(found.group_by(_summary.bucket).order_by(_summary.bucket)).all()
    if not rows:
        return Curves()

    def series(place: int) -> list[tuple[int, float]]:
        return [(row[0], row[place]) for row in rows if row[place] is not None]

    lanes: dict[str, list[tuple[int, float]]] = {}
    if any(row[8] > 1 for row in rows):
        lanes["all ranks"] = series(7)
        outvoted = select(_summary.rank).where(_summary.run == key, _summary.differing > 0).distinct()
        ranks = connection.scalars(outvoted.order_by(_summary.rank).limit(_LANES)).all()
        of_ranks = select(_summary.rank, _summary.first_step, _summary.differing)
        of_ranks = of_ranks.where(_summary.run == key, _summary.rank.in_(ranks))
        for rank, step, count in connection.execute(of_ranks.order_by(_summary.rank, _summary.bucket)):
            lanes.setdefault(f"rank {rank}", []).append((step, count))
    loss_names = ("highest rank", "mean", "lowest rank") if lanes else ("mean",)
    places = (2, 3, 4) if lanes else (3,)
    return Curves(
        steps=(rows[0][0], max(rows[-1][1], rows[0][0] + 1)),
        loss={name: series(place) for name, place in zip(loss_names, places, strict=True)},
        seconds={"longest": series(6), "mean": series(5)},
        agreement=lanes,
    )


def findings(connection: Connection, key: str) -> list[Row[Any]]:
    """Return the findings of a run in its order."""
    found = select(schema.finding).where(_finding.run == key).order_by(_finding.place).limit(MAX_FINDINGS)
    return list(connection.execute(found))


def ranks(connection: Connection, key: str) -> list[Row[Any]]:
    """Return the ranks of a run."""
    found = select(schema.rank).where(schema.rank.c.run == key).order_by(schema.rank.c.rank).limit(MAX_RANKS)
    return list(connection.execute(found))


def document(connection: Connection, key: str, path: str) -> Any:
    """Return a mirrored JSON document; None if there is none or it cannot be parsed."""
    where = (schema.chunk.c.run == key, schema.chunk.c.path == path, schema.chunk.c.start == 0)
    data = connection.scalar(select(schema.chunk.c.data).where(*where))
    return None if data is None else parsed(data)


def parsed(text: str | bytes | None) -> Any:
    """Parse a JSON text; None if it is malformed."""
    try:
        return json.loads(text or "null")
    except (ValueError, RecursionError):
        return None


def groups(connection: Connection, since: float, *, group: str | None = None) -> list[Row[Any]]:
    """Return the groups of findings that were seen since a time, the gravest and most frequent first."""
    when = func.coalesce(_finding.time, _finding.first_seen)
    number = func.count(distinct(_finding.run))
    gravity = func.max(_gravity)
    found = (
        select(
            _finding.group,
            func.min(_finding.code).label("code"),
            func.max(_finding.title).label("title"),
            gravity.label("gravity"),
            number.label("runs"),
            func.count(distinct(case((_run.state.in_(LIVE), _finding.run)))).label("live"),
            func.min(when).label("since"),
            func.max(when).label("newest"),
            func.max(_finding.first_seen).label("told"),
        )
        .join(schema.run, _run.key == _finding.run)
        .where(_finding.first_seen >= since, true() if group is None else _finding.group == group)
        .group_by(_finding.group)
        .order_by(gravity.desc(), number.desc(), _finding.group)
        .limit(MAX_GROUPS)
    )
    return list(connection.execute(found))


def sizes(connection: Connection, names: Iterable[str]) -> dict[str, Row[Any]]:
    """Return, for each group of findings, the number of runs that have it, and when the hub last heard of it."""
    number, told = func.count(distinct(_finding.run)).label("runs"), func.max(_finding.first_seen).label("told")
    found = select(_finding.group, number, told).where(_finding.group.in_(list(names))).group_by(_finding.group)
    return {row.group: row for row in connection.execute(found)}


def in_group(connection: Connection, group: str) -> list[Row[Any]]:
    """Return the findings of a group with their runs, the newest first."""
    when = func.coalesce(_finding.time, _finding.first_seen).label("raised")
    about = [_finding.step, _finding.ranks, _finding.subject, when]
    found = select(*_SHOWN, *about).join(schema.finding, _run.key == _finding.run).where(_finding.group == group)
    return list(connection.execute(found.order_by(when.desc()).limit(MAX_MEMBERS)))


def notes(connection: Connection, *, run: str | None = None, group: str | None = None) -> list[Row[Any]]:
    """Return the notes about a run, about a group, or about all groups; the newest first."""
    note = schema.note.c
    about = (
        note.run == run if run is not None else note.group == group if group is not None else note.group.is_not(None)
    )
    return list(
        connection.execute(select(schema.note).where(about).order_by(note.time.desc(), note.id.desc()).limit(500))
    )
