"""The only module that talks to Grafana: wraps grafana-api, with its errors and its gaps. Torch-free.

grafana-api leaks the errors of its HTTP library, does not encode query strings and knows no dashboard uids; what it
lacks goes through its session. grafana-client from version 4 on must not take its place: it replaces urllib3 for the
whole environment.
"""

from __future__ import annotations

import os
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
    """Grafana refused or failed a request; the message never contains the token."""


def read_token(file: Path | None) -> str:
    """Return the token from a file or from the environment; raise UsageError if there is none."""
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
    """The address did not answer; the next request would fail as well."""


class Grafana:
    """One Grafana server.

    Raises:
        UsageError: the address is none, or grafana-api is not installed.
    """

    def __init__(self, url: str, token: str) -> None:
        parts = urlsplit(url)
        if parts.scheme not in {"http", "https"} or not parts.hostname or parts.username is not None:
            raise UsageError(f"{url!r} is not the address of a Grafana; give http://host:port without a password")
        try:
            from grafana_api.grafana_face import GrafanaFace  # noqa: PLC0415 - an optional dependency
        except ImportError:
            raise UsageError("grafana-api is not installed; pip install 'ddpdebug[grafana]'") from None
        prefix = f"{parts.path.strip('/')}/" if parts.path.strip("/") else ""
        host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
        self._token, self._url = token, f"{parts.scheme}://{parts.netloc}/{prefix}".rstrip("/")
        self._api = GrafanaFace(
            auth=token, host=host, port=parts.port, url_path_prefix=prefix, protocol=parts.scheme, timeout=_TIMEOUT
        ).api

    def folder(self, title: str) -> str:
        """Return the uid of the folder with this title, made if missing; empty for Grafana's General."""
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
        """Save a dashboard under its uid and return its address; refuse to overwrite one that ddpdebug did not make.

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
        from grafana_api.grafana_api import GrafanaException  # noqa: PLC0415 - an optional dependency
        from requests import exceptions  # noqa: PLC0415 - as above

        try:
            return getattr(self._api, method)(path, json=body)
        except GrafanaException as error:
            if missing_is_none and error.status_code == _NOT_FOUND:
                return None
            raise GrafanaError(self._clean(f"Grafana refused {method} {path}: {error.message}")) from None
        except (exceptions.ConnectionError, exceptions.Timeout) as error:
            late = isinstance(error, exceptions.Timeout)
            why = f"nothing within {_TIMEOUT:g} s" if late else _reason(error)
            raise GrafanaUnreachableError(self._clean(f"Grafana did not answer at {self._url}: {why}")) from None
        except (exceptions.RequestException, ValueError, TypeError) as error:
            kind = type(error).__name__
            raise GrafanaError(self._clean(f"Grafana did not answer {method} {path}: {kind}: {error}")) from None

    def _clean(self, text: str) -> str:
        return text.replace(self._token, "***")[:500]


def _reason(error: BaseException | None) -> str:
    """Return why there is no connection, as the system says it: what it is wrapped into says less at length."""
    seen: list[BaseException] = []
    while error is not None and error not in seen:
        seen.append(error)
        if isinstance(error, OSError) and error.strerror:
            return error.strerror.lower()
        inner = [*error.args[:1], getattr(error, "reason", None), error.__cause__, error.__context__]
        error = next((each for each in inner if isinstance(each, BaseException)), None)
    return type(seen[-1]).__name__
