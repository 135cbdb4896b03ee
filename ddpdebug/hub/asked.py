"""The hub's answers to programs that ask about runs over the Model Context Protocol. Needs the extra `mcp`."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import AbstractAsyncContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any

from mcp.server.streamable_http_manager import StreamableHTTPSessionManager
from mcp.server.transport_security import TransportSecuritySettings
from sqlalchemy import func, select
from starlette.responses import JSONResponse

from ddpdebug.errors import UsageError
from ddpdebug.hub import derived, schema
from ddpdebug.hub.store import Store
from ddpdebug.mcp.answers import Answers
from ddpdebug.mcp.server import make_server
from ddpdebug.run_directory.reader import FINDINGS, RUN

_Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
_Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
_KNOWN = (schema.run.c.state, schema.run.c.owner, schema.run.c.job)


class MirroredRuns:
    """The runs of a hub, by their keys; the files of a run are copied while it is read."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def newest(self, most: int) -> tuple[Sequence[str], int]:
        """Return the keys of the newest runs, and the number of all runs."""
        key = schema.run.c.key
        with self._store.read() as connection:
            keys = connection.scalars(select(key).order_by(key.desc()).limit(most)).all()
            return keys, connection.execute(select(func.count()).select_from(schema.run)).scalar_one()

    @contextmanager
    def opened(self, name: str, *, brief: bool = False) -> Iterator[Path]:
        """Yield a temporary copy of a run's directory."""
        self.known(name)
        patterns = (RUN, f"%{FINDINGS}") if brief else ("%",)
        with ExitStack() as held:
            with self._store.read() as connection:  # no longer than it takes to copy
                directory = held.enter_context(self._store.copied(connection, name, patterns))
            yield directory

    def known(self, name: str) -> Mapping[str, Any]:
        """Return the state and the owner of a run."""
        key = derived.text(name)
        with self._store.read() as connection:
            row = connection.execute(select(*_KNOWN).where(schema.run.c.key == key)).mappings().one_or_none()
        if row is None:
            raise UsageError(f"there is no run {name[:200]!r} here; list_runs names them")
        return dict(row)


class Asked:
    """The ASGI application that answers programs. It keeps no state between requests.

    Args:
        patience: seconds in which the body of a request must have come.
    """

    def __init__(self, store: Store, patience: float) -> None:
        self._patience = patience
        server = make_server(Answers(MirroredRuns(store)))
        # whose requests are answered, and under which names, the gate before all pages has decided
        safe = TransportSecuritySettings(enable_dns_rebinding_protection=False)
        server.streamable_http_app(stateless_http=True, json_response=True, transport_security=safe)
        self._manager: StreamableHTTPSessionManager = server.session_manager

    def run(self) -> AbstractAsyncContextManager[None]:
        """Return a context to be held for as long as the application answers."""
        return self._manager.run()

    async def __call__(self, scope: MutableMapping[str, Any], receive: _Receive, send: _Send) -> None:
        """Answer a request."""
        until, whole = asyncio.get_running_loop().time() + self._patience, False

        async def in_time() -> MutableMapping[str, Any]:
            nonlocal whole
            async with asyncio.timeout_at(None if whole else until):
                message = await receive()
            whole = not message.get("more_body", False)
            return message

        try:
            await self._manager.handle_request(scope, in_time, send)
        except TimeoutError:
            late = JSONResponse({"error": f"the body did not come within {self._patience:g} seconds"}, 408)
            await late(scope, receive, send)
