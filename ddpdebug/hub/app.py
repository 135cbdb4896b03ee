"""The hub's HTTP interface for programs, and the ASGI application with all pages. Behind `auth.Gate`."""

from __future__ import annotations

import asyncio
import json
import math
import platform
import re
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager, nullcontext, suppress
from typing import Any
from urllib.parse import urlsplit

from sqlalchemy.exc import SQLAlchemyError
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import BaseRoute, Route

from ddpdebug.clock import time
from ddpdebug.hub import auth, ingest, states
from ddpdebug.hub.auth import Auth, Gate, is_loopback
from ddpdebug.hub.store import NotWantedError, Store
from ddpdebug.schema.finding import strict
from ddpdebug.sinks.prometheus.discovery import target

#: Seconds in which a body must have come, between two looks for news, and between two signs of life to who listens.
_BODY_SECONDS, _NEWS, _ALIVE = 30.0, 1.0, 15.0
#: Who listens for events, and events that wait for one of these.
_LISTENERS, _WAITING = 500, 1000
#: Seconds back for which news are looked for again: with several hubs they are not seen in their order.
_OVERLAP = 5.0
_MOST = 1000
_CODE = re.compile(r"[A-Z]{2,5}\d{3}")
_ADDRESS = re.compile(r"[\w.-]+|\[[0-9a-fA-F:.]+\]")


class Api:
    """The HTTP interface for programs.

    Args:
        clock: seconds since the epoch.
    """

    def __init__(self, store: Store, feed: Feed, clock: Callable[[], float] = time.time) -> None:
        self._store, self._clock = store, clock
        self._batches, self._bytes = Counter[int](), 0  # by status of HTTP
        self._seconds, self._begun = 0.0, clock()
        self.feed = feed

    def routes(self) -> list[BaseRoute]:
        """Return the routes."""
        get: Sequence[tuple[str, Callable[[Request], Awaitable[Response]]]] = (
            ("/api/v1/runs", self._runs),
            ("/api/v1/runs/{key}", self._run),
            ("/api/v1/runs/{key}/files/{path:path}", self._file),
            ("/api/v1/findings", self._findings),
            ("/api/v1/events", self._events),
            ("/sd", self._sd),
            ("/metrics", self._metrics),
            ("/healthz", self._healthz),
        )
        batch = Route("/api/v1/runs/{key}/batch", self._batch, methods=["POST"])
        return [batch, *(Route(path, answer, methods=["GET"]) for path, answer in get)]

    # --- what comes in ------------------------------------------------------------------------------------------------

    async def _batch(self, request: Request) -> Response:
        begun = time.perf_counter()
        try:
            status, answer = await self._take(request)
        except ingest.BadBatchError as error:
            status, answer = error.status, {"error": str(error)}
        except NotWantedError as error:
            status, answer = 410, {"error": str(error)}
        except (SQLAlchemyError, OSError) as error:  # the disk is full, the database is away: it is tried again
            text = str(getattr(error, "orig", error)).splitlines()[0][:200]
            status, answer = 507, {"error": f"nothing can be stored: {text}"}
        self._batches[status] += 1
        self._seconds += time.perf_counter() - begun
        return JSONResponse(answer, status)

    async def _take(self, request: Request) -> tuple[int, dict[str, Any]]:
        body = await _body(request)
        self._bytes += len(body)
        key = request.path_params["key"]

        def take() -> dict[str, Any]:
            batch = ingest.parse(body, key)
            files = self._store.receive(key, batch.source, batch.pieces, all_files=batch.all_files)
            return {path: {"size": held.size, "digest": held.digest} for path, held in files.items()}

        return 200, {"files": await run_in_threadpool(take)}

    # --- what is asked ------------------------------------------------------------------------------------------------

    async def _runs(self, request: Request) -> Response:
        query = request.query_params
        known = {name: query[name] for name in ("state", "code", "owner", "job", "name", "before") if name in query}
        runs = await run_in_threadpool(self._store.runs, _limit(query.get("limit")), **known)
        return _json({"runs": runs, "now": self._clock()})

    async def _run(self, request: Request) -> Response:
        found = await run_in_threadpool(self._store.run, request.path_params["key"])
        if found is None:
            raise HTTPException(404, "there is no such run")
        return _json(found)

    async def _file(self, request: Request) -> Response:
        where = request.path_params
        data = await run_in_threadpool(self._store.content, where["key"], where["path"])
        if data is None:
            raise HTTPException(404, "there is no such file")
        # what a stranger has written is never shown as a page of the hub
        return Response(data, media_type="application/octet-stream", headers={"Content-Disposition": "attachment"})

    async def _findings(self, request: Request) -> Response:
        since = _number(request.query_params.get("since"), -math.inf)
        limit = _limit(request.query_params.get("limit"))
        found = await run_in_threadpool(self._store.findings, since, limit, request.query_params.get("code"))
        newest = min(found[-1]["first_seen"], self._clock() - _OVERLAP) if found else since
        later = max(since, newest if len(found) < limit else found[-1]["first_seen"])
        return _json({"findings": found, "next": None if math.isinf(later) else later})

    async def _events(self, request: Request) -> Response:
        queue = self.feed.listen()
        if queue is None:
            return JSONResponse({"error": f"{_LISTENERS} listen already"}, 503, {"Retry-After": "10"})

        async def lines() -> AsyncIterator[str]:
            try:
                yield "retry: 2000\n\n"
                while True:
                    try:
                        event = await asyncio.wait_for(queue.get(), _ALIVE)
                    except TimeoutError:
                        yield ": alive\n\n"
                        continue
                    if event is None:  # it was too slow, or the hub ends: the browser comes again
                        return
                    yield event
            finally:
                self.feed.leave(queue)

        return StreamingResponse(lines(), media_type="text/event-stream", headers={"Cache-Control": "no-store"})

    async def _sd(self, _: Request) -> Response:
        targets = await run_in_threadpool(self._store.targets)
        return JSONResponse(list(_targets(targets)))

    async def _metrics(self, _: Request) -> Response:
        runs, found, size = await run_in_threadpool(self._store.counts)
        codes = Counter[tuple[str, str]]()
        for (code, severity), count in found.items():
            codes[code if _CODE.fullmatch(code) else "other", severity] += count
        lines = [
            *_family("ddpdebug_hub_runs", "gauge", ((f'state="{s}"', runs.get(s, 0)) for s in states.STATES)),
            *_family(
                "ddpdebug_hub_findings",
                "gauge",
                ((f'code="{code}",severity="{severity}"', count) for (code, severity), count in sorted(codes.items())),
            ),
            *_family("ddpdebug_hub_mirrored_bytes", "gauge", [("", size)]),
            *_family(
                "ddpdebug_hub_batches_total",
                "counter",
                ((f'status="{status}"', count) for status, count in sorted(self._batches.items())),
            ),
            *_family("ddpdebug_hub_received_bytes_total", "counter", [("", self._bytes)]),
            *_family("ddpdebug_hub_batch_seconds_total", "counter", [("", round(self._seconds, 6))]),
            *_family("ddpdebug_hub_listeners", "gauge", [("", self.feed.listeners)]),
            *_family("ddpdebug_hub_start_time_seconds", "gauge", [("", self._begun)]),
        ]
        return PlainTextResponse("\n".join([*lines, ""]), media_type="text/plain; version=0.0.4")

    async def _healthz(self, _: Request) -> Response:
        try:
            await run_in_threadpool(self._store.is_over, "")
        except SQLAlchemyError as error:
            return JSONResponse({"status": "the database cannot be read", "error": type(error).__name__}, 503)
        return JSONResponse({"status": "ok"})


