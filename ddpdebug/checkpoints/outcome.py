"""The result of a comparison of two states: as objects, as JSON, and as text. Torch-free."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from ddpdebug.checkpoints.names import LeftOut
from ddpdebug.detectors.mem.sizes import size_text
from ddpdebug.sinks.words import clean, counted, percent

#: Kinds of differences, the worst first; `dtype` comes after `elements` where only the dtype differs.
ONLY_A, ONLY_B, KIND, SHAPE, ELEMENTS, VALUE, DTYPE = (
    "only in A",
    "only in B",
    "kind",
    "shape",
    "elements",
    "value",
    "dtype",
)
_ORDER = (ONLY_A, ONLY_B, KIND, SHAPE, ELEMENTS, VALUE, DTYPE)
#: From so many entries on that are missing under one name, they are one line.
_GROUPED = 4
#: In names of averages of weights.
_AVERAGE = re.compile(r"ema|averag|shadow|swa", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """One of the compared states: its path or `live`, its format, its size."""

    where: str
    kind: str
    entries: int
    bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One entry that differs between the two sides; fields that do not apply are None.

    `kind` is `only in A`, `only in B`, `kind` (a tensor on one side only), `shape`, `dtype`, `elements` or `value` (of
    what is no tensor). With `dtype`, elements are compared after those of the wider dtype were rounded to the other.
    """

    name: str  # that of A, where A has it
    kind: str
    name_b: str | None = None  # that of B, where it is another
    a: str | None = None  # dtype and shape, or a value, in words
    b: str | None = None
    bytes: int = 0  # of the tensor
    differing: int | None = None  # how many elements
    elements: int | None = None  # of how many that were compared
    index: tuple[int, ...] | None = None  # the first differing one in the whole tensor
    values: tuple[float | str, float | str] | None = None  # of A and B there
    largest: float | None = None  # the largest difference between finite elements
    nonfinite: int = 0  # differing elements that are NaN or infinite on a side
    distance: float | None = None  # norm of the difference, in shares of the larger norm of both
    rounded: tuple[str, str] | None = None  # ("B", "bfloat16"): B is A, rounded to that
    a_is: str | None = None  # another entry of B, which has A's values
    b_is: str | None = None  # another entry of A, which has B's values
    tied_to: str | None = None  # another entry of the same side with the same values, which the other side has too

    @property
    def rank(self) -> tuple[int, float]:
        """The sort key, the worst difference first."""
        kind = ELEMENTS if self.differing else self.kind
        return _ORDER.index(kind), -float("inf") if self.nonfinite else -(self.distance or 0.0)

    def to_json(self) -> dict[str, Any]:
        """Return the fields that are known."""
        found = {name: getattr(self, name) for name in self.__slots__}
        return {name: value for name, value in found.items() if value is not None}


@dataclass(frozen=True, slots=True, kw_only=True)
class StateComparison:
    """The result of a comparison: `equal`, or `differences`, the worst first. `str()` returns readable text."""

    a: Side
    b: Side
    left_out: tuple[LeftOut, ...]  # of names
    entries: int  # that both sides have
    compared: int  # elements: of live sharded tensors those of this rank alone
    floats: int  # tensors of floating point numbers that both sides have in one shape
    differences: tuple[Difference, ...]
    shared: frozenset[str] = field(repr=False)  # how the names begin that both sides have

    @property
    def equal(self) -> bool:
        """Whether both states have the same entries, bit by bit; parts of names that wrappers add do not count."""
        return not self.differences

    @property
    def remarks(self) -> list[str]:
        """Remarks on patterns that many differences share."""
        return [remark for part in _REMARKS for remark in part(self)]

    def to_json(self) -> dict[str, Any]:
        """Return the whole comparison."""
        return {
            "equal": self.equal,
            **{
                name: {"where": side.where, "kind": side.kind, "entries": side.entries, "bytes": side.bytes}
                for name, side in (("a", self.a), ("b", self.b))
            },
            "left_out": [{"side": item.side, "part": item.part, "count": item.count} for item in self.left_out],
            "entries": self.entries,
            "compared": self.compared,
            "remarks": self.remarks,
            "differences": [difference.to_json() for difference in self.differences],
        }

    def text(self, most: int = 20) -> str:
        """Return the comparison as text, with at most `most` lines about single entries."""
        rows = list(_rows(self))
        width = min(max([len(name) for _, name, _ in rows[:most]], default=0), 48)
        found = [
            _verdict(self),
            *(f"  {name}  {side.where}: {side.kind}, {_holds(side)}" for name, side in (("A", self.a), ("B", self.b))),
            *(f"  {remark}" for remark in self.remarks),
            *(f"  {kind:9}  {name:{width}}  {text}".rstrip() for kind, name, text in rows[:most]),
        ]
        if len(rows) > most:
            found.append(f"  and {len(rows) - most} more lines")
        return "\n".join(map(_line, found))

    def __str__(self) -> str:
        return self.text()


