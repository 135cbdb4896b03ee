"""Facts about the program of a run: script, arguments, versions, settings, place. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ddpdebug.redaction import redact
from ddpdebug.sinks.words import clean

Facts = Mapping[str, str]
Fact = tuple[str, str]

_MAX_FACTS, _MAX_TEXT = 400, 200


def facts(document: Mapping[str, Any]) -> Facts:
    """Return facts of a `run.json` by name: the script and its arguments, versions, settings and place."""
    found: dict[str, str] = {}

    def add(name: object, value: object) -> None:
        if value not in (None, "") and len(found) < _MAX_FACTS:
            found[clean(name, 80)] = clean(value, _MAX_TEXT)

    command = document.get("command")
    words = redact(list(map(str, command))) if isinstance(command, list) else []
    add("script", words[0] if words else None)
    for name, value in _arguments(words[1:]):
        add(name, value)
    for name, key in (("owner", "owner"), ("ranks", "world"), ("node", "node")):
        add(name, document.get(key))
    for part, prefix in (("place", ""), ("versions", ""), ("config", "ddpdebug ")):
        table = document.get(part)
        for name, value in table.items() if isinstance(table, Mapping) else ():
            add(f"{prefix}{name}", value)
    return found


def _arguments(words: Sequence[str]) -> list[Fact]:
    """Return the options of a command line with their values, `yes` for switches; other words by their place."""
    found: list[Fact] = []
    wants = False
    for place, word in enumerate(words, 1):
        number = word[1:2].isdigit() or word[1:2] == "."
        if word.startswith("-") and not number:
            name, given, value = word.partition("=")
            found.append((name, value if given else "yes"))
            wants = not given
        elif wants:
            found[-1] = found[-1][0], word
            wants = False
        else:
            found.append((f"argument {place}", word))
    return found
