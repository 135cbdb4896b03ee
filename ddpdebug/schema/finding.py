"""The finding record and the severity scale. Torch-free."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import Any

from ddpdebug.schema.wire import Struct, to_json

#: Key of `evidence`: the groups of ranks that stand against each other, where none is a majority.
UNDECIDED = "undecided_between"
#: A finding names this many parameters, modules, ...; `evidence` has the number of all.
MAX_NAMES = 20


class Severity(IntEnum):
    """The severity of a finding; comparisons follow the order of gravity."""

    INFO = 0
    WARNING = 1
    ERROR = 2
    CRITICAL = 3

    @property
    def label(self) -> str:
        """The lower-case name used in files, options and metrics."""
        return self.name.lower()

    @classmethod
    def parse(cls, text: str) -> Severity:
        """Return the severity named by `text`; raise ValueError that lists the valid names."""
        try:
            return cls[text.upper()]
        except KeyError:
            valid = ", ".join(s.label for s in cls)
            raise ValueError(f"unknown severity {text!r}; valid are {valid}") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A verdict about one cause. `step` counts optimizer steps from 0; unknown fields are None, never guessed.

    Args:
        ranks: the culprits (outside the largest group of equals), not everyone involved; all ranks where nobody can
            tell, and then `evidence` says who stands against whom (`UNDECIDED`).
        subject: parameters, buffers, modules, optimizer groups, ... by name; the first is the most telling.
        phase: where in the step; for RANK101 `init`, `load`, `optimizer` or `outside-optimizer`.
        location: the user's `file:line`.
        evidence: what was measured and against what; JSON values only.
        places: host and device of the ranks, by rank; on one host only the device of a single rank.
        id: names the finding within its run, the same on every rank; stays when ranks and subjects are added.
        ignored: the entry of `ignore` that it is silent by.
    """

    code: str
    severity: Severity
    title: str
    step: int | None = None
    last_step: int | None = None
    count: int = 1
    ranks: tuple[int, ...] = ()
    subject: tuple[str, ...] = ()
    phase: str | None = None
    location: str | None = None
    evidence: Mapping[str, Any] = field(default_factory=dict)
    causes: Sequence[str] = ()
    actions: Sequence[str] = ()
    time: str | None = None
    run: str | None = None
    id: str | None = None
    places: Mapping[str, str] = field(default_factory=dict)
    ignored: str | None = None

    def seen_again(self, step: int | None) -> Finding:
        """Return this finding with one more occurrence at `step`."""
        last = self.last_step if step is None else step
        return replace(self, count=self.count + 1, last_step=last)

    def to_json(self) -> str:
        """Return the line of `findings.jsonl` (no newline); non-finite numbers become strings, so it is strict JSON."""
        record = {name: getattr(self, name) for name in self.__dataclass_fields__}
        record["severity"] = self.severity.label
        for name in ("places", "ignored"):  # as in each job on one host, and where nothing is ignored
            if not record[name]:
                del record[name]
        return strict_json(record)

    def _repr_html_(self) -> str:
        """Return what a notebook shows: names and messages come from the job, so all of it is escaped."""
        import html  # noqa: PLC0415 - a job has no use for it

        def shown(value: object) -> str:
            text = str(value)[:_MAX_SHOWN]
            return html.escape("".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text))

        known = {
            "step": self.step,
            "ranks": ", ".join(map(str, self.ranks)),
            "subject": ", ".join(self.subject),
            "phase": self.phase,
            "place": self.location,
            **{key: strict_json(value) for key, value in self.evidence.items()},
            "causes": "; ".join(self.causes),
            "what to do": "; ".join(self.actions),
        }
        rows = [f"<tr><th>{shown(k)}</th><td>{shown(v)}</td></tr>" for k, v in known.items() if v not in (None, "")]
        head = f"<b>{shown(self.code)}</b> {self.severity.label}: {shown(self.title)}"
        return f"<details open><summary>{head}</summary><table>{''.join(rows)}</table></details>"

    @classmethod
    def from_json(cls, line: str) -> Finding:
        """Parse a line of `findings.jsonl`; raise ValueError if it is malformed."""
        record = json.loads(line)
        if not isinstance(record, dict) or not _is_well_formed(record):
            raise ValueError(f"not a finding: {line[:80]!r}")
        known = {name: record[name] for name in cls.__dataclass_fields__ if name in record}
        known["severity"] = Severity.parse(record["severity"])
        lists = {name: tuple(record.get(name) or ()) for name in _LISTS}
        return cls(**{**known, **lists})

    @classmethod
    def read(cls, line: str) -> Finding | None:
        """Parse a line of a file that may be damaged; None if it is no finding."""
        try:
            return cls.from_json(line)
        except (ValueError, RecursionError):
            return None


_TEXTS, _OPTIONAL_TEXTS = ("code", "title", "severity"), ("phase", "location", "time", "run", "id", "ignored")
_LISTS = ("ranks", "subject", "causes", "actions")
#: Of a field a notebook shows no more characters.
_MAX_SHOWN = 2000


def _is_well_formed(record: Mapping[str, Any]) -> bool:
    return (
        all(isinstance(record.get(name), str) for name in _TEXTS)
        and all(isinstance(record.get(name), str | None) for name in _OPTIONAL_TEXTS)
        and all(record.get(name) is None or type(record[name]) is int for name in ("step", "last_step"))
        and type(record.get("count", 1)) is int
        and all(isinstance(record.get(name, []), list) for name in _LISTS)
        and all(type(item) is (int if name == "ranks" else str) for name in _LISTS for item in record.get(name, ()))
        and isinstance(record.get("evidence", {}), dict)
        and isinstance(places := record.get("places", {}), dict)
        and all(isinstance(place, str) for place in places.values())
    )


def strict_json(value: Any) -> str:
    """Return a value as strict JSON on one line: values that JSON lacks (NaN, infinity, other objects) become texts."""
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError):  # seldom: the slow way
        return json.dumps(strict(value), ensure_ascii=False, allow_nan=False)


def strict(value: Any) -> Any:
    """Return a value as JSON values: texts for NaN, infinities and other objects, lists for tuples and sets."""
    if isinstance(value, Struct):
        return strict(to_json(value))
    if isinstance(value, Mapping):
        return {str(key): strict(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [strict(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)
