"""Recorded steps, reduced to what the rules about pace read: how they are written and read."""

from __future__ import annotations

import json
import lzma
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ddpdebug.schema.row import Row
from ddpdebug.schema.step import Step

FOLDER = Path(__file__).with_name("recorded")
#: Kept in units of 50 microseconds; null where they are not known.
SECONDS = tuple(name for name in Row._fields if name.endswith("_seconds"))
COUNTS = ("flags", "micro_batches", "without_grad", "batch_elements", "input_elements")
_UNIT = 5e-5


def write(path: Path, about: dict[str, Any], steps: Iterable[Step]) -> None:
    """Write the steps of a run."""
    steps = [step for step in steps if len(step.rows) == step.world]
    rows = [[getattr(row, name) for row in step.rows.values()] for name in (*SECONDS, *COUNTS) for step in steps]
    packed = [[_packed(value) for value in values] for values in rows]
    columns = {name: packed[i * len(steps) : (i + 1) * len(steps)] for i, name in enumerate((*SECONDS, *COUNTS))}
    places = [(step.optimizer, step.step) for step in steps]
    found = {"about": about, "world": steps[0].world, "places": places, "columns": columns}
    text = json.dumps(found, separators=(",", ":"))
    path.write_bytes(lzma.compress(text.encode(), preset=9 | lzma.PRESET_EXTREME))


def read(path: Path) -> tuple[dict[str, Any], list[Step]]:
    """Return what was recorded, and the steps."""
    found = json.loads(lzma.decompress(path.read_bytes()))
    world, columns, steps = found["world"], found["columns"], []
    begins = found.get("first", 0)  # where one optimizer has taken all of them
    places = found.get("places") or [(0, begins + number) for number in range(len(columns["flags"]))]
    for number, (optimizer, step) in enumerate(places):
        rows = {}
        for rank in range(world):
            seconds = {name: _seconds(columns[name][number][rank]) for name in SECONDS}
            counts = {name: columns[name][number][rank] for name in COUNTS if name in columns}
            rows[rank] = Row(rank=rank, step=step, optimizer=optimizer, **seconds, **counts)
        steps.append(Step(step=step, optimizer=optimizer, world=world, rows=rows))
    return found["about"], steps


def _packed(value: float) -> int | None:
    if isinstance(value, int):
        return value
    return round(value / _UNIT) if math.isfinite(value) else None


def _seconds(value: int | None) -> float:
    return math.nan if value is None else value * _UNIT
