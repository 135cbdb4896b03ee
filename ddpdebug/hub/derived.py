"""The hub's rows about a run, derived from its mirrored files: run, ranks, findings and summary.

The readers are those of a run directory, on a copy of the files that they need, so that the hub says of a run what
`ddpdebug report` says. Only rows and observations, which grow without end, are read piece by piece: how far stands in
`file.folded`. Everything here comes from strangers: what is malformed is left out, and numbers and texts are bounded.
"""

from __future__ import annotations

import json
import math
import re
import struct
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import lru_cache
from itertools import groupby
from operator import itemgetter
from typing import Any

from ddpdebug.schema.finding import Finding, strict
from ddpdebug.schema.hangs import is_over
from ddpdebug.schema.row import Flag, Row, layout as layout_here
from ddpdebug.schema.step import step_of
from ddpdebug.sinks.agreement import COMPARED, dissenters

#: Of a run so many buckets of steps are kept, and only of its first ranks.
BUCKETS, SUMMARISED = 512, 64
#: Ranks of a run that have a row of their own.
RANKS = 4096
_MOST = 1 << 48  # more steps than a run takes: a larger number is damage
_MINUTE = 60.0
#: Lists and objects within each other: whoever shows or sends deeper ones would run out of stack.
_DEEPEST = 64
#: Seconds of a step that count for the rate; others are damage, and the inverse of some is no number.
_SHORTEST, _LONGEST = 1e-9, 1e9
_HEADER = struct.Struct("<8sIIQ")
_COMPARED = tuple(dict.fromkeys(name for names in COMPARED.values() for name in names))
_TOLD = (b'"place"', b'"end"')


def text(value: object, most: int = 300) -> str:
    """Return a text that every database stores, of at most `most` characters; empty for anything else."""
    if not isinstance(value, str):
        return ""
    return value[:most].replace("\0", "\ufffd").encode("utf-8", "replace").decode()


def number(value: object) -> int | None:
    """Return an integer that every database stores; None for anything else."""
    return value if isinstance(value, int) and not isinstance(value, bool) and abs(value) < _MOST else None


def seconds(value: object) -> float | None:
    """Return an ISO 8601 time as seconds since the epoch; None for anything else."""
    with suppress(ValueError, OverflowError):
        found = datetime.fromisoformat(str(value)[:40])
        return (found if found.tzinfo else found.replace(tzinfo=UTC)).timestamp()
    return None


def document(data: bytes | None) -> dict[str, Any] | None:
    """Return the JSON object in a file; None if there is none."""
    with suppress(ValueError, RecursionError):
        value = json.loads((data or b"").decode("utf-8", "replace"))
        return value if isinstance(value, dict) else None
    return None


def dumped(value: object) -> str:
    """Return a value as strict JSON in ASCII."""
    return json.dumps(strict(value), allow_nan=False)


def is_deep(value: object) -> bool:
    """Whether a JSON value is nested deeper than a run ever writes."""
    level = [value]
    for _ in range(_DEEPEST):
        held = [each for each in level if isinstance(each, dict | list)]
        level = [item for each in held for item in (each.values() if isinstance(each, dict) else each)]
        if not level:
            return False
    return True


def of_run(run: Mapping[str, Any]) -> dict[str, Any]:
    """Return the columns of table `run` that follow from `run.json`."""
    command = run.get("command")
    words = [text(word, 1000) for word in command[:100]] if isinstance(command, list) else []
    world = number(run.get("world"))
    return {
        "name": text(run.get("name"), 100),
        "owner": text(run.get("owner"), 100),
        "job": text(run.get("job"), 100),
        "node": text(run.get("node"), 255),
        "world": world if world is not None and 0 < world <= 1 << 20 else None,
        "command": " ".join(words)[:4000],
        "document": dumped(run),
    }


