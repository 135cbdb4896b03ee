"""Kinds of setting values: how a text becomes a value, and which values messages call valid. Torch-free."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from ddpdebug.disk import mode_of

_TRUE, _FALSE = frozenset({"1", "true", "yes", "on"}), frozenset({"0", "false", "no", "off"})


class Kind(NamedTuple):
    """A kind of values; `parse` raises ValueError or TypeError for anything else."""

    parse: Callable[[Any], Any]
    valid: str  # in words, for messages and the help
    must_exist: bool = False  # a file, which the caller looks for once it knows from where


def switch(value: Any) -> bool:
    """Parse a boolean."""
    text = str(value).lower()
    if text not in _TRUE | _FALSE:
        raise ValueError
    return text in _TRUE


def number(low: float, high: float = math.inf, *, above: bool = False, valid: str = "") -> Kind:
    """Return the kind of numbers in a range; `above` excludes the lower end."""

    def parse(value: Any) -> float:
        number = math.nan if isinstance(value, bool) else float(value)
        if not low <= number <= high or (above and number == low) or number == math.inf:
            raise ValueError
        return number

    return Kind(parse, valid or f"a number from {low:g} {'up' if high == math.inf else f'to {high:g}'}")


def integer(low: int, high: float = math.inf, *, valid: str = "") -> Kind:
    """Return the kind of integers in a range."""

    def parse(value: Any) -> int:
        if isinstance(value, bool | float) or not low <= int(value) <= high:
            raise ValueError
        return int(value)

    return Kind(parse, valid or f"an integer from {low} up")


def one_of(*words: str) -> Kind:
    """Return the kind of a fixed set of words."""

    def parse(value: Any) -> str:
        if value not in words:
            raise ValueError
        return str(value)

    return Kind(parse, f"{', '.join(map(repr, words[:-1]))} or {words[-1]!r}")


def _permissions(value: Any) -> str:
    setting = f"{value:o}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
    mode_of(setting)
    return setting


def _text(value: Any) -> str:
    if not isinstance(value, str) or not value.strip():
        raise ValueError
    return value


def _path(value: Any) -> Path:
    if not isinstance(value, str | Path) or not str(value).strip() or "\0" in str(value):
        raise ValueError
    return Path(value).expanduser()


SWITCH = Kind(switch, "true or false")
#: The mode of new files, of which the text is kept.
PERMISSIONS = Kind(_permissions, "'private', 'umask' or an octal mode like 0640")
DIRECTORY, FILE = Kind(_path, "a directory"), Kind(_path, "a file")
EXISTING_FILE, PEM_FILE = Kind(_path, "a file", must_exist=True), Kind(_path, "a PEM file", must_exist=True)


def _web_address(value: Any) -> str:
    parts = urlsplit(str(value))
    if parts.scheme not in {"http", "https"} or not parts.hostname:
        raise ValueError
    return str(value)


WEB_ADDRESS = Kind(_web_address, "an address that begins with http:// or https://")


def text(valid: str) -> Kind:
    """Return the kind of non-empty texts."""
    return Kind(_text, valid)
