"""What a user has asked to be silent about: `CODE`, `CODE:name`, each with a reason after a `#`. Torch-free."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from ddpdebug.errors import UsageError, did_you_mean
from ddpdebug.schema.finding import MAX_NAMES, Finding

#: Where evidence has how many names a finding is about.
_COUNTED = ("parameters", "buffers", "tensors")
_ENTRY = re.compile(r"\s*([A-Za-z]+[0-9]+)\s*(?::\s*([^#]*?))?\s*(?:#\s*(.*?))?\s*", re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ignored:
    """An entry of `ignore`.

    Args:
        code: of the findings.
        name: which of them, with `*` and `?` as in a shell: parameters, buffers, modules with all that is in them, or
            the file or line; all of them where it is empty.
        reason: for people.
    """

    code: str
    name: str = ""
    reason: str = ""

    @classmethod
    def parse(cls, text: str) -> Ignored:
        """Read an entry; raise ValueError where it is none, UsageError where there is no such code."""
        found = _ENTRY.fullmatch(text)
        if found is None or found[2] == "":
            raise ValueError
        from ddpdebug.detectors.catalog import catalog  # noqa: PLC0415 - settings that ignore nothing do without the rules

        code, codes = found[1].upper(), {rule.code for rule in catalog()}
        if code not in codes:
            near = did_you_mean(code, sorted(codes), listed="docs/findings.md lists all")
            raise UsageError(f"there is no finding {found[1]!r}; {near}")
        return cls(code=code, name=found[2] or "", reason=" ".join((found[3] or "").split()))

    def __str__(self) -> str:
        return self.entry + (f" # {self.reason}" if self.reason else "")

    @property
    def entry(self) -> str:
        """The entry without its reason."""
        return f"{self.code}:{self.name}" if self.name else self.code

    def covers(self, finding: Finding) -> bool:
        """Whether a finding is meant: one of the code, at the place, or of which every name is meant."""
        if finding.code != self.code:
            return False
        if not self.name or _is_at(finding.location, self.name):
            return True
        return _is_whole(finding) and all(_is_within(name, self.name) for name in finding.subject)


def entries(value: Any) -> tuple[str, ...]:
    """Read entries, several or one text with semicolons between them; return their normal forms, each once.

    Raises:
        UsageError: there is no finding of that code.
        ValueError: something is no entry.
    """
    texts: Iterable[Any] = filter(str.strip, value.split(";")) if isinstance(value, str) else value
    found = []
    for text in texts:
        if not isinstance(text, str):
            raise TypeError
        found.append(str(Ignored.parse(text)))
    return tuple(dict.fromkeys(found))


def read(value: Any) -> tuple[Ignored, ...]:
    """Return the entries of a configuration, which may be a saved one: what no version has written is left out."""
    found = []
    for text in value if isinstance(value, list | tuple) else ():
        try:
            found.append(Ignored.parse(str(text)))
        except ValueError:
            continue
    return tuple(found)


def _is_whole(finding: Finding) -> bool:
    """Whether a finding names all that it is about: lists of names are cut, and what is cut off may be another."""
    names, counts = len(finding.subject), map(finding.evidence.get, _COUNTED)
    return 0 < names < MAX_NAMES and all(count <= names for count in counts if isinstance(count, int))


def _matches(text: str, pattern: str) -> bool:
    return fnmatchcase(text, pattern.replace("[", "[[]"))


def _is_within(name: str, pattern: str) -> bool:
    return _matches(name, pattern) or _matches(name, f"{pattern}.*")


def _is_at(location: str | None, pattern: str) -> bool:
    """Whether a pattern names the file or the line, by the end of its path or all of it."""
    places = () if location is None else (location, location.rpartition(":")[0])
    return any(_matches(place, pattern) or _matches(place, f"*/{pattern}") for place in places)