def of_finding(finding: Finding, place: int) -> dict[str, Any]:
    """Return the columns of table `finding`, except its run and the time at which the hub first saw it."""
    kind = re.sub(r"\W*\d+\W*", "", text(finding.subject[0] if finding.subject else "", 200).rpartition(".")[2])
    return {
        "id": text(finding.id, 200) or f"{finding.code}#{place}",
        "place": place,
        "code": text(finding.code, 20),
        "severity": finding.severity.label,
        "title": text(finding.title),
        "step": number(finding.step),
        "last_step": number(finding.last_step),
        "count": number(finding.count) or 1,
        "ranks": dumped(finding.ranks[:RANKS]),
        "subject": dumped([text(subject) for subject in finding.subject[:100]]),
        "open": not is_over(finding),
        "time": seconds(finding.time),
        "document": json.dumps(json.loads(finding.to_json())),
        "group": f"{text(finding.code, 20)} {kind[:40]}".strip(),
    }


def of_rank(path: str, data: bytes, run_id: str) -> dict[str, Any]:
    """Return the columns of table `rank` that follow from a file in the rank's folder."""
    name = path.rpartition("/")[2]
    if name == "stacks.txt":
        return {"stacks": text(data.decode("utf-8", "replace"), 1 << 16)}
    found = document(data)
    if found is None or found.get("run") != run_id:  # of an earlier run in the same directory
        return {}
    match name:
        case "place.json":
            return {
                "node": text(found.get("node"), 255),
                "local_rank": number(found.get("local_rank")),
                "metrics_url": text(found.get("metrics_url"), 300) or None,
            }
        case "outcome.json":
            return {"outcome": text(found.get("reason"), 1000)}
    return {}


def told(lines: bytes) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (rank, columns) with the device and the outcome that ranks announced, from lines of observations."""
    for line in lines.splitlines():
        if not any(topic in line for topic in _TOLD):
            continue
        payload = (document(line) or {}).get("payload")
        if not isinstance(payload, dict) or not isinstance(value := payload.get("value"), dict):
            continue
        rank = number(payload.get("rank"))
        if rank is not None and payload.get("topic") == "place":
            yield rank, {"device": text(value.get("device"), 60)}
        elif rank is not None and payload.get("topic") == "end":
            yield rank, {"outcome": text(value.get("reason"), 1000)}


# --- rows -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Layout:
    """The positions of summarised values in the rows of a run; each version of ddpdebug has its own."""

    row: struct.Struct
    read: Any  # row -> rank, step, optimizer, flags, loss, seconds
    place: Any  # row -> optimizer, step
    own: bool  # it is that of this version


@lru_cache(maxsize=32)
def _layout(version: int, form: str, fields: tuple[str, ...]) -> Layout | None:
    if not re.fullmatch(r"<[Qqd]{1,512}", form) or len(fields) != len(form) - 1:
        return None
    try:
        places = [fields.index(name) for name in ("rank", "step", "optimizer", "flags", "loss", "step_seconds")]
    except ValueError:
        return None
    kinds = "".join(form[place + 1] for place in places)
    if not re.fullmatch("[Qq]{4}dd", kinds):
        return None
    own = {"version": version, "format": form, "fields": list(fields)} == layout_here()
    return Layout(struct.Struct(form), itemgetter(*places), itemgetter(places[2], places[1]), own)


def layout_of(run: Mapping[str, Any]) -> Layout | None:
    """Return the layout of a run's rows; None if they cannot be read."""
    told = run.get("layout")
    if not isinstance(told, dict) or not isinstance(fields := told.get("fields"), list):
        return None
    known = isinstance(told.get("version"), int) and isinstance(told.get("format"), str)
    return _layout(told["version"], told["format"], tuple(map(str, fields))) if known else None


@dataclass(slots=True)
class Bucket:
    """The sums over a span of steps of one rank, as a row of table `summary` holds them."""

    first_step: int
    last_step: int
    steps: int = 0
    loss_sum: float = 0.0
    losses: int = 0
    loss_last: float | None = None
    seconds_sum: float = 0.0
    seconds_max: float = 0.0
    differing: int = 0

    def add(self, step: int, loss: float, taken: float) -> None:
        """Add a step."""
        self.first_step, self.last_step = min(self.first_step, step), max(self.last_step, step)
        self.steps += 1
        if math.isfinite(loss):
            self.loss_sum, self.losses, self.loss_last = self.loss_sum + loss, self.losses + 1, loss
        if math.isfinite(taken):
            self.seconds_sum, self.seconds_max = self.seconds_sum + taken, max(self.seconds_max, taken)


