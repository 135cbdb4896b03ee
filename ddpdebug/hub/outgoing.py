"""Webhooks of the hub: messages about findings and about runs that are lost or fail.

Each message is a row before it is sent, so that a hub that is killed sends it later, and of several hubs on one
database one does. Who has the same message twice has it because a hub was killed between sending and noting it.
"""

from __future__ import annotations

import http.client
import json
import math
import threading
import tomllib
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

from sqlalchemy import ColumnElement, Connection, delete, insert, or_, select, update

from ddpdebug.detectors.nature import nature
from ddpdebug.errors import UsageError, did_you_mean
from ddpdebug.hub.schema import delivery, finding, note, run
from ddpdebug.hub.states import STATES
from ddpdebug.hub.store import Store
from ddpdebug.processes.pusher import NoRedirect
from ddpdebug.schema.finding import Finding, Severity
from ddpdebug.schema.likeliest import untagged
from ddpdebug.sinks.text import where
from ddpdebug.sinks.words import clean

#: Of what is older when the hub first sees it nobody is told: runs that are imported, or found on a file system.
_NEWS_SECONDS = 3600.0
#: A message is tried so often, with twice the time between each two tries.
_ATTEMPTS, _FIRST_SECONDS, _MOST_SECONDS = 12, 5.0, 3600.0
_TIMEOUT, _AT_ONCE, _EVERY_SECONDS = 10.0, 50, 2.0
_OK = range(200, 300)
#: Marks what is said of a run among the ids of findings.
_STATE = "state:"
_KEYS = ("url", "codes", "severity", "states")
_COLORS = {
    Severity.CRITICAL: "#b3261e",
    Severity.ERROR: "#d9730d",
    Severity.WARNING: "#c9a227",
    Severity.INFO: "#5b7083",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Hook:
    """A webhook, and a filter for the messages that it gets.

    Args:
        name: in the file, and in what the hub says of it; the address is a secret.
        codes: patterns of the shell.
        severity: the least.
        states: of runs that it is told of.
    """

    name: str
    url: str
    codes: tuple[str, ...] = ("*",)
    severity: Severity = Severity.ERROR
    states: frozenset[str] = frozenset({"lost", "failed"})

    def wants(self, code: str, severity: str) -> bool:
        """Whether findings of a code and severity are sent to the webhook."""
        return Severity.parse(severity) >= self.severity and any(fnmatchcase(code, each) for each in self.codes)


def read_hooks(path: Path) -> tuple[Hook, ...]:
    """Return the webhooks of a TOML file: a table for each, `[NAME]` with `url`, `codes`, `severity` and `states`.

    Raises:
        UsageError: it cannot be read, or something in it is not understood.
    """
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"cannot read the webhooks of {str(path)!r}: {error}") from None
    return tuple(_hook(name, table, f"webhook {name!r} of {str(path)!r}") for name, table in tables.items())


def _hook(name: str, table: object, what: str) -> Hook:
    if not isinstance(table, dict):
        raise UsageError(f"{what} is no table; write [{name}] and its url below")
    for key in table.keys() - {*_KEYS}:
        raise UsageError(f"{what} has an unknown key {key!r}; {did_you_mean(key, _KEYS)}")
    parts = urlsplit(str(table.get("url", "")))
    if parts.scheme not in {"http", "https"} or not parts.hostname:
        raise UsageError(f"{what} needs a url that begins with http:// or https://")
    known: dict[str, Any] = {"name": name, "url": str(table["url"])}
    for key, valid in (("codes", None), ("states", STATES)):
        if key in table:
            words = table[key]
            if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
                raise UsageError(f"{key} of {what} is no list of texts")
            for word in words if valid else ():
                if word not in STATES:
                    raise UsageError(f"{key} of {what}: there is no state {word!r}; {did_you_mean(word, STATES)}")
            known[key] = tuple(words) if valid is None else frozenset(words)
    try:
        known["severity"] = Severity.parse(str(table.get("severity", "error")))
    except ValueError as error:
        raise UsageError(f"severity of {what}: {error}") from None
    return Hook(**known)


#: Sends a body to an address; returns the status of the answer and the seconds after which to come back.
Post = Callable[[str, bytes], tuple[int, float]]