def _line(text: str) -> str:
    return clean(text, 2000)


def _holds(side: Side) -> str:
    return f"{_entries(side.entries)}, {size_text(side.bytes)}"


def _entries(number: int) -> str:
    return f"{number} {'entry' if number == 1 else 'entries'}"


def _verdict(found: StateComparison) -> str:
    if found.equal:
        return f"equal: {_entries(found.entries)}, {counted(found.compared, 'element')} compared bit by bit"
    only = Counter(d.kind for d in found.differences if d.kind in {ONLY_A, ONLY_B})
    differ = len(found.differences) - only.total()
    alike = f"the {found.entries} that both have {'is' if found.entries == 1 else 'are'} equal"
    parts = [f"{differ} of {_entries(found.entries)} {'differs' if differ == 1 else 'differ'}" if differ else alike]
    parts = parts if found.entries else ["no name is on both sides"]
    parts += [f"{number} {kind}" for kind, number in sorted(only.items())]
    return f"different: {', '.join(parts)}"


# -- a line for each difference


def _rows(found: StateComparison) -> Iterator[tuple[str, str, str]]:
    """Yield kind, name and text; of entries that are missing together, one for all."""
    groups: dict[tuple[str, str], list[Difference]] = defaultdict(list)
    for one in found.differences:
        head = one.name.partition(".")[0]
        alone = one.kind not in {ONLY_A, ONLY_B} or head in found.shared or one.tied_to
        groups[one.kind, one.name if alone else f"{head}."].append(one)
    for (kind, name), group in groups.items():
        if len(group) >= _GROUPED:
            yield kind, f"{name}*", f"{_entries(len(group))}, {size_text(sum(one.bytes for one in group))}"
        else:
            yield from ((kind, one.name, _text(one)) for one in group)


def _text(one: Difference) -> str:
    parts = []
    if one.kind in {ONLY_A, ONLY_B}:
        parts.append(one.a or one.b or "")
    elif one.a is not None or one.b is not None:
        parts.append(f"A {one.a}, B {one.b}")
    after = " after rounding" if one.kind == DTYPE else ""
    if one.differing:
        parts.append(
            f"{one.differing} of {counted(one.elements or 0, 'element')} differ{'s' * (one.differing == 1)}{after}"
        )
        if one.index is not None and one.values is not None:
            a, b = _apart(*one.values)
            parts[-1] += f", first at {list(one.index)}: A {a}, B {b}"
        if one.largest is not None and one.differing > 1:
            parts.append(f"largest difference {one.largest:.4g}")
        if one.largest == 0 and not one.nonfinite:
            parts.append("equal as numbers: the sign of 0")
        if one.nonfinite:
            parts.append(f"{one.nonfinite} NaN or infinite")
        if one.distance:
            parts.append(f"{percent(one.distance)} of the norm")
    elif one.differing == 0:
        parts.append("equal after rounding")
    parts += _elsewhere(one)
    return "; ".join(parts)


def _elsewhere(one: Difference) -> Iterator[str]:
    if one.tied_to:
        yield f"the same values as `{one.tied_to}`"
    if one.a_is:
        yield f"A's values are `{one.a_is}` in B"
    elif one.b_is:
        yield f"B's values are `{one.b_is}` in A"


def _apart(a: float | str, b: float | str) -> tuple[str, str]:
    """Return two numbers with as many digits as show that they are two."""
    if isinstance(a, str) or isinstance(b, str):
        return str(a), str(b)
    for digits in (4, 6, 9, 17):
        texts = (f"{a:.{digits}g}", f"{b:.{digits}g}")
        if texts[0] != texts[1]:
            return texts
    return repr(a), repr(b)


