"""The hub's server: socket, database, application and watched directories, until a signal ends it."""

from __future__ import annotations

import asyncio
import signal
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from ddpdebug.errors import UsageError
from ddpdebug.hub.app import Feed, create
from ddpdebug.hub.auth import Auth
from ddpdebug.hub.outgoing import Hook, Outgoing
from ddpdebug.hub.pages import routes
from ddpdebug.hub.store import Store
from ddpdebug.hub.watch import Watch

#: Connections at a time; pages that listen for events keep one each.
_CONNECTIONS = 1000
#: Seconds in which a request must have come up to its body; the application waits for that.
_HEAD_SECONDS = 10.0
#: Seconds that requests have when the hub ends.
_PATIENCE = 3


class Serving:
    """A hub with its address bound and its database open, ready to serve.

    Args:
        data: a file, or the URL of a database.
        keep, most: what is deleted: runs that are over for so many seconds, the oldest beyond so many bytes.

    Raises:
        UsageError: the address cannot be bound, or the database cannot be opened.
    """

    def __init__(
        self, host: str, port: int, data: str, tokens: Auth, watched: Sequence[Path], *, keep: float, most: float
    ) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.socket(family, socket.SOCK_STREAM)
        try:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._socket.bind((host, port))
            self._socket.listen(512)
        except OSError as error:
            self._socket.close()
            raise UsageError(f"cannot serve at {host} port {port}: {error.strerror or error}") from None
        shown = f"[{host}]" if ":" in host else host
        self.url = f"http://{shown}:{self._socket.getsockname()[1]}"
        try:
            self._store = Store(data)
        except UsageError:
            self._socket.close()
            raise
        self.place = self._store.place
        self._watch = Watch(self._store, watched, keep, _say)
        self._outgoing = Outgoing(self._store, ())
        self._feed = Feed(self._store, _say)
        self._app = create(self._store, tokens, pages=routes(self._store), feed=self._feed, keep=keep, most=most)

    def tell(self, hooks: Sequence[Hook], address: str) -> None:
        """Send webhooks while the hub runs.

        Args:
            address: by which people reach the hub; the default is where it serves.
        """
        self._outgoing = Outgoing(self._store, hooks, address=address or self.url, say=_say)

    def run(self) -> int:
        """Serve until SIGINT or SIGTERM; return the exit status."""
        self._watch.start()
        self._outgoing.start()
        config = uvicorn.Config(
            self._app,
            http=Connection,
            log_level="warning",
            access_log=False,
            limit_concurrency=_CONNECTIONS,
            timeout_graceful_shutdown=_PATIENCE,
            server_header=False,
            h11_max_incomplete_event_size=32 << 10,
        )
        server = _Server(config, self._feed)
        # uvicorn raises the signal again once it has ended in order, for whoever had a handler before
        signal.signal(signal.SIGTERM, lambda *_: setattr(server, "should_exit", True))
        try:
            server.run(sockets=[self._socket])
        except KeyboardInterrupt:  # as above
            pass
        finally:
            self._watch.close()
            self._outgoing.close()
            self._store.close()
        return 0


def _say(message: str) -> None:
    print(f"ddpdebug: {message}", file=sys.stderr, flush=True)


class Connection(H11Protocol):
    """A connection that is closed if no complete request comes in time; uvicorn alone would wait for ever."""

    _late: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        """Start the time limit of the first request."""
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        """Pass on received data, and renew or suspend the time limit."""
        super().data_received(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel the time limit."""
        super().connection_lost(exc)
        self._forget()

    def _watch(self) -> None:
        """Wait so long for the other side, and while a request is answered not at all."""
        if self.cycle is not None and not self.cycle.response_complete:
            self._forget()
        elif self._late is None:
            self._late = self.loop.call_later(_HEAD_SECONDS, self.transport.close)

    def _forget(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None


class _Server(uvicorn.Server):
    """A server that lets those go that listen for events, for whose end it would wait."""

    def __init__(self, config: uvicorn.Config, feed: Feed) -> None:
        super().__init__(config)
        self._feed = feed

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End."""
        self._feed.end()
        await super().shutdown(sockets)
