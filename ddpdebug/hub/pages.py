"""The pages of the hub, rendered on the server from the store; templates escape all texts of jobs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from datetime import UTC, datetime
from functools import cache
from importlib import resources
from threading import Lock
from typing import Any
from urllib.parse import parse_qs, quote, urlencode

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from sqlalchemy import insert
from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, RedirectResponse, Response
from starlette.routing import Route

from ddpdebug.detectors.base import runbook
from ddpdebug.detectors.catalog import catalog, planned
from ddpdebug.hub import derived, queries, schema
from ddpdebug.hub.auth import COOKIE
from ddpdebug.hub.facts import facts
from ddpdebug.hub.states import LIVE, STATES
from ddpdebug.hub.store import Store
from ddpdebug.reports.html import SWATCHES, lines, path, timeline
from ddpdebug.reports.page import checked, finding_article, report
from ddpdebug.run_directory import mirror
from ddpdebug.schema.finding import Finding, Severity
from ddpdebug.sinks.text import BUNDLE, SEPARATOR
from ddpdebug.sinks.words import clean, number, ranks_text

_STATIC = {"hub.css": "text/css", "hub.js": "text/javascript", "icon.svg": "image/svg+xml"}
#: The report is a page of its own that brings its style along.
_REPORT_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; frame-ancestors 'none'"
_MAX_BUNDLES, _MAX_GROUP = 100, 1000
_MAX_FORM, _MAX_TEXT, _MAX_AUTHOR, _FORM_SECONDS = 16 << 10, 2000, 80, 30.0
_HOURS = (1, 24, 168, 720)
_SPANS = {1: "a day", 7: "a week", 30: "30 days", 0: "all"}
_LOSS = {"highest rank": "#D55E00", "mean": "#0072B2", "lowest rank": "#56B4E9"}
_SECONDS = {"longest": "#D55E00", "mean": "#0072B2"}
_DAY = 86_400.0


class _RefusedError(Exception):
    """A request that has no answer, with its status and what a person should read."""

    def __init__(self, status: int, text: str, headers: Mapping[str, str] | None = None) -> None:
        self.status, self.text, self.headers = status, text, headers


def routes(store: Store) -> list[Route]:
    """Return the routes of the pages, to be served behind `auth.Gate`."""
    pages = _Pages(store)
    return [
        Route("/", pages.answer(pages.runs)),
        Route("/runs/{key}", pages.answer(pages.run)),
        Route("/runs/{key}", pages.take_note, methods=["POST"]),
        Route("/runs/{key}/report", pages.answer(pages.report)),
        Route("/groups", pages.answer(pages.groups)),
        Route("/groups/{group:path}", pages.answer(pages.group)),
        Route("/groups/{group:path}", pages.take_note, methods=["POST"]),
        Route("/static/{name}", _static),
    ]


class _Pages:
    """A method for each page; called in threads."""

    def __init__(self, store: Store) -> None:
        self._store, self._clock = store, store.clock
        self._reporting = Lock()
        self._templates = Environment(
            loader=PackageLoader("ddpdebug.hub"),
            autoescape=True,
            undefined=StrictUndefined,
            finalize=_printable,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        self._templates.filters |= {"ago": self._ago, "stamp": _stamp, "rate": _rate}

    def answer(self, page: Callable[[Request], Response]) -> Callable[[Request], Response]:
        """Return a page that says why where it cannot be shown."""

        def answered(request: Request) -> Response:
            try:
                return page(request)
            except _RefusedError as refused:
                return self._refuse(refused)

        return answered

    def runs(self, request: Request) -> Response:
        """The list of runs."""
        asked = _asked(request)
        with self._store.read() as connection:
            counts = queries.counts(connection, asked)
            rows, more = queries.runs(connection, asked)
            curves = queries.sparks(connection, rows)
        shown = [{**self._shown(row), "spark": _spark(curves[row.key])} for row in rows]
        known = {name: value for name, value in asdict(asked).items() if value}

        def query(**changes: object) -> str:
            return "/?" + urlencode({name: value for name, value in {**known, **changes}.items() if value})

        ordered = {state: counts[state] for state in STATES if state in counts}
        return self._page(
            request, "runs.html", title="Runs", asked=asked, runs=shown, more=more, counts=ordered, query=query,
            sorts=list(queries.SORTS), needs=_needs(counts),
        )  # fmt: skip

    def run(self, request: Request) -> Response:
        """One run."""
        key = derived.text(request.path_params["key"])
        with self._store.read() as connection:
            row = self._known(queries.run(connection, key), key)
            curves = queries.curves(connection, key)
            found = queries.findings(connection, key)
            ranks = queries.ranks(connection, key)
            listed = queries.document(connection, key, mirror.BUNDLES)
            notes = queries.notes(connection, run=key)
            groups = queries.sizes(connection, {one.group for one in found})
            of_groups = queries.notes(connection)
        document = queries.parsed(row.document)
        document = document if isinstance(document, dict) else {}
        known = facts(document)
        read = [(one, finding) for one in found if (finding := Finding.read(one.document)) is not None]
        articles = [
            Markup(finding_article(finding, self._more(one, place, groups[one.group], of_groups)))  # noqa: S704 - it escapes
            for place, (one, finding) in enumerate(read)
        ]
        marks = {one.step: f"{one.code}: {clean(one.title, 120)}" for one in reversed(found) if one.step is not None}
        place, bundles = _bundles(listed, [finding for _, finding in read])
        settings = [item for item in known.items() if item[0].startswith("ddpdebug ")]
        return self._page(
            request, "run.html", title=_name(row), run=self._shown(row), tiles=_tiles(row, document, found),
            waiting=_waiting(document), articles=articles, left_out=(row.findings or 0) - len(articles),
            charts=_charts(curves, marks), ranks=[_rank(one, live=row.state in LIVE) for one in ranks],
            place=place, bundles=bundles, settings=settings,
            facts=[item for item in known.items() if item not in settings], notes=notes,
        )  # fmt: skip

    def report(self, request: Request) -> Response:
        """The full report, from the mirrored files; one at a time, as it reads all rows."""
        key = derived.text(request.path_params["key"])
        if not self._reporting.acquire(blocking=False):  # who waited here would keep a thread from all other pages
            raise _RefusedError(503, "another report is being made; try again in a few seconds", {"Retry-After": "5"})
        with ExitStack() as until_made:
            until_made.callback(self._reporting.release)
            with self._store.read() as connection:
                self._known(queries.run(connection, key), key)
                place, _ = _bundles(queries.document(connection, key, mirror.BUNDLES), [])
                directory = until_made.enter_context(self._store.copied(connection, key))
            try:
                page = report(directory, name=place or key)
            except ValueError as error:  # another version's
                words = clean(str(error).replace(f"{directory}/", ""))
                raise _RefusedError(409, f"no report can be made of it: {words}") from None
        return HTMLResponse(page, headers={"Content-Security-Policy": _REPORT_POLICY})

    def groups(self, request: Request) -> Response:
        """Findings of one kind across runs."""
        days = _whole(request, "days", 7, {number: number for number in _SPANS})
        since = self._clock() - days * _DAY if days else 0.0
        with self._store.read() as connection:
            rows = queries.groups(connection, since)
            notes = queries.notes(connection)
        shown = [self._group(row, notes) for row in rows]
        return self._page(request, "groups.html", title="Findings across runs", groups=shown, days=days, spans=_SPANS)

    def group(self, request: Request) -> Response:
        """One kind of finding: the runs that have it, and the runbook."""
        name = derived.text(request.path_params["group"], _MAX_GROUP)
        with self._store.read() as connection:
            rows = queries.groups(connection, 0.0, group=name)
            if not rows:
                raise _RefusedError(404, f"no findings {clean(name, 80)}")
            members = queries.in_group(connection, name)
            notes = queries.notes(connection, group=name)
        shown = [
            {
                **self._shown(row), "step": row.step, "raised": row.raised,
                "ranks_shown": ranks_text(known) if (known := _integers(row.ranks)) else "",
                "subject_shown": clean(", ".join(map(str, queries.parsed(row.subject) or [])), 120),
            }
            for row in members
        ]  # fmt: skip
        told = self._group(rows[0], notes)
        prose = _runbooks().get(rows[0].code)
        return self._page(
            request, "group.html", title=f"{rows[0].code}", group=told, members=shown, notes=notes, runbook=prose
        )

    async def take_note(self, request: Request) -> Response:
        """A note, an acknowledgement or a mute; who may write is decided before."""
        try:
            async with asyncio.timeout(_FORM_SECONDS):
                fields = await _form(request)
            await run_in_threadpool(self._note, request.path_params, fields)
        except TimeoutError:
            return self._refuse(_RefusedError(408, "the note did not come in time"))
        except ClientDisconnect:
            return self._refuse(_RefusedError(400, "the note is cut off"))
        except _RefusedError as refused:
            return self._refuse(refused)
        return RedirectResponse(quote(request.scope["path"]), status_code=303)

    def _note(self, about: Mapping[str, str], fields: Mapping[str, str]) -> None:
        key, group = (None if name not in about else derived.text(about[name], _MAX_GROUP) for name in ("key", "group"))
        kind, text = fields.get("kind", "note"), fields.get("text", "").strip()
        if kind not in ({"note", "ack", "mute"} if group else {"note"}):
            raise _RefusedError(400, f"there is no kind of note {clean(kind, 40)}")
        if kind == "note" and not text:
            raise _RefusedError(400, "the note is empty")
        hours = fields.get("hours", "24")
        if kind == "mute" and hours not in map(str, _HOURS):
            raise _RefusedError(400, f"a finding is muted for {', '.join(map(str, _HOURS))} hours")
        with self._store.read() as connection:
            known = queries.run(connection, key) if key else queries.groups(connection, 0.0, group=group)
        if not known:
            raise _RefusedError(404, f"nothing is known of {clean(key or group, 80)}")
        until = self._clock() + 3600.0 * int(hours) if kind == "mute" else None
        row = {"kind": kind, "run": key, "group": group, "time": self._clock(), "until": until}
        row |= {
            "text": derived.text(text, _MAX_TEXT),
            "author": derived.text(fields.get("author", "").strip(), _MAX_AUTHOR),
        }
        with self._store.write(key or "") as connection:
            connection.execute(insert(schema.note).values(row))

    def _page(self, request: Request, template: str, **values: Any) -> Response:
        about = {"may_write": request.scope["access"] == "write", "may_leave": COOKIE in request.cookies}
        return HTMLResponse(self._templates.get_template(template).render(values, **about))

    def _refuse(self, refused: _RefusedError) -> Response:
        page = self._templates.get_template("refused.html").render(
            title=f"Error {refused.status}", text=refused.text, may_leave=False
        )
        return HTMLResponse(page, refused.status, refused.headers)

    def _known(self, row: Any, key: str) -> Any:
        if row is None:
            raise _RefusedError(404, f"no run {clean(key, 80)}")
        return row

    def _shown(self, row: Any) -> dict[str, Any]:
        """Return what is shown of a run wherever it is named."""
        about = [row.owner, f"job {row.job}" if row.job else "", row.node, row.name and row.key]
        about += ["" if row.world is None else f"{row.world} ranks" if row.world != 1 else "1 rank"]
        told = {name: value for name, value in row._mapping.items() if name != "document"}  # noqa: SLF001 - SQLAlchemy's
        return {**told, "shown": _name(row), "about": SEPARATOR.join(clean(part, 80) for part in about if part)}

    def _more(self, one: Any, place: int, group: Any, notes: Sequence[Any]) -> str:
        """Return what stands below a finding: its runbook, the way to its group, and what somebody has said of that."""
        macro = self._templates.get_template("parts.html").module.more  # type: ignore[attr-defined] # of the template
        word, _ = self._said(notes, one.group, group.told)
        return str(macro(_runbooks().get(one.code), f"runbook-{place}", _link(one.group), group.runs - 1, word))

    def _group(self, row: Any, notes: Sequence[Any]) -> dict[str, Any]:
        """Return a group as it is shown."""
        word, quiet = self._said(notes, row.group, row.told)
        return {
            "code": row.code, "title": row.title, "link": _link(row.group), "runs": row.runs, "live": row.live,
            "since": row.since, "newest": row.newest, "word": word, "quiet": quiet,
            "severity": Severity(row.gravity).label if row.gravity >= 0 else "",
            "kind": row.group.removeprefix(row.code).strip(),
        }  # fmt: skip

    def _said(self, notes: Sequence[Any], group: str, told: float) -> tuple[str, bool]:
        """Return in words what the newest of the notes come to, and whether a group needs no attention now.

        Args:
            told: when the hub was told of a finding of the group last.
        """
        for note in notes:  # the newest first
            who = note.author or "somebody"
            if note.group != group:
                continue
            if note.kind == "mute" and (note.until or 0.0) > self._clock():
                return f"muted until {_stamp(note.until)} by {who}", True
            if note.kind == "ack":
                quiet = note.time >= told
                return f"acknowledged {self._ago(note.time)} by {who}{'' if quiet else '; seen again since'}", quiet
        return "", False

    def _ago(self, seconds: float) -> str:
        """Return a time in words beside now: `12 s ago`, `3 h ago`, and the day for what is older."""
        past = self._clock() - seconds
        for unit, size, most in (
            ("s", 1.0, 120.0),
            ("min", 60.0, 7200.0),
            ("h", 3600.0, 2 * _DAY),
            ("d", _DAY, 15 * _DAY),
        ):
            if -60.0 < past < most:
                return f"{max(0, round(past / size))} {unit} ago"
        return _stamp(seconds)[:10]


def _static(request: Request) -> Response:
    name = request.path_params["name"]
    if name not in _STATIC:
        return Response("no such file", status_code=404)
    text = resources.files("ddpdebug.hub").joinpath("static", name).read_text(encoding="utf-8")
    text += SWATCHES if name == "hub.css" else ""
    return Response(text, media_type=_STATIC[name], headers={"Cache-Control": "max-age=300"})


@cache
def _runbooks() -> dict[str, dict[str, Any]]:
    """Return code -> prose."""
    return {**planned(), **{rule.code: runbook(rule) for rule in catalog()}}


async def _form(request: Request) -> dict[str, str]:
    body = b""
    async for part in request.stream():
        body += part
        if len(body) > _MAX_FORM:
            raise _RefusedError(413, "that is too long for a note")
    return {name: values[-1] for name, values in parse_qs(body.decode("utf-8", "replace")).items()}


def _asked(request: Request) -> queries.Asked:
    given = {name: derived.text(request.query_params.get(name, "").strip()) for name in ("state", "q", "code", "sort")}
    for name, valid in (("state", STATES), ("sort", queries.SORTS)):
        if given[name] and given[name] not in valid:
            raise _RefusedError(400, f"there is no {name} {clean(given[name], 40)!r}; there are {', '.join(valid)}")
    page = _whole(request, "page", 0, range(1000))
    return queries.Asked(**{name: value for name, value in given.items() if value}, page=page)


def _whole(request: Request, name: str, default: int, valid: Any) -> int:
    text = request.query_params.get(name, "") or str(default)
    if not (text.isascii() and text.isdecimal() and len(text) < 9 and int(text) in valid):
        raise _RefusedError(400, f"{name} is no valid number: {clean(text, 40)!r}")
    return int(text)


def _printable(value: object) -> object:
    """Return what a template writes: texts of jobs without what steers a terminal or the direction of writing."""
    if not isinstance(value, str) or isinstance(value, Markup) or value.isprintable():
        return value
    return "".join(c if c.isprintable() or c == "\n" else clean(c) for c in value)


def _name(row: Any) -> str:
    return clean(row.name or row.key, 80)


def _link(group: str) -> str:
    return f"/groups/{quote(group, safe='')}"


def _stamp(seconds: float) -> str:
    try:
        return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    except (ValueError, OverflowError, OSError):  # a clock that is wrong
        return "some time"


def _rate(rate: float) -> str:
    return f"{number(rate, 3)} steps/s" if rate >= 1 else f"{number(1 / rate, 3)} s a step"


def _needs(counts: Mapping[str, int]) -> str:
    """Return in one sentence what of the runs needs a person: first those that go on, and can still be helped."""
    going = {state: counts[state] for state in ("hung", "ill") if counts.get(state)}
    ended = {state: counts[state] for state in ("failed", "lost") if counts.get(state)}
    listed = ", ".join(f"{count} {state}" for state, count in {**going, **ended}.items())
    if not going:
        return "No running run needs attention" + (f"; of those that have ended: {listed}." if ended else ".")
    one = sum(going.values()) == 1
    return f"{sum(going.values())} run{' needs' if one else 's need'} attention: {listed}."


def _spark(points: Sequence[tuple[int, float]]) -> Markup:
    """Return a small curve; nothing for less than two points."""
    if len(points) < 2:
        return Markup("")
    steps, values = [step for step, _ in points], [value for _, value in points]
    low, wide = min(values), (max(values) - min(values)) or 1.0
    long = (steps[-1] - steps[0]) or 1
    drawn = path((2 + 96 * (step - steps[0]) / long, 22 - 20 * (value - low) / wide) for step, value in points)
    label = f"loss from {number(values[0])} to {number(values[-1])}"
    svg = f'<svg viewBox="0 0 100 24" preserveAspectRatio="none"><title>{label}</title><path d="{drawn}"/></svg>'
    return Markup(svg)  # noqa: S704 - numbers only


def _tiles(row: Any, document: Mapping[str, Any], found: Sequence[Any]) -> list[tuple[str, str, str]]:
    """Return name, value and colour of what stands at the head of a run's page."""
    outcome = document.get("outcome")
    reason = outcome.get("reason") if isinstance(outcome, Mapping) else None
    severe = sum(one.severity in {"error", "critical"} for one in found)
    bad = row.state in {"ill", "hung", "failed"}
    return [
        ("Findings", f"{row.findings}, {severe} severe", "bad" if severe else "warn" if row.findings else "good"),
        ("Step", "none yet" if row.last_step is None else str(row.last_step), ""),
        ("Rate", _rate(row.rate) if row.rate else "not known", ""),
        ("Checked", *checked(document)),
        (
            "Outcome",
            clean(reason or ("none: it has fallen silent" if row.state == "lost" else "still running"), 120),
            "bad" if bad else "warn" if row.state == "lost" else "good" if row.outcome else "",
        ),
    ]


