"""The pusher: a small process beside rank 0 that sends new parts of the run directory to a hub. Torch-free.

The job itself opens no connection, resolves no name and compresses nothing: it starts this process, tells it where the
run is, and later that it has ended. So a hub that is slow, dead or hostile reaches nothing of the job; and the process
goes on when the rank has gone, however it went, until the hub has what the run has left. See docs/decisions/034.

The rank's side is `Pusher` in `monitor/served.py`, so that a rank loads none of this; `Post` is for whoever sends a run
directory.
"""

from __future__ import annotations

import http.client
import json
import os
import select
import signal
import socket
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddpdebug.clock import time
from ddpdebug.processes.beside import Channel, GoneError
from ddpdebug.run_directory.mirror import Held, Mirror, Piece, encode

if TYPE_CHECKING:
    from collections.abc import Callable

#: Seconds between two looks; without anything new the hub hears so often that the run goes on.
_EVERY, _WORD = 2.0, 10.0
#: A hub that does not answer is tried again after twice the time each, and at last so often.
_LONGEST = 10.0
#: One that has not answered for so long is said to; at once where it refuses.
_SILENCE = 8.0
_TIMEOUT = 10.0
#: A push may take so long, also where the hub answers a byte at a time: it gives up on one that comes so slowly itself.
_PUSH = 45.0
#: What may be waited for at the end of a rank that nothing outlives.
_LAST_WORDS = 2.0
#: Once the rank has gone, others of the run may still write for so long; a hub that does not answer is given so long.
_AFTER, _PATIENCE = 6.0, 60.0
_MAX_ANSWER = 8 << 20


# --- whoever sends ----------------------------------------------------------------------------------------------------


class RefusedError(Exception):
    """A hub has answered, and refused what was sent.

    Args:
        for_good: it will not take anything of this run.
    """

    def __init__(self, message: str, *, for_good: bool) -> None:
        super().__init__(message)
        self.for_good = for_good


class NoRedirect(urllib.request.HTTPRedirectHandler):
    """Follows no redirects: the token is for the named hub only."""

    def redirect_request(self, *_: Any) -> None:
        """Refuse redirects: another host would get the token."""


class Post:
    """The HTTP client that posts one run to a hub.

    Args:
        token: gives the token of now; empty where none is needed.
        source: `push`, or what else the hub is to know of how it gets the run.
    """

    def __init__(self, url: str, key: str, token: Callable[[], str], source: str = "push") -> None:
        self.url, self._key, self._token, self._source = url.rstrip("/"), key, token, source
        self._opener = urllib.request.build_opener(NoRedirect)

    def send(self, pieces: Sequence[Piece], all_files: bool = False) -> dict[str, Held]:  # noqa: FBT001, FBT002 - as `Mirror.bring` calls it
        """Post a batch; return size and digest of the hub's files.

        Raises:
            RefusedError: the hub does not take it.
            OSError: the hub does not answer, or not as a hub does.
        """
        headers = {"Content-Type": "application/x-ndjson", "Content-Encoding": "gzip"}
        if token := self._token():
            headers["Authorization"] = f"Bearer {token}"
        request = urllib.request.Request(  # noqa: S310 - the scheme is checked where the option is read
            f"{self.url}/api/v1/runs/{self._key}/batch",
            encode(self._key, self._source, pieces, all_files=all_files),
            headers,
        )
        try:
            with self._opener.open(request, timeout=_TIMEOUT) as answer:
                files = json.loads(answer.read(_MAX_ANSWER))["files"]
                return {str(path): Held(int(held["size"]), str(held["digest"])) for path, held in files.items()}
        except urllib.error.HTTPError as error:
            with suppress(OSError, ValueError, LookupError, TypeError, http.client.HTTPException), error:
                error.msg = str(json.loads(error.read(4096))["error"])[:200]
            raise RefusedError(f"{error.code} {error.msg}", for_good=error.code in {409, 410}) from None
        except (http.client.HTTPException, ValueError, LookupError, TypeError, AttributeError) as error:
            raise OSError(f"no hub answers there ({type(error).__name__})") from None


def read_token(environ: Mapping[str, str], file: str | Path | None) -> str:
    """Return the token for a hub: the first line of a file, or DDPDEBUG_HUB_TOKEN; raise OSError without the file."""
    if file:
        with open(file, encoding="utf-8", errors="replace") as lines:  # noqa: PTH123 - pathlib would be loaded
            return lines.readline(4096).strip()
    return environ.get("DDPDEBUG_HUB_TOKEN", "").strip()


# --- the process ------------------------------------------------------------------------------------------------------


def main(words: tuple[int, int]) -> None:
    """Push a run until it has ended and the hub has all of it; ends the process."""
    control, rank = words
    try:
        _Process(Channel(socket.socket(fileno=control)), rank).run()
    finally:
        os._exit(0)