# -- what many differences have in common


def _names_without(found: StateComparison) -> Iterator[str]:
    for item in found.left_out:
        side, other = ("A", "B") if item.side == "a" else ("B", "A")
        yield f"{side}'s names have `{item.part}` in {_entries(item.count)}, {other}'s do not: compared without it"


def _tied(found: StateComparison) -> Iterator[str]:
    for one in found.differences:
        if one.tied_to:
            side, other = ("A", "B") if one.kind == ONLY_A else ("B", "A")
            yield (
                f"`{one.name}` has the values of `{one.tied_to}`, which {other} has: tied weights, "
                f"saved twice in {side} and once in {other}"
            )


def _dtypes(found: StateComparison) -> Iterator[str]:
    pairs = Counter((one.a, one.b, bool(one.differing)) for one in found.differences if one.kind == DTYPE)
    for (a, b, differ), number in sorted(pairs.items(), key=str):
        too = f"and {'differs' if number == 1 else 'differ'} after rounding, too"
        end = too if differ else "and equal but for the rounding"
        yield f"{_entries(number)} {'is' if number == 1 else 'are'} {a} in A and {b} in B, {end}"
    rounded = Counter(one.rounded for one in found.differences if one.rounded)
    for (side, dtype), number in sorted(rounded.items()):
        yield (
            f"{_entries(number)} of {side} {'is' if number == 1 else 'are'} {'B' if side == 'A' else 'A'}'s rounded to "
            f"{dtype}, in the same dtype as before: precision was lost on the way"
        )


def _moved(found: StateComparison) -> Iterator[str]:
    """Say of values that are there under another name how the names differ."""
    moves: dict[tuple[str, str, str], list[tuple[str, str]]] = defaultdict(list)
    known = set()
    for one in found.differences:
        if one.a_is:
            known.add((one.name, one.a_is))
            moves["A", *_change(one.name, one.a_is)].append((one.name, one.a_is))
    for one in found.differences:
        name = one.name_b or one.name
        if one.b_is and (one.b_is, name) not in known:
            moves["B", *_change(name, one.b_is)].append((name, one.b_is))
    for (side, before, after), pairs in moves.items():
        name, other = pairs[0]
        where = "B" if side == "A" else "A"
        has = "has its values" if len(pairs) == 1 else "have their values"
        head = f"{_entries(len(pairs))} of {side} {has} in {where} under another name, `{name}` as `{other}`"
        if before == after:
            yield f"{head}: the same names with other numbers, another order of parameters or layers"
        elif bool(_AVERAGE.search(before)) is not bool(_AVERAGE.search(after)):
            yield f"{head}: one side has an average (EMA) in the place of the weights"
        else:
            yield f"{head}: `{before}*` in {side} is `{after}*` in {where}"


def _change(name: str, other: str) -> tuple[str, str]:
    """Return what two names begin with where their ends are the same; twice the same where only numbers differ."""
    if re.sub(r"\d+", "#", name) == re.sub(r"\d+", "#", other):
        return "#", "#"
    ends, others = name.split("."), other.split(".")
    while ends and others and ends[-1] == others[-1]:
        ends.pop()
        others.pop()
    return "".join(f"{part}." for part in ends), "".join(f"{part}." for part in others)


def _far(found: StateComparison) -> Iterator[str]:
    """Say that values are unrelated, or that all differ a little."""
    apart = [one for one in found.differences if one.differing and not one.rounded and one.distance is not None]
    unrelated = [one for one in apart if (one.distance or 0.0) >= 1 and not one.a_is and not one.b_is]
    if unrelated:
        verb = "differs" if len(unrelated) == 1 else "differ"
        yield (
            f"{_entries(len(unrelated))} {verb} by the norm of the values or more, as unrelated values do: not loaded "
            "on one side, initialised anew, or moments of an optimizer at other steps"
        )
    distances = [one.distance or 0.0 for one in apart]
    if len(apart) == found.floats > 1 and not unrelated:
        yield (
            f"all {found.floats} tensors of floating point numbers differ, by {percent(min(distances))} to "
            f"{percent(max(distances))} of their norm: as after other steps, or in an average (EMA) of the weights"
        )


_REMARKS = (_names_without, _tied, _dtypes, _moved, _far)