class Feed:
    """A feed of news for all listeners: one query of the database a second, while there are any.

    Args:
        say: told once of each kind of failure, of these looks and of those of the application.
    """

    def __init__(self, store: Store, say: Callable[[str], None] = print) -> None:
        self._store, self.say = store, say
        self._queues: set[asyncio.Queue[str | None]] = set()
        self._told: dict[tuple[str, str], float] = {}  # (run, finding or nothing) -> which change of it
        self._since = store.clock()

    @property
    def listeners(self) -> int:
        """The number of listeners."""
        return len(self._queues)

    def listen(self) -> asyncio.Queue[str | None] | None:
        """Return a new listener's queue of events, which ends with None; None if there are too many listeners."""
        if len(self._queues) >= _LISTENERS:
            return None
        if not self._queues:
            self._since = self._store.clock()
        queue: asyncio.Queue[str | None] = asyncio.Queue(_WAITING)
        self._queues.add(queue)
        return queue

    def leave(self, queue: asyncio.Queue[str | None]) -> None:
        """Remove a listener's queue."""
        self._queues.discard(queue)

    async def run(self) -> None:
        """Query and publish in an endless loop."""

        async def look() -> None:
            if self._queues:
                self._tell(await run_in_threadpool(self._news))

        await _for_ever(look, _NEWS, self.say, "who listens is told nothing now")

    def end(self) -> None:
        """End the queues of all listeners."""
        for queue in list(self._queues):
            self._close(queue)

    def _news(self) -> list[str]:
        now, since = self._store.clock(), self._since - _OVERLAP
        found: list[tuple[tuple[str, str], float, str, Any]] = [
            ((one["key"], ""), one["changed"], "run", one) for one in self._store.runs(changed=since)
        ]
        found += [((one["run"], one["id"]), one["first_seen"], "finding", one) for one in self._store.findings(since)]
        self._told = {what: when for what, when in self._told.items() if when > since}
        self._since = now
        events = []
        for what, when, kind, value in found:
            if self._told.get(what) != when:
                self._told[what] = when
                events.append(f"event: {kind}\ndata: {json.dumps(strict(value))}\n\n")
        return events

    def _tell(self, events: Iterable[str]) -> None:
        for event in events:
            for queue in list(self._queues):
                try:
                    queue.put_nowait(event)
                except asyncio.QueueFull:
                    self._close(queue)

    def _close(self, queue: asyncio.Queue[str | None]) -> None:
        self._queues.discard(queue)
        while not queue.empty():
            queue.get_nowait()
        queue.put_nowait(None)