def _waiting(document: Mapping[str, Any]) -> str:
    known = document.get("waiting")
    if not isinstance(known, Mapping):
        return ""
    ranks = known.get("ranks")
    who = ranks_text(ranks) if isinstance(ranks, list) and all(type(rank) is int for rank in ranks) and ranks else ""
    place = f" at {known['location']}" if known.get("location") else ""
    return clean(f"ranks wait for {who or 'others'}{place}: {known.get('state')}", 300)


def _charts(curves: queries.Curves, marks: Mapping[int, str]) -> dict[str, Markup]:
    few = dict(list(marks.items())[:20])
    alone = '<p class="none">there is one rank, or nothing was compared</p>'
    return {
        "agreement": Markup(timeline(curves.agreement, curves.steps, few) if curves.agreement else alone),  # noqa: S704 - these escape
        "loss": Markup(lines(curves.loss, curves.steps, few, "", _LOSS)),  # noqa: S704 - it escapes
        "pace": Markup(lines(curves.seconds, curves.steps, few, "s", _SECONDS)),  # noqa: S704 - it escapes
    }


def _rank(row: Any, *, live: bool) -> dict[str, Any]:
    """Return a rank as the table shows it; only addresses of the web become links, while somebody answers there."""
    local = None if row.local_rank is None else f"local rank {row.local_rank}"
    url = row.metrics_url or ""
    return {
        **row._mapping,  # noqa: SLF001 - SQLAlchemy's
        "place": SEPARATOR.join(clean(part, 80) for part in (row.node, row.device, local) if part),
        "link": url if live and not row.outcome and url.startswith(("http://", "https://")) else "",
    }


def _bundles(listed: Any, found: Sequence[Finding]) -> tuple[str, list[str]]:
    """Return where the run directory is, and the bundles in it: those of findings first."""
    told = listed if isinstance(listed, Mapping) else {}
    place, kept = told.get("directory"), told.get("bundles")
    place = place if isinstance(place, str) else ""
    names = [str(finding.evidence[BUNDLE]) for finding in found if BUNDLE in finding.evidence]
    shown = {name.rpartition("/")[2] for name in names}
    names += [
        f"{place}/{name}"
        for name in (kept if isinstance(kept, list) else ())
        if str(name).rpartition("/")[2] not in shown
    ]
    return clean(place, 1000), [clean(name, 1000) for name in dict.fromkeys(names)][:_MAX_BUNDLES]


def _integers(text: str) -> list[int]:
    known = queries.parsed(text)
    return [one for one in known if type(one) is int] if isinstance(known, list) else []
