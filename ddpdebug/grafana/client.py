"""The client of Grafana's HTTP interface, for its dashboards. Torch-free."""

from __future__ import annotations

import http.client
import json
import os
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

from ddpdebug.errors import DdpdebugError, UsageError

TAG = "ddpdebug"
#: Where the token comes from, if no file is named; never from the command line, where others can read it.
TOKEN_VARIABLE = "GRAFANA_TOKEN"  # noqa: S105 - the name of a variable
_NOT_FOUND = 404
_PAGE = 1000  # folders
_TIMEOUT = 5.0


class GrafanaError(DdpdebugError):
    """Grafana did not do what it was asked for; the message never holds the token."""


def read_token(file: Path | None) -> str:
    """Return the token from the file, or from the environment; raise UsageError when there is none."""
    if file is None:
        token = os.environ.get(TOKEN_VARIABLE, "")
        if not token.strip():
            raise UsageError(f"no token for Grafana; set {TOKEN_VARIABLE} or name a file with --token-file")
        return token.strip()
    try:
        token = file.read_text(encoding="utf-8").strip()
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot read the token from {str(file)!r}: {error}") from None
    if not token:
        raise UsageError(f"{str(file)!r} is empty; it should hold a token for Grafana")
    return token


class GrafanaUnreachableError(GrafanaError):
    """Nobody answered at the address; the next request would fare alike."""


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Follows nothing: the token is for the server that was named."""

    def redirect_request(self, *_: Any) -> None:
        """Return no other request."""


class Grafana:
    """One Grafana server.

    Raises:
        UsageError: the address is none.
    """

    def __init__(self, url: str, token: str) -> None:
        parts = urlsplit(url)
        if parts.scheme not in {"http", "https"} or not parts.hostname or parts.username is not None:
            raise UsageError(f"{url!r} is not the address of a Grafana; give http://host:port without a password")
        self._token, self._url = token, f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/')}"
        self._opener = urllib.request.build_opener(_NoRedirect)

    def folder(self, title: str) -> str:
        """Return the uid of the folder of this title, made where there is none; empty for Grafana's General."""
        if title.casefold() == "general":
            return ""
        page = 1
        while found := self._call("GET", f"/folders?limit={_PAGE}&page={page}"):
            known = [str(each["uid"]) for each in found if each.get("title") == title]
            if known:
                return known[0]
            if len(found) < _PAGE:
                break
            page += 1
        return str(self._call("POST", "/folders", {"title": title})["uid"])

    def push(self, dashboard: Mapping[str, Any], *, folder: str | None = None, force: bool = False) -> str:
        """Save a dashboard under its uid and return its address; refuse to overwrite what ddpdebug did not make.

        Args:
            folder: the uid of its folder, empty for General; None leaves it where it is.
        """
        uid = str(dashboard["uid"])
        known = self._call("GET", f"/dashboards/uid/{quote(uid)}", missing_is_none=True)
        if known is not None and not force:
            if TAG not in (known.get("dashboard", {}).get("tags") or ()):
                raise GrafanaError(f"a dashboard {uid!r} that ddpdebug did not make is there; --force overwrites it")
            if known.get("meta", {}).get("provisioned"):
                raise GrafanaError(f"dashboard {uid!r} comes from a file of that Grafana; change it there, or --force")
        if folder is None:
            folder = str((known or {}).get("meta", {}).get("folderUid") or "")
        body = {"dashboard": {**dashboard, "id": None}, "overwrite": known is not None, "message": "ddpdebug"}
        return str(self._call("POST", "/dashboards/db", {**body, "folderUid": folder}).get("url", ""))

    def _call(self, method: str, path: str, body: Any = None, *, missing_is_none: bool = False) -> Any:
        request = urllib.request.Request(  # noqa: S310 - the scheme is checked where the address is read
            f"{self._url}/api{path}",
            None if body is None else json.dumps(body).encode(),
            {"Authorization": f"Bearer {self._token}", "Content-Type": "application/json"},
            method=method,
        )
        try:
            with self._opener.open(request, timeout=_TIMEOUT) as answer:
                return json.loads(answer.read())
        except urllib.error.HTTPError as error:
            with error:
                if missing_is_none and error.code == _NOT_FOUND:
                    return None
                why = error.read(4096).decode("utf-8", "replace")
            raise GrafanaError(self._clean(f"Grafana refused {method} {path}: {error.code} {why}")) from None
        except OSError as error:
            why = _reason(error)
            raise GrafanaUnreachableError(self._clean(f"Grafana did not answer at {self._url}: {why}")) from None
        except (http.client.HTTPException, ValueError) as error:
            kind = type(error).__name__
            raise GrafanaError(self._clean(f"Grafana did not answer {method} {path}: {kind}: {error}")) from None

    def _clean(self, text: str) -> str:
        return text.replace(self._token, "***")[:500]


def _reason(error: OSError) -> str:
    """Return why there is no connection, as the system says it."""
    inner = getattr(error, "reason", error)
    if isinstance(inner, TimeoutError):
        return f"nothing within {_TIMEOUT:g} s"
    return str(getattr(inner, "strerror", None) or inner).lower()