class Folding:
    """New rows of a run, folded into buckets of `width` steps.

    Args:
        rate: steps a second over about a minute, as far as it is known.
    """

    def __init__(self, width: int, world: int | None, rate: float | None) -> None:
        self.width, self.rate = width, rate
        self.last: dict[int, int] = {}  # rank -> newest step
        self.buckets: dict[tuple[int, int], Bucket] = {}  # rank, number of the bucket
        self._world = world or 1 << 20

    def take(self, data: bytes, at: int, layout: Layout) -> int:
        """Fold the rows in a piece of a file that begins at `at`; return the position up to which it was read."""
        size = layout.row.size
        if at == 0:
            if len(data) < _HEADER.size:
                return 0
            if _HEADER.unpack_from(data)[0] != b"ddpdebug" or _HEADER.unpack_from(data)[2] != size:
                return at + len(data)
            at, data = _HEADER.size, data[_HEADER.size :]
        whole = len(data) - len(data) % size
        rows = layout.row.iter_unpack(memoryview(data)[:whole])
        for (optimizer, step), group in groupby(rows, key=layout.place):
            if 0 <= step < _MOST:
                self._step(list(group), optimizer, step, layout)
        return at + whole

    def _step(self, rows: list[tuple[Any, ...]], optimizer: int, step: int, layout: Layout) -> None:
        if layout.read(rows[0])[3] & Flag.LAST_STATE:  # no step
            return
        for row in rows:
            rank, _, _, flags, loss, taken = layout.read(row)
            if optimizer != 0 or not 0 <= rank < min(self._world, RANKS):
                continue
            self.last[rank] = max(step, self.last.get(rank, 0))
            if rank == 0 and _SHORTEST < taken < _LONGEST and not flags & Flag.FIRST:  # that one takes long
                mean = taken if self.rate is None else 1 / self.rate
                self.rate = 1 / (mean + max(1 / max(step, 1), -math.expm1(-mean / _MINUTE)) * (taken - mean))
            if rank < SUMMARISED:
                self._bucket(rank, step).add(step, loss, taken)
        if layout.own and optimizer == 0 and len(rows) == self._world and len({_digests(row) for row in rows}) > 1:
            found = step_of(optimizer, step, {row[0]: Row._make(row) for row in rows}, self._world)
            for rank in {rank for ranks in dissenters(found).values() for rank in ranks}:
                if rank < SUMMARISED:
                    self._bucket(rank, step).differing += 1

    def _bucket(self, rank: int, step: int) -> Bucket:
        before = self.width
        while step // self.width >= BUCKETS:
            self.width *= 2
        if self.width != before:
            self.buckets = merged(self.buckets.items(), self.width // before)
        return self.buckets.setdefault((rank, step // self.width), Bucket(step, step))


def merged(buckets: Iterable[tuple[tuple[int, int], Bucket]], times: int) -> dict[tuple[int, int], Bucket]:
    """Join buckets into ones `times` as wide, by rank and number; those of a rank come in the order of their steps."""
    found: dict[tuple[int, int], Bucket] = {}
    for (rank, place), bucket in buckets:
        one = found.setdefault((rank, place // times), bucket)
        if one is bucket:
            continue
        one.first_step, one.last_step = min(one.first_step, bucket.first_step), max(one.last_step, bucket.last_step)
        one.steps, one.losses = one.steps + bucket.steps, one.losses + bucket.losses
        one.loss_sum, one.seconds_sum = one.loss_sum + bucket.loss_sum, one.seconds_sum + bucket.seconds_sum
        one.seconds_max = max(one.seconds_max, bucket.seconds_max)
        one.loss_last = one.loss_last if bucket.loss_last is None else bucket.loss_last
        one.differing += bucket.differing
    return found


_digests: Any = itemgetter(*(Row._fields.index(name) for name in _COMPARED))