class Outgoing:
    """The outgoing messages of a hub.

    Args:
        address: the hub's, for links.
        say: told once of each target that refuses what it gets for good.
    """

    def __init__(
        self,
        store: Store,
        hooks: Sequence[Hook],
        *,
        address: str = "",
        say: Callable[[str], None] = print,
        post: Post | None = None,
    ) -> None:
        self._store, self._address, self._say = store, address.rstrip("/"), say
        self._hooks = {hook.name: hook for hook in hooks}
        self._post = post or _post
        self._said: set[str] = set()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ddpdebug-hub-outgoing", daemon=True)

    def start(self) -> None:
        """Look for news every few seconds in a thread, if there is a webhook."""
        if self._hooks:
            self._thread.start()

    def close(self) -> None:
        """End the thread; the next hub sends the remaining messages."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(_TIMEOUT + 1)

    def _run(self) -> None:
        while not self._stop.wait(_EVERY_SECONDS):
            try:
                self.look()
            except Exception as error:  # noqa: BLE001 - the disk is full, the database is away: later looks may do better
                if (reason := type(error).__name__) not in self._said:
                    self._said.add(reason)
                    self._say(f"nothing is sent to webhooks: {reason}: {' '.join(str(error).split())[:200]}")

    def look(self) -> int:
        """Record new messages and send those that are due; return the number of messages sent."""
        self._note_new()
        return sum(self._send_to(target) for target in self._waited_for())

    def _send_to(self, target: str) -> int:
        """Send what is due to a target up to the first failure: who is dead delays the others once in a look."""
        sent = 0
        for one in self._due(target):
            arrived = self._send(one)
            if arrived is False:
                break
            sent += arrived is True
        return sent

    # --- what is to be told -------------------------------------------------------------------------------------------

    def _note_new(self) -> None:
        now = self._store.clock()
        since = now - _NEWS_SECONDS
        with self._store.write("outgoing") as connection:
            quiet = _quiet(connection, now)
            about = (finding.c.code, finding.c.severity, finding.c.group, finding.c.first_seen)
            news = (finding.c.first_seen > since) & or_(finding.c.time.is_(None), finding.c.time > since)
            rows = []
            for one in connection.execute(select(finding.c.run, finding.c.id, *about).where(news)):
                hooks = () if one.first_seen <= quiet.get(one.group, -math.inf) else tuple(self._hooks.values())
                rows += [(hook.name, one.run, one.id) for hook in hooks if hook.wants(one.code, one.severity)]
            heard = (run.c.changed > since) & (run.c.last_seen > since) & (run.c.source != "import")
            for key, state in connection.execute(select(run.c.key, run.c.state).where(heard)):
                told = [hook.name for hook in self._hooks.values() if state in hook.states]
                rows += [(name, key, _STATE + state) for name in told]
            _keep(connection, rows, now)

    def _waiting(self) -> ColumnElement[bool]:
        return (delivery.c.done.is_(False)) & (delivery.c.next_at <= self._store.clock())

    def _waited_for(self) -> list[str]:
        with self._store.read() as connection:
            return list(connection.execute(select(delivery.c.target).where(self._waiting()).distinct()).scalars())

    def _due(self, target: str) -> list[Any]:
        due = select(delivery).where(self._waiting(), delivery.c.target == target)
        with self._store.read() as connection:
            return list(connection.execute(due.order_by(delivery.c.next_at).limit(_AT_ONCE)))

    # --- telling ------------------------------------------------------------------------------------------------------

    def _send(self, one: Any) -> bool | None:
        """Send a message; return whether it has arrived, None where there is none or another hub has just taken it."""
        wait = min(_FIRST_SECONDS * 2.0**one.attempts, _MOST_SECONDS)
        mine = (delivery.c.id == one.id) & (delivery.c.attempts == one.attempts) & (delivery.c.done.is_(False))
        message = self._message(one)
        with self._store.write("outgoing") as connection:
            until = self._store.clock() + max(wait, 3 * _TIMEOUT)  # longer than the attempt itself lasts
            taken = update(delivery).where(mine).values(attempts=one.attempts + 1, next_at=until)
            if connection.execute(taken).rowcount != 1:
                return None
        status, later = (200, 0.0) if message is None else self._post(*message)
        arrived = status in _OK
        over = arrived or one.attempts + 1 >= _ATTEMPTS or status in {400, 401, 403, 404, 410}
        if over and not arrived and one.target not in self._said:
            self._said.add(one.target)
            answer = f"answers with {status}" if status else "does not answer"
            self._say(f"the webhook {one.target!r} {answer}; what it should have been told is on the pages")
        with self._store.write("outgoing") as connection:
            change = {"done": True} if over else {"next_at": self._store.clock() + max(wait, later)}
            this = delivery.c.id == one.id
            if message is None and one.finding.startswith(_STATE):  # the run may come to that state once more
                connection.execute(delete(delivery).where(this))
            else:
                connection.execute(update(delivery).where(this).values(**change))
        return None if message is None else arrived

    def _message(self, one: Any) -> tuple[str, bytes] | None:
        """Return address and body of a message; None where what it was about, or who wanted it, has gone.

        A run is told of in the state that it has now.
        """
        with self._store.read() as connection:
            known = connection.execute(select(run).where(run.c.key == one.run)).mappings().first()
            mine = (finding.c.run == one.run) & (finding.c.id == one.finding)
            line = connection.execute(select(finding.c.document).where(mine)).first()
        found = None if line is None else Finding.from_json(line.document)
        row = None if known is None else dict(known)
        if row is None or (found is None and one.finding != _STATE + row["state"]):
            return None
        hook = self._hooks.get(one.target)
        if hook is None:
            return None
        link = f"{self._address}/runs/{quote(one.run)}" if self._address else ""
        told = _of_finding(row, found, link) if found else _of_state(row, one.finding.removeprefix(_STATE), link)
        return hook.url, json.dumps(told).encode()


def _quiet(connection: Connection, now: float) -> dict[str, float]:
    """Return group of findings -> until when they were seen of which nothing is sent, as the pages have it.

    Those are what somebody has acknowledged, and all while the group is muted; the newest note of these decides.
    """
    said = (note.c.kind == "ack") | ((note.c.kind == "mute") & (note.c.until > now))
    notes = select(note.c.group, note.c.kind, note.c.time).where(said & note.c.group.is_not(None))
    ordered = connection.execute(notes.order_by(note.c.time, note.c.id))
    return {group: when if kind == "ack" else math.inf for group, kind, when in ordered}


def _keep(connection: Connection, rows: Sequence[tuple[str, str, str]], now: float) -> None:
    columns = (delivery.c.target, delivery.c.run, delivery.c.finding)
    keys = {key for _, key, _ in rows}
    known = set(connection.execute(select(*columns).where(delivery.c.run.in_(keys)))) if keys else set()
    new = [row for row in dict.fromkeys(rows) if row not in known]
    for target, key, name in new:
        values = {"target": target, "run": key, "finding": name, "next_at": now, "attempts": 0, "done": False}
        connection.execute(insert(delivery).values(**values))


def _name_of(row: Mapping[str, Any]) -> str:
    return clean(row["name"] or row["key"], 100)


def _escaped(text: object) -> str:
    """Return a text in which Slack sees no link, mention or markup."""
    return clean(text, 500).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def _of_finding(row: Mapping[str, Any], found: Finding, link: str) -> dict[str, Any]:
    name = _escaped(_name_of(row))
    place = f"<{link}|{name}>" if link else name
    head = f"{found.severity.label} {found.code} in {place}: {_escaped(found.title)}"
    subject = ", ".join(map(_escaped, found.subject[:3])) or "-"
    fields = [("where", _escaped(where(found, row["world"] or 1))), ("what", subject)]
    fields += [("next", _escaped(untagged(found.actions[0])))] if found.actions else []
    fields += [("restart", f"{known.value}: {known.advice}")] if (known := nature(found)) else []
    return _slack(head, fields, _COLORS[found.severity])


def _of_state(row: Mapping[str, Any], state: str, link: str) -> dict[str, Any]:
    name = _escaped(_name_of(row))
    place = f"<{link}|{name}>" if link else name
    known = (("owner", row["owner"]), ("job", row["job"]), ("step", row["last_step"]), ("outcome", row["outcome"]))
    fields = [(key, _escaped(value)) for key, value in known if value not in {None, ""}]
    return _slack(f"the run {place} is {state}", fields, _COLORS[Severity.CRITICAL])


def _slack(text: str, fields: Sequence[tuple[str, str]], color: str) -> dict[str, Any]:
    shown = [{"title": title, "value": value, "short": len(value) < 40} for title, value in fields]
    return {"text": text, "attachments": [{"color": color, "fallback": text, "fields": shown}]}


def _post(url: str, body: bytes) -> tuple[int, float]:
    """Send a body; return the status of the answer, 0 where there is none, and the seconds after which to come back."""
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"})  # noqa: S310 - checked
    try:
        with urllib.request.build_opener(NoRedirect).open(request, timeout=_TIMEOUT) as answer:
            return int(answer.status), 0.0
    except urllib.error.HTTPError as error:
        with error:
            later = error.headers.get("Retry-After", "")
        return error.code, min(float(later), _MOST_SECONDS) if later.isdecimal() else 0.0
    except (OSError, ValueError, http.client.HTTPException):
        return 0, 0.0