class _Process:
    """What runs beside the rank."""

    def __init__(self, control: Channel, rank: int) -> None:
        self._control, self._rank = control, rank
        self._facts: dict[str, Any] = {}
        self._gone: float | None = None  # since when the rank is not there any more
        self._ended: float | None = None  # since when the run is over, as far as the rank knows
        self._deadline = float("inf")
        self._failing: float | None = None
        self._said = False
        self._pause, self._last = _EVERY, float("-inf")  # when the hub last heard that there is nothing new
        self._sends = False
        signal.signal(signal.SIGALRM, self._late)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._asked)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGALRM, signal.SIGTERM, signal.SIGINT, signal.SIGHUP})

    def _asked(self, *_: object) -> None:
        """Take it that all of the job is being ended: a push or two, and no more."""
        self._deadline = min(self._deadline, time.monotonic() + _LAST_WORDS)
        if self._sends:
            signal.setitimer(signal.ITIMER_REAL, _LAST_WORDS, 1.0)

    def _late(self, *_: object) -> None:
        if self._sends:
            raise TimeoutError("the answer does not come to its end")

    @contextmanager
    def _bounded(self) -> Iterator[None]:
        """Raise TimeoutError in what takes too long, or is in the way of the end."""
        self._sends = True
        signal.setitimer(signal.ITIMER_REAL, max(min(_PUSH, self._deadline - time.monotonic()), 0.1), 1.0)
        try:
            yield
        finally:
            self._sends = False
            signal.setitimer(signal.ITIMER_REAL, 0.0)

    def run(self) -> None:
        """Wait for a run, and push it."""
        while "directory" not in self._facts:
            if self._gone is not None or self._control.gone:
                return
            self._wait(None)
        facts = self._facts
        mirror = Mirror(Path(facts["directory"]))
        environ = {"DDPDEBUG_HUB_TOKEN": facts.get("token", "")}
        post = Post(facts["url"], mirror.key, lambda: read_token(environ, facts.get("token_file")))
        while not self._push(mirror, post):
            now = time.monotonic()
            if now >= self._deadline or (self._ended is not None and now - self._ended > _PATIENCE):
                return
            self._wait(self._pause if self._ended is None else min(self._pause, 1.0))

    def _push(self, mirror: Mirror, post: Post) -> bool:
        """Send what is new; return whether there is nothing more to do, now or later."""
        over = self._is_quiet()
        if over:
            mirror.verify()

        def send(pieces: Sequence[Piece], all_files: bool) -> dict[str, Held]:  # noqa: FBT001 - as `bring` calls it
            with self._bounded():
                return post.send(pieces, all_files)

        try:
            if mirror.bring(send) == 0 and time.monotonic() - self._last >= _WORD:
                mirror.greet(send)
                self._last = time.monotonic()
        except RefusedError as error:
            self._failed(post.url, error, at_once=True, for_good=error.for_good)
            return error.for_good
        except ValueError:  # another run has the directory, or nobody
            return True
        except OSError as error:
            self._failed(post.url, error, at_once=isinstance(getattr(error, "reason", None), ConnectionRefusedError))
            return False
        finally:
            if self._ended is not None:  # whether it worked or not: the rank may wait
                self._tell(done=True)
        self._failing, self._pause = None, _EVERY
        return over

    def _is_quiet(self) -> bool:
        """Whether all that belongs to the run has had time to write how it ended."""
        return self._gone is not None and time.monotonic() - self._gone >= _AFTER

    def _failed(self, url: str, error: Exception, *, at_once: bool, for_good: bool = False) -> None:
        now = time.monotonic()
        self._failing = now if self._failing is None else self._failing
        self._pause = min(_LONGEST, 2 * self._pause)
        if at_once or now - self._failing >= _SILENCE or self._ended is not None:
            self._say(url, error, for_good=for_good)

    def _say(self, url: str, error: Exception, *, for_good: bool) -> None:
        if not self._said:
            self._said = True
            reason = " ".join(str(getattr(error, "reason", None) or error).split())[:200]
            later = f"tried again, and later: ddpdebug hub push {self._facts['directory']}"
            self._tell(trouble=f"the hub at {url} does not take the run: {reason}{'' if for_good else f'; {later}'}")

    def _tell(self, **words: Any) -> None:
        with suppress(GoneError):
            self._control.send(json.dumps(words).encode())

    def _wait(self, seconds: float | None) -> None:
        """Wait for so long, or until the rank says something, or has gone."""
        poll = select.poll()
        if self._rank >= 0:
            poll.register(self._rank, select.POLLIN)
        if not self._control.gone:
            with suppress(GoneError):
                self._facts |= json.loads(self._control.receive(seconds, self._rank) or b"{}")
        elif self._gone is None:
            poll.poll(None if seconds is None else seconds * 1000)
        else:
            time.sleep(seconds or 0.0)
        if self._gone is None and self._control.gone and (self._rank < 0 or poll.poll(0)):
            self._gone = time.monotonic()
        if self._ended is None and ("end" in self._facts or self._gone is not None):
            self._ended = time.monotonic()
