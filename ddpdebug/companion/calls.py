"""Messages between a rank and its companion, as JSON."""

from __future__ import annotations

import base64
import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ddpdebug.run_directory.reader import chosen_of, with_chosen
from ddpdebug.schema.coverage import Coverage
from ddpdebug.schema.finding import Finding
from ddpdebug.schema.row import decode, encode
from ddpdebug.schema.run_state import WaitState
from ddpdebug.schema.step import Step, step_of
from ddpdebug.sinks import (
    Covered,
    FindingRaised,
    Met,
    Record,
    RunEnded,
    RunStarted,
    Saved,
    StepJudged,
    Trouble,
    Waiting,
)

#: Of what is written down, what metrics are made of.
_SAVED = frozenset({("fact", "place"), ("detail", "layers")})


def json_of_step(step: Step) -> dict[str, Any]:
    """Return a step as JSON."""
    rows = [base64.b64encode(encode(row)).decode() for row in step.rows.values()]
    about = chosen_of(step) if step.looks_chosen else None
    return {"optimizer": step.optimizer, "step": step.step, "world": step.world, "rows": rows, "chosen": about}


def step_of_json(value: Mapping[str, Any]) -> Step:
    """Return the step from the JSON of `json_of_step`."""
    rows = [decode(base64.b64decode(data)) for data in value["rows"]]
    step = step_of(value["optimizer"], value["step"], {row.rank: row for row in rows}, value["world"])
    return step if value["chosen"] is None else with_chosen(step, value["chosen"])


def json_of_record(record: Record) -> dict[str, Any] | None:
    """Return a record as JSON; None if no metric depends on it."""
    match record:
        case StepJudged(step=step):
            about: dict[str, Any] = {"step": json_of_step(step)}
        case FindingRaised(finding=finding):
            about = {"finding": finding.to_json()}
        case Covered(coverage=coverage):
            return {"is": "Covered", "coverage": coverage.to_json()}
        case Saved(kind=kind, payload=payload):
            if (kind, payload.get("topic", payload.get("detail"))) not in _SAVED:
                return None
            about = {}
        case RunStarted() | Met() | Waiting() | Trouble() | RunEnded():
            about = {}
        case _:
            return None
    fields = {field.name: getattr(record, field.name) for field in dataclasses.fields(record)}
    return {"is": type(record).__name__, **fields, **about}


def record_of_json(value: Mapping[str, Any]) -> Record:  # noqa: PLR0911 - a line for each kind
    """Return the record from the JSON of `json_of_record`."""
    kind, fields = value["is"], {name: each for name, each in value.items() if name != "is"}
    match kind:
        case "StepJudged":
            return StepJudged(**{**fields, "step": step_of_json(fields["step"])})
        case "FindingRaised":
            return FindingRaised(finding=Finding.from_json(fields["finding"]), new=fields["new"])
        case "Covered":
            return Covered(coverage=Coverage.from_json(fields["coverage"]) or Coverage())
        case "RunStarted":
            directory = fields["directory"]
            return RunStarted(**{**fields, "directory": None if directory is None else Path(directory)})
        case "Met":
            return Met(members=tuple(fields["members"]), apart=fields["apart"])
        case "Waiting":
            seconds = {int(rank): each for rank, each in fields["seconds"].items()}
            known = {"state": WaitState(fields["state"]), "ranks": tuple(fields["ranks"]), "seconds": seconds}
            return Waiting(**{**fields, **known})
        case "Saved":
            return Saved(**fields)
        case "Trouble":
            return Trouble(**fields)
    return RunEnded(**fields)


def dumped(value: object) -> bytes:
    """Return a value as JSON bytes, as both sides write them."""
    return json.dumps(value, default=str).encode()
