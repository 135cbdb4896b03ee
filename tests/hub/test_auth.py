"""Who gets in: without tokens this machine alone, with them who has one; nobody through a page of somebody else."""

from __future__ import annotations

import asyncio
import urllib.parse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from starlette.datastructures import URL
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from ddpdebug.errors import UsageError
from ddpdebug.hub import auth
from ddpdebug.hub.app import create
from ddpdebug.hub.auth import COOKIE, Auth, Gate, is_loopback
from ddpdebug.hub.store import Store
from tests.hub.runs import MadeUp

WRITE, READ = "w" * 20, "r" * 20
BATCH = f"/api/v1/runs/{MadeUp().key}/batch"


async def _note(request: Request) -> Response:
    return JSONResponse({"access": request.scope["access"]})


@pytest.fixture
def gate(tmp_path: Path) -> Gate:
    return create(
        Store(tmp_path / "hub.sqlite"), Auth(WRITE, READ), pages=[Route("/n", _note, methods=["GET", "POST"])]
    )


@pytest.fixture
def open_gate(tmp_path: Path) -> Gate:
    return create(Store(tmp_path / "hub.sqlite"), Auth(), pages=[Route("/n", _note, methods=["GET", "POST"])])


def ask(
    gate: Gate, path: str, headers: Mapping[str, str] | None = None, body: bytes | None = None, host: str = "hub:8765"
) -> tuple[int, dict[str, str], bytes]:
    """Return status, headers and body of the answer; a body is posted."""
    where = urllib.parse.urlsplit(path)
    names = {"host": host, **{name.lower(): value for name, value in (headers or {}).items()}}
    scope = {
        "type": "http", "http_version": "1.1", "scheme": "http", "method": "GET" if body is None else "POST",
        "path": urllib.parse.unquote(where.path), "raw_path": where.path.encode(), "root_path": "",
        "query_string": where.query.encode(), "headers": [(n.encode(), v.encode()) for n, v in names.items()],
        "server": ("hub", 8765), "client": ("198.51.100.1", 1),
    }  # fmt: skip
    sent: list[Any] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body or b"", "more_body": False}

    async def send(message: Any) -> None:
        sent.append(message)

    asyncio.run(gate(scope, receive, send))
    found = {name.decode(): value.decode() for name, value in sent[0]["headers"]}
    return sent[0]["status"], found, b"".join(message.get("body", b"") for message in sent[1:])


def bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


@pytest.mark.parametrize(
    ("headers", "body", "status"),
    [
        ({}, None, 401),
        ({"Authorization": "Bearer"}, None, 401),
        ({"Authorization": "Basic dzp3"}, None, 401),
        (bearer(""), None, 401),
        (bearer("wrong"), None, 401),
        (bearer(WRITE[:-1]), None, 401),
        (bearer(WRITE + "w"), None, 401),
        (bearer("\xff" * 20), None, 401),
        ({"Cookie": f"{COOKIE}={WRITE}"}, None, 401),
        ({"Cookie": f"{COOKIE}=write.0"}, None, 401),
        ({"Cookie": f"{COOKIE}=admin.0"}, None, 401),
        (bearer(READ), None, 200),
        (bearer(WRITE), None, 200),
        ({}, b"", 401),
        (bearer(READ), b"", 403),
        (bearer(WRITE), b"", 200),
        ({**bearer(WRITE), "Origin": "http://hub:8765"}, b"", 200),
        ({**bearer(WRITE), "Origin": "http://evil.example"}, b"", 403),
        ({**bearer(WRITE), "Origin": "http://hub:8765.evil.example"}, b"", 403),
        ({**bearer(WRITE), "Origin": "null"}, b"", 403),
        ({**bearer(WRITE), "Sec-Fetch-Site": "cross-site"}, b"", 403),
    ],
)
def test_tokens(gate: Gate, headers: dict[str, str], body: bytes | None, status: int) -> None:
    """Who has the token gets in; who may read changes nothing; no page elsewhere does in somebody's name."""
    assert ask(gate, "/n", headers, body)[0] == status


@pytest.mark.parametrize(
    "path", ["/api/v1/runs", "/api/v1/findings", "/api/v1/events", "/sd", "/metrics", "/", "/nothing"]
)
def test_nothing_without_a_token(gate: Gate, path: str) -> None:
    """Nothing but the state of health and the page to log in is seen without a token, not even what there is."""
    status, headers, _ = ask(gate, path)
    assert (status, headers["www-authenticate"]) == (401, "Bearer")
    assert ask(gate, "/healthz")[0] == 200
    assert ask(gate, "/login")[0] == 200
    assert ask(gate, BATCH, {}, b"")[0] == 401


def test_browser_is_led_to_the_login(gate: Gate) -> None:
    """A browser logs in once, with a cookie that no script reads, and comes to where it wanted."""
    status, headers, _ = ask(gate, "/n?a=1&b=2", {"Accept": "text/html"})
    assert (status, headers["location"]) == (303, "/login?next=/n%3Fa%3D1%26b%3D2")
    assert ask(gate, headers["location"], {}, b"token=nothing")[0] == 403
    status, headers, _ = ask(gate, headers["location"], {}, f"token={READ}".encode())
    assert (status, headers["location"]) == (303, "/n?a=1&b=2")
    cookie = headers["set-cookie"]
    assert "HttpOnly" in cookie
    assert "samesite=lax" in cookie.lower()
    assert READ not in cookie
    known = {"Cookie": cookie.partition(";")[0]}
    assert ask(gate, "/n", known)[2] == b'{"access":"read"}'
    assert ask(gate, "/n", known, b"")[0] == 403


