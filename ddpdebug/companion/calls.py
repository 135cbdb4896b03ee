"""What the rank and its companion say to each other, as JSON."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from typing import Any

from ddpdebug.run_directory.reader import chosen_of, with_chosen
from ddpdebug.schema.row import decode, encode
from ddpdebug.schema.step import Step, step_of


def json_of_step(step: Step) -> dict[str, Any]:
    """Return a step as JSON."""
    rows = [base64.b64encode(encode(row)).decode() for row in step.rows.values()]
    about = chosen_of(step) if step.looks_chosen else None
    return {"optimizer": step.optimizer, "step": step.step, "world": step.world, "rows": rows, "chosen": about}


def step_of_json(value: Mapping[str, Any]) -> Step:
    """Return the step that `json_of_step` has written."""
    rows = [decode(base64.b64decode(data)) for data in value["rows"]]
    step = step_of(value["optimizer"], value["step"], {row.rank: row for row in rows}, value["world"])
    return step if value["chosen"] is None else with_chosen(step, value["chosen"])


def dumped(value: object) -> bytes:
    """Return JSON, as both sides write it."""
    return json.dumps(value, default=str).encode()
