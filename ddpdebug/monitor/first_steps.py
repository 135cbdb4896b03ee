"""Detail requests about the first steps, whatever they show: how the run is set up. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass, field

from ddpdebug.schema.requests import Request
from ddpdebug.schema.row import Flag
from ddpdebug.schema.step import Step

_SETTINGS = ("contract", "hyper", "modes")
#: What these say of a parameter or buffer is whether it has changed: they are asked twice.
_STATES = ("parameters", "buffers", "replicas")
_LATER = 8
#: So many different sets of modes are asked for.
_MAX_MODES = 4


@dataclass(slots=True)
class _Asked:
    first: int | None = None  # the first step that was checked in full
    twice: bool = False
    modes: set[int] = field(default_factory=set)


class FirstSteps:
    """Requests details of each optimizer's first steps from the lowest rank; they are saved, no rule judges them."""

    def __init__(self) -> None:
        self._asked: dict[int, _Asked] = {}

    def questions(self, step: Step) -> list[Request]:
        """Return the requests about a step."""
        if not step.rows or step.any(Flag.ALONE | Flag.LAST_STATE):
            return []
        rank, known = min(step.rows), self._asked.setdefault(step.optimizer, _Asked())
        row, kinds = step.rows[rank], list[str]()
        if row.has(Flag.CHECKED) and known.first is None:
            known.first = step.step
            kinds += [*_SETTINGS, *_STATES]
        elif (
            row.has(Flag.CHECKED) and not known.twice and known.first is not None and step.step >= known.first + _LATER
        ):
            known.twice = True
            kinds += ["contract", *_STATES]
        if row.modes_digest and row.modes_digest not in known.modes and len(known.modes) < _MAX_MODES:
            known.modes.add(row.modes_digest)
            kinds += [] if "modes" in kinds else ["modes"]
        return [Request(optimizer=step.optimizer, step=step.step, kind=kind, ranks=frozenset({rank})) for kind in kinds]
