"""The line of the user's code that fills a variable or an attribute, read from the byte code; nothing runs."""

from __future__ import annotations

import dis
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from types import CodeType

from ddpdebug.isolation.user_code import is_user_file, shorten

_MUTATORS = frozenset(
    {"append", "appendleft", "extend", "insert", "add", "update", "setdefault", "put", "push", "append_", "add_"}
)
_MAX_CODES = 2000


@dataclass(slots=True)
class _Line:
    loads: set[str] = field(default_factory=set)
    stores: set[str] = field(default_factory=set)
    into_item: bool = False

    def score(self, name: str) -> int:
        """Return how likely the line makes `name` grow: 3 adds to it, 2 sets it from itself, 1 sets it, 0 neither."""
        if name in self.loads and (self.into_item or self.loads & _MUTATORS):
            return 3
        if name in self.stores:
            return 2 if name in self.loads else 1
        return 0


def filled_at(codes: Iterable[CodeType], name: str) -> str | None:
    """Return `file:line` of the line that most likely adds to `name`, the first codes first."""
    best: tuple[int, str] | None = None
    for code in _with_nested(codes):
        for number, line in sorted(_lines(code).items()):
            score = line.score(name)
            if score and (best is None or score > best[0]):
                best = score, f"{shorten(code.co_filename)}:{number}"
    return None if best is None else best[1]


def _with_nested(codes: Iterable[CodeType]) -> Iterator[CodeType]:
    waiting, seen = list(codes), set[int]()
    while waiting and len(seen) < _MAX_CODES:
        code = waiting.pop(0)
        if id(code) in seen or not is_user_file(code.co_filename):
            continue
        seen.add(id(code))
        yield code
        waiting += [part for part in code.co_consts if isinstance(part, CodeType)]


def _lines(code: CodeType) -> dict[int, _Line]:
    lines: dict[int, _Line] = {}
    number = code.co_firstlineno
    starts = {offset: line for offset, line in dis.findlinestarts(code) if line is not None}
    for instruction in dis.get_instructions(code):
        number = starts.get(instruction.offset, number)
        line = lines.setdefault(number, _Line())
        names = instruction.argval if isinstance(instruction.argval, tuple) else (instruction.argval,)
        found = {name for name in names if isinstance(name, str)}
        if instruction.opname.startswith("LOAD_") and instruction.opname != "LOAD_CONST":
            line.loads |= found
        elif instruction.opname.startswith(("STORE_FAST", "STORE_NAME", "STORE_GLOBAL", "STORE_DEREF", "STORE_ATTR")):
            line.stores |= found
        elif instruction.opname in {"STORE_SUBSCR", "LIST_APPEND"}:
            line.into_item = line.into_item or instruction.opname == "STORE_SUBSCR"
    return lines