@pytest.mark.parametrize("host", ["hub/login?", "hub/static/", "hub/healthz#", "hub:8765/login?x="])
def test_a_host_is_no_path(gate: Gate, monkeypatch: pytest.MonkeyPatch, host: str) -> None:
    """What is open to all is told by what is asked for, whatever the Host header adds to the URL."""

    def url(request: Request) -> URL:  # as Starlette 1.0.0 made it
        return URL(f"http://{request.headers['host']}{request.scope['path']}")

    monkeypatch.setattr(Request, "url", property(url))
    assert ask(gate, "/n", host=host)[0] == 401
    status, headers, _ = ask(gate, "/n?a=b", {"Accept": "text/html"}, host=host)
    assert (status, headers["location"]) == (303, "/login?next=/n%3Fa%3Db")


@pytest.mark.parametrize("place", ["https://evil.example/", "//evil.example", "/\\evil.example", ""])
def test_login_leads_nowhere_else(gate: Gate, place: str) -> None:
    """A link to the login takes nobody to another site."""
    path = f"/login?next={urllib.parse.quote(place, safe='')}"
    assert ask(gate, path, {}, f"token={WRITE}".encode())[1]["location"] == "/"


def test_a_token_that_does_not_come(gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who has no token and begins to send one keeps no connection."""
    monkeypatch.setattr(auth, "_BODY_SECONDS", 0.05)
    sent: list[Any] = []

    async def receive() -> dict[str, Any]:
        await asyncio.sleep(20)
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {
        "type": "http", "method": "POST", "path": "/login", "query_string": b"", "headers": [(b"host", b"hub")],
        "scheme": "http", "root_path": "",
    }  # fmt: skip
    asyncio.run(gate(scope, receive, send))
    assert sent[0]["status"] == 408


def test_another_token_ends_sessions(gate: Gate, tmp_path: Path) -> None:
    """A cookie is worth nothing once the token is another one."""
    cookie = ask(gate, "/login", {}, f"token={WRITE}".encode())[1]["set-cookie"].partition(";")[0]
    assert ask(gate, "/n", {"Cookie": cookie}, b"")[0] == 200
    later = create(Store(tmp_path / "hub.sqlite"), Auth("x" * 20), pages=[Route("/n", _note)])
    assert ask(later, "/n", {"Cookie": cookie})[0] == 401


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1:8765", 200), ("localhost", 200), ("[::1]:8765", 200), ("hub.example", 421), ("", 421),
        ("127.0.0.1.evil.example:8765", 421), ("localhost.evil.example", 421), ("10.0.0.1", 421),
    ],
)  # fmt: skip
def test_this_machine_alone(open_gate: Gate, host: str, status: int) -> None:
    """Without a token the hub answers under names of this machine only: another one may lead here from any page."""
    assert ask(open_gate, "/n", host=host)[0] == status


def test_no_page_elsewhere_writes_here(open_gate: Gate) -> None:
    """Without a token a page of another site changes nothing, though it can send requests here."""
    local = "127.0.0.1:8765"
    assert ask(open_gate, "/n", {}, b"", host=local)[0] == 200
    assert ask(open_gate, "/n", {"Origin": f"http://{local}"}, b"", host=local)[0] == 200
    assert ask(open_gate, "/n", {"Origin": "https://evil.example"}, b"", host=local)[0] == 403


def test_headers(gate: Gate) -> None:
    """Each answer forbids scripts from elsewhere, frames and guesses about its type."""
    for path, headers in (("/n", bearer(WRITE)), ("/n", {}), ("/login", {}), ("/healthz", {}), ("/x", bearer(WRITE))):
        found = ask(gate, path, headers)[1]
        assert found["content-security-policy"].startswith("default-src 'self'; frame-ancestors 'none'")
        assert found["x-content-type-options"] == "nosniff"


@pytest.mark.parametrize(
    ("write", "read"), [("short", None), (None, READ), (WRITE, WRITE), ("ü" * 20, None), (WRITE, "x")]
)
def test_tokens_that_are_none(write: str | None, read: str | None) -> None:
    """Tokens that can be guessed, or that mean two things, are refused in words."""
    with pytest.raises(UsageError, match="DDPDEBUG_HUB"):
        Auth(write, read)


@pytest.mark.parametrize(
    ("host", "loopback"),
    [("127.0.0.1", True), ("127.1.2.3", True), ("::1", True), ("localhost", True), ("0.0.0.0", False), ("::", False),
     ("10.1.1.1", False), ("", False), ("127.0.0.1.example", False)],
)  # fmt: skip
def test_loopback(host: str, loopback: bool) -> None:
    """Only addresses of this machine alone need no token."""
    assert is_loopback(host) is loopback
