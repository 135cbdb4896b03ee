"""How the text of a setting becomes a value; each parser raises ValueError for anything else. Torch-free."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from ddpdebug.disk import mode_of

_TRUE, _FALSE = frozenset({"1", "true", "yes", "on"}), frozenset({"0", "false", "no", "off"})
Parse = Callable[[Any], Any]


def switch(value: Any) -> bool:
    """Read true or false."""
    text = str(value).lower()
    if text in _TRUE:
        return True
    if text in _FALSE:
        return False
    raise ValueError


def number(low: float, high: float = float("inf"), *, above: bool = False) -> Parse:
    """Return a parser of numbers in a range; `above` leaves the lower end out."""

    def parse(value: Any) -> float:
        if isinstance(value, bool):
            raise ValueError  # noqa: TRY004 - one kind of refusal for all sources
        number = float(value)
        if not low <= number <= high or (above and number == low) or number == float("inf"):
            raise ValueError
        return number

    return parse


def integer(low: int, high: int | None = None) -> Parse:
    """Return a parser of whole numbers in a range."""

    def parse(value: Any) -> int:
        if isinstance(value, bool | float):
            raise ValueError  # noqa: TRY004 - one kind of refusal for all sources
        number = int(value)
        if number < low or (high is not None and number > high):
            raise ValueError
        return number

    return parse


def one_of(*valid: str) -> Parse:
    """Return a parser of one of some words."""

    def parse(value: Any) -> str:
        if value not in valid:
            raise ValueError
        return str(value)

    return parse


def permissions(value: Any) -> str:
    """Read the mode of new files: `private`, `umask`, or octal digits, of which the text is kept."""
    setting = f"{value:o}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
    mode_of(setting)
    return setting


def text(value: Any) -> str:
    """Read a text that says something."""
    if not isinstance(value, str) or not value.strip():
        raise ValueError
    return value


def path(value: Any) -> Path:
    """Read the path of a file or a directory."""
    if not isinstance(value, str | Path) or not str(value).strip() or "\0" in str(value):
        raise ValueError
    return Path(value).expanduser()


def existing_file(value: Any) -> Path:
    """Read the path of a file that must be there, which the caller tests once it knows from where."""
    return path(value)