def create(
    store: Store,
    tokens: Auth,
    *,
    pages: Sequence[BaseRoute] = (),
    feed: Feed | None = None,
    keep: float = math.inf,
    most: float = math.inf,
    every: float = 5.0,
) -> Gate:
    """Return the hub as an ASGI application.

    Args:
        pages: routes of the pages for people.
        feed: what tells news, where the caller wants to end it, or to hear of failures.
        keep, most: runs that are over go after so many seconds, and the oldest while there are more bytes.
        every: seconds between two looks at what nobody tells: who is lost, and what is to go.
    """
    api = Api(store, feed or Feed(store), store.clock)
    asked = _asked(store)

    async def tidy() -> None:
        await run_in_threadpool(store.look_again)
        await run_in_threadpool(store.forget, keep, most)

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        tidying = _for_ever(tidy, every, api.feed.say, "who is lost is not seen now, and nothing is deleted")
        tasks = [asyncio.create_task(api.feed.run()), asyncio.create_task(tidying)]
        async with nullcontext() if asked is None else asked.run():
            yield
        for task in tasks:
            task.cancel()

    async def failed(_: Request, error: Exception) -> Response:
        status = error.status_code if isinstance(error, HTTPException) else 500
        detail = error.detail if isinstance(error, HTTPException) else "the hub has failed to answer; its log has more"
        return JSONResponse({"error": detail}, status)

    async def away(_: Request, error: Exception) -> Response:
        return JSONResponse({"error": f"the database does not answer: {type(error).__name__}"}, 503)

    app = Starlette(
        routes=[*auth.routes(tokens), *api.routes(), Route(auth.ASKED, asked or _unasked, methods=["POST"]), *pages],
        exception_handlers={HTTPException: failed, SQLAlchemyError: away},
        lifespan=lifespan,
    )
    return Gate(app, tokens)


def _asked(store: Store) -> Any:
    """Return what answers over the Model Context Protocol; None where its package is not there, or is another one."""
    try:
        from ddpdebug.hub.asked import Asked  # noqa: PLC0415 - an extra
    except ImportError:
        return None
    return Asked(store, _BODY_SECONDS)


async def _unasked(_: Request) -> Response:
    return JSONResponse({"error": "this needs mcp, of this release; install it with: pip install 'ddpdebug[mcp]'"}, 501)


async def _for_ever(look: Callable[[], Awaitable[None]], every: float, say: Callable[[str], None], what: str) -> None:
    """Look again and again, whatever becomes of one look; say once of each kind of failure what it keeps from."""
    said = set[str]()
    while True:
        try:
            await look()
        except Exception as error:  # noqa: BLE001 - one bad row, or a database that is away, must not end it for good
            if (reason := type(error).__name__) not in said:
                said.add(reason)
                say(f"{what}: {reason}: {' '.join(str(error).split())[:200]}")
        await asyncio.sleep(every)


async def _body(request: Request) -> bytes:
    """Return a body within its bounds in size and time."""
    if _number(request.headers.get("content-length"), 0.0) > ingest.MAX_BODY:
        raise ingest.BadBatchError(413, f"a body may have {ingest.MAX_BODY} bytes")
    parts, size = [], 0
    try:
        async with asyncio.timeout(_BODY_SECONDS):
            async for part in request.stream():
                parts.append(part)
                size += len(part)
                if size > ingest.MAX_BODY:
                    raise ingest.BadBatchError(413, f"a body may have {ingest.MAX_BODY} bytes")
    except TimeoutError:
        raise ingest.BadBatchError(408, f"the body did not come within {_BODY_SECONDS:g} seconds") from None
    except ClientDisconnect:
        raise ingest.BadBatchError(400, "the body is cut off") from None
    return b"".join(parts)


def _json(value: Any) -> Response:
    return Response(json.dumps(strict(value)), media_type="application/json")


def _number(text: str | None, default: float) -> float:
    with suppress(ValueError, TypeError):
        found = float(text or "")
        return default if math.isnan(found) else found
    return default


def _limit(text: str | None) -> int:
    return int(min(max(_number(text, _MOST), 1), _MOST))


def _targets(found: Iterable[tuple[str, int, str, str]]) -> Iterable[dict[str, object]]:
    """Yield a target for each rank that Prometheus can reach; a rank's loopback address is its own host's."""
    here = platform.node()
    for _, _, node, url in found:
        with suppress(ValueError):
            parts = urlsplit(url)
            host, port = parts.hostname or "", parts.port
            if parts.scheme not in {"http", "https"} or port is None or not _ADDRESS.fullmatch(host.replace(":", "")):
                continue
            if not is_loopback(host) or node == here:
                address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
                yield target(address, parts.scheme, sd="hub")


def _family(name: str, kind: str, values: Iterable[tuple[str, float]]) -> list[str]:
    return [f"# TYPE {name} {kind}", *(f"{name}{labels and f'{{{labels}}}'} {value}" for labels, value in values)]
