"""Access control of the hub: the gate before all pages. ASGI middleware, the only place that decides about access.

Without tokens the hub serves this machine alone: it binds a loopback address, and answers only requests that name one,
so that no page elsewhere can reach it under a name of its own. With tokens machines send `Authorization: Bearer`, and
browsers get a cookie for a token once. What changes something must come from a page of the hub itself, or from no page.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import ipaddress
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any
from urllib.parse import parse_qs, quote, urlsplit

from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, RedirectResponse, Response
from starlette.routing import Route

from ddpdebug.errors import UsageError

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

COOKIE = "ddpdebug_hub"
#: Shorter tokens can be guessed.
LEAST = 16
_DAYS = 30 * 86400
#: Seconds in which a token must have come.
_BODY_SECONDS = 30.0
#: Where programs ask about runs: what they post changes nothing.
ASKED = "/mcp"
_SAFE = frozenset({"GET", "HEAD", "OPTIONS"})
#: Seen by whom nothing is known of.
_OPEN = ("/healthz", "/login", "/static/")
_HEADERS = {
    "content-security-policy": "default-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'self'",
    "referrer-policy": "same-origin",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
}
_LOGIN = """<!doctype html>
<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>ddpdebug hub</title><link rel="stylesheet" href="/static/hub.css">
<main><h1>ddpdebug hub</h1><form method="post"><p>{}</p>
<p><label>Token <input type="password" name="token" autocomplete="current-password" required autofocus></label>
<button>Log in</button></p></form></main></html>
"""


def is_loopback(host: str) -> bool:
    """Whether a host name or address is a loopback one."""
    try:
        return host == "localhost" or ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


class Auth:
    """The tokens of a hub.

    Args:
        write: for everything; None where the hub serves this machine alone.
        read: for looking only.

    Raises:
        UsageError: a token can be guessed, or both are the same.
    """

    def __init__(self, write: str | None = None, read: str | None = None) -> None:
        for name, token in (("DDPDEBUG_HUB_TOKEN", write), ("DDPDEBUG_HUB_READ_TOKEN", read)):
            if token is not None and (len(token) < LEAST or not token.isascii() or not token.isprintable()):
                raise UsageError(
                    f"{name} must have {LEAST} characters or more, of ASCII; "
                    "make one with: python -c 'import secrets; print(secrets.token_urlsafe())'"
                )
        if read is not None and (write is None or read == write):
            raise UsageError("DDPDEBUG_HUB_READ_TOKEN needs a DDPDEBUG_HUB_TOKEN that is another one")
        self._tokens = {level: token for level, token in (("write", write), ("read", read)) if token is not None}

    @property
    def required(self) -> bool:
        """Whether a token is required."""
        return bool(self._tokens)

    def level(self, token: str) -> str | None:
        """Return the access level of a token, `read` or `write`; None if it is unknown."""
        found = None
        for level, known in self._tokens.items():  # all of them, however long that takes
            if hmac.compare_digest(_hash(token), _hash(known)):
                found = level
        return found

    def cookie(self, level: str) -> str:
        """Return the cookie that a browser keeps instead of a token; a new token makes it invalid."""
        return f"{level}.{hmac.new(self._tokens[level].encode(), level.encode(), hashlib.sha256).hexdigest()}"

    def level_of_cookie(self, value: str) -> str | None:
        """Return the access level of a cookie; None if it is invalid."""
        level = value.partition(".")[0]
        known = self.cookie(level) if level in self._tokens else ""
        return level if known and hmac.compare_digest(_hash(value), _hash(known)) else None


def _hash(text: str) -> bytes:
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).digest()


class Gate:
    """ASGI middleware that passes on permitted requests only; `scope["access"]` is then `read` or `write`."""

    def __init__(self, app: App, auth: Auth) -> None:
        self._app, self._auth = app, auth

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or pass it on."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            return

        async def send_safely(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                headers = list(message.get("headers", ()))
                known = {name.lower() for name, _ in headers}
                headers += [(n.encode(), v.encode()) for n, v in _HEADERS.items() if n.encode() not in known]
                message = {**message, "headers": headers}
            await send(message)

        request = Request(scope)
        answer = self._refusal(request)
        await (self._app if answer is None else answer)(scope, receive, send_safely)

    def _refusal(self, request: Request) -> Response | None:
        host = request.headers.get("host", "")
        if not self._auth.required and not is_loopback(_name(host)):
            return _error(421, "this hub serves this machine only, under 127.0.0.1 or localhost")
        level = self._level(request)
        request.scope["access"] = level
        path = request.scope["path"]  # what the application goes by; of the URL a part is the Host header's
        if request.method not in _SAFE and not _from_here(request, host):
            return _error(403, "this was sent from a page of another site")
        if level is None and not path.startswith(_OPEN):
            if request.method == "GET" and "text/html" in request.headers.get("accept", ""):
                query = request.scope["query_string"].decode("latin-1")
                return RedirectResponse(f"/login?next={quote(path + (query and f'?{query}'), safe='/')}", 303)
            return _error(401, "a token is needed: Authorization: Bearer", {"WWW-Authenticate": "Bearer"})
        if request.method not in _SAFE and path not in {"/login", ASKED} and level != "write":
            return _error(403, "the token is for reading only")
        return None

    def _level(self, request: Request) -> str | None:
        if not self._auth.required:
            return "write"
        kind, _, token = request.headers.get("authorization", "").partition(" ")
        if kind.lower() == "bearer":
            return self._auth.level(token.strip())
        return self._auth.level_of_cookie(request.cookies.get(COOKIE, ""))


def _name(host: str) -> str:
    """Return the name in a Host header, without the port."""
    return host.partition("]")[0] + "]" if host.startswith("[") else host.partition(":")[0]


def _from_here(request: Request, host: str) -> bool:
    """Whether a request comes from a page of this hub, or from no browser at all."""
    origin = request.headers.get("origin")
    if origin is None:
        return request.headers.get("sec-fetch-site", "none") in {"none", "same-origin"}
    return urlsplit(origin).netloc == host


def _error(status: int, message: str, headers: dict[str, str] | None = None) -> Response:
    return JSONResponse({"error": message}, status, headers)


def routes(auth: Auth) -> list[Route]:
    """Return the routes of the pages for logging in and out."""

    async def login(request: Request) -> Response:
        if request.method == "GET":
            return HTMLResponse(_LOGIN.format("The token of this hub:"))
        body = b""
        try:
            async with asyncio.timeout(_BODY_SECONDS):
                async for part in request.stream():
                    body += part
                    if len(body) > 4096:
                        return _error(413, "that is no token")
        except TimeoutError:
            return _error(408, f"the token did not come within {_BODY_SECONDS:g} seconds")
        level = auth.level(parse_qs(body.decode("utf-8", "replace")).get("token", [""])[0].strip())
        if level is None:
            return HTMLResponse(_LOGIN.format("This is not the token of this hub."), 403)
        to = request.query_params.get("next", "/")
        answer = RedirectResponse(to if to.startswith("/") and not to.startswith(("//", "/\\")) else "/", 303)
        secure = "https" in {request.scope["scheme"], request.headers.get("x-forwarded-proto")}
        answer.set_cookie(COOKIE, auth.cookie(level), _DAYS, httponly=True, samesite="lax", secure=secure)
        return answer

    async def logout(_: Request) -> Response:
        answer = RedirectResponse("/login", 303)
        answer.delete_cookie(COOKIE)
        return answer

    found = [Route("/login", login, methods=["GET", "POST"]), Route("/logout", logout, methods=["POST"])]
    return found if auth.required else []
