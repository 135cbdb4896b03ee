"""The parts of a step's record and the row that is made of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

import ddpdebug.monitor.monitor  # noqa: F401 - all parts are defined then
from ddpdebug.isolation.guard import Guard
from ddpdebug.probes.record import Part, SinceLastStep, StepRecord, encode_row
from ddpdebug.schema import coverage
from ddpdebug.schema.row import Flag, Row, decode


@dataclass(slots=True)
class Ordinary(Part, key="test:ordinary"):
    """A part that can be encoded."""

    looked: int = 0

    def columns(self, _: StepRecord) -> dict[str, Any]:
        """Return a digest and a flag."""
        self.looked += 1
        return {"batch_digest": 5, "flags": int(Flag.LOADED)}


def _raise() -> dict[str, Any]:
    raise SystemExit("odd")


#: What a part may do instead of naming its columns.
ODD: dict[str, Callable[[], Any]] = {
    "raises": _raise,
    "no column": lambda: {"colour": 1},
    "not a number": lambda: {"loss": "high"},
    "too large": lambda: {"host_bytes": 1 << 70},
    "not a table": lambda: 7,
    "flags of another kind": lambda: {"flags": None},
}


@pytest.mark.parametrize("name", ODD)
def test_a_part_that_cannot_be_encoded(name: str) -> None:
    """It costs its own columns, wherever it stands, and is said once; the others are in this row and in later ones."""

    @dataclass(slots=True)
    class Odd(Part, key="test:odd"):
        def columns(self, _: StepRecord) -> dict[str, Any]:
            return {**ODD[name]()}  # what is no table raises

    said: list[str] = []
    guard = Guard(lambda part, message: said.append(part))
    for step in range(3):
        record = StepRecord(0, step, Flag.FIRST, SinceLastStep(), checked=True, fields={"syncs": 9})
        record.since.parts[Odd].let_go()
        assert record.parts[Ordinary] is record.parts[Ordinary]
        row = decode(encode_row(record, 3, guard))
        flags = Flag.FIRST | Flag.CHECKED | Flag.LOADED
        assert row == Row(rank=3, step=step, flags=int(flags), syncs=9, batch_digest=5)._replace(**_unknown(row))
    assert said == ["test:odd"]


def _unknown(row: Row) -> dict[str, float]:
    return {name: value for name, value in row._asdict().items() if value != value}  # noqa: PLR0124 - NaN


def test_a_part_that_cannot_let_go() -> None:
    """The row has its columns, and what it holds is dropped with it."""

    @dataclass(slots=True)
    class Holding(Part, key="test:holding"):
        def columns(self, _: StepRecord) -> dict[str, Any]:
            return {"output_digest": 4}

        def let_go(self) -> None:
            raise RuntimeError("stuck")

    said: list[str] = []
    record = StepRecord(0, 0, Flag(0), SinceLastStep())
    assert (record.parts[Holding].key, record.parts[Ordinary].looked) == ("test:holding", 0)
    row = decode(encode_row(record, 0, Guard(lambda part, message: said.append(part))))
    assert (row.output_digest, row.batch_digest, said) == (4, 5, ["test:holding"])
    assert [type(part) for part in record.parts.values()] == [Ordinary]


def test_keys_of_parts() -> None:
    """Each part has a key of its own, that of a probe, so that a run says what is not looked at once it is off."""
    keys = {part.__qualname__: part.key for part in Part.__subclasses__() if part.__module__.startswith("ddpdebug.")}
    assert len(keys) > 10
    assert len({*keys.values()}) == len(keys)
    assert {*keys.values()} <= coverage._KINDS.keys()
