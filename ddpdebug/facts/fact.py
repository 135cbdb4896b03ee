"""A fact of a run, its file format, and the folding of values over steps. Torch-free."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, TypeVar

from ddpdebug.errors import UsageError
from ddpdebug.schema.wire import Struct, from_json, to_json

#: What facts are about, in the order in which differences are worth reading: what is further down follows from it.
CONTRACTS: Mapping[int, str] = {
    1: "who moves",
    2: "train and eval mode",
    3: "what is loaded",
    4: "samples",
    5: "scale",
    6: "order of the calls",
    7: "numbers",
    8: "ranks",
    9: "signals and memory",
    10: "end",
}
_VERSION = 1
_MAX_BYTES, MAX_FACTS = 16 << 20, 20_000
#: Shares of the steps that are few, and many.
_FEW, _MANY = 0.1, 0.3
#: Different values that are told of one subject.
_MAX_VALUES = 4

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Fact(Struct):
    """A statement about a run that held over some steps.

    Args:
        contract: a number of `CONTRACTS`.
        subject: what it is about: a parameter, a module, an optimizer, ...; empty for the run.
        statement: what is said of it.
        value: what was seen. A number is equal to another one within the factor `within`.
        first: the step by which it was known; a run that did not come to it says nothing about it.
        last: the newest step that was looked at for it.
        of_world: it depends on the number of ranks: on how long the epoch of one is, for example.
        place: the user's line, which is not compared.
    """

    contract: int
    subject: str = ""
    statement: str
    value: str | float
    first: int = 0
    last: int = 0
    within: float = 1.0
    of_world: bool = False
    place: str | None = None

    @property
    def key(self) -> tuple[int, str, str]:
        """The key by which the fact is looked up in another run."""
        return self.contract, self.statement, self.subject

    @property
    def shown(self) -> str:
        """The value in words."""
        return self.value if isinstance(self.value, str) else f"{self.value:.4g}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts(Struct):
    """The facts of one run, in the order of the contracts."""

    version: int = _VERSION
    world: int
    steps: int
    facts: tuple[Fact, ...]

    def text(self) -> str:
        """Return the text of the facts file; small changes of the facts change few lines."""
        record: dict[str, Any] = to_json(self)
        plain = {f.name: f.default for f in fields(Fact)}
        kept = ({key: value for key, value in fact.items() if value != plain[key]} for fact in record.pop("facts"))
        lines = ",\n".join(f"  {json.dumps(fact)}" for fact in kept)
        return f'{json.dumps(record)[:-1]}, "facts": [\n{lines}\n]}}\n'


def read_file(file: Path) -> Facts:
    """Parse a facts file as `text` makes it; raise UsageError if it is malformed."""
    try:
        if file.stat().st_size > _MAX_BYTES:
            raise UsageError(f"{str(file)!r} is too large for a file of facts")
        record = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"{str(file)!r} cannot be read: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{str(file)!r} is no file of facts: {error}") from None
    known = from_json(Facts, record)
    if known is None or known.version != _VERSION or not known.facts or len(known.facts) > MAX_FACTS:
        raise UsageError(
            f"{str(file)!r} is no file of facts of version {_VERSION}; `ddpdebug facts RUN --json` makes one"
        )
    if any(fact.contract not in CONTRACTS or not _is_sound(fact) for fact in known.facts):
        raise UsageError(f"{str(file)!r} is damaged: it has facts that no run has")
    return known


def _is_sound(fact: Fact) -> bool:
    numbers = (fact.within, 0.0 if isinstance(fact.value, str) else fact.value)
    return all(map(math.isfinite, numbers)) and 0 <= fact.first <= fact.last < 1 << 53 and fact.within >= 1


def about(
    contract: int, subject: str, statement: str, value: str | float = "", first: int = 0, last: int = 0, **more: Any
) -> Fact:
    """Return a fact that was observed from one step to another."""
    last = max(first, last)
    return Fact(contract=contract, subject=subject, statement=statement, value=value, first=first, last=last, **more)


def over(fact: Fact, values: Iterable[tuple[int, Any]], words: Callable[[Any], str] = str) -> Iterable[Fact]:
    """Yield a fact of the distinct values over steps, in order of first appearance; none without any value."""
    seen, first, last = dict[str, None](), 0, -1
    for step, value in values:
        last = step
        if (word := words(value)) not in seen:
            first = step
            seen[word] = None
        if len(seen) > _MAX_VALUES:
            break
    if last >= 0:
        text = ", then ".join(seen) if len(seen) <= _MAX_VALUES else "changes all the time"
        yield replace(fact, value=text, first=first, last=max(first, last))


def how_often(fact: Fact, values: Iterable[tuple[int, bool]]) -> Iterable[Fact]:
    """Yield a fact of how often a condition held: in each step, in some steps, or never."""
    known = {True: "in each step", False: "never"}
    for found in over(fact, values, lambda value: known[bool(value)]):
        yield found if found.value in known.values() else replace(found, value="in some steps")


def how_much(fact: Fact, values: Iterable[tuple[int, bool]]) -> Iterable[Fact]:
    """Yield a fact of whether a condition holds often or rarely; none if its share lies between.

    It was known when the share has come to where it stays.
    """
    count = seen = first = last = 0
    state = None
    for seen, (last, value) in enumerate(values, 1):
        count += bool(value)
        now = "rarely or never" if count <= _FEW * seen else "often" if count >= _MANY * seen else None
        if now != state:
            first, state = last, now
    if state is not None:
        yield replace(fact, value=state, first=first, last=last)


def middle(values: Iterable[float]) -> float | None:
    """Return the median of the finite values; None if there are none."""
    known = sorted(value for value in values if math.isfinite(value))
    return known[len(known) // 2] if known else None
