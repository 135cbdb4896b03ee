"""Where a validation loss comes from: told by the script, or seen in its evaluations."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ddpdebug.detectors.kinds import Step
from ddpdebug.schema.announcements import ValidationLine


class ValidationSource:
    """Takes the validation losses that belong together: what was told counts, and else one line of the script."""

    def __init__(self) -> None:
        self._told = False
        self._seen: dict[int, ValidationLine] = {}  # by rank: the line that is followed
        self._renewed = False

    def hear(self, topic: str, facts: Mapping[int, Any]) -> None:
        """Hear which line of the script a rank reads."""
        if topic == "alone:evaluation":
            self._renewed |= any(rank in self._seen for rank in facts)  # another line than before
            self._seen.update(facts)

    def value(self, step: Step) -> float | None:
        """Return the mean of the ranks' values in this step, None where there is none."""
        told = step.total("val_loss told")
        self._renewed |= bool(told[0]) and not self._told
        self._told |= bool(told[0])
        count, total = told if self._told else step.total("val_loss seen")
        return total / count if count else None

    def renewed(self) -> bool:
        """Return, once, whether what comes now is another quantity than before."""
        renewed, self._renewed = self._renewed, False
        return renewed

    def location(self) -> str | None:
        """Return the line whose losses were seen."""
        return next((fact.location for fact in self._seen.values()), None) if not self._told else None

    def evidence(self) -> dict[str, Any]:
        """The evidence about where the value comes from."""
        if self._told:
            return {"validation_loss": "told by observe(val_loss=)"}
        fact = next(iter(self._seen.values()), None)
        if fact is None:
            return {}
        source = f" {fact.source}" if fact.source else ""
        place = f" at {fact.location}" if fact.location else ""
        mean = f"mean of {fact.batches} batch{'es' if fact.batches != 1 else ''}"
        return {"validation_loss": f"seen{source} in evaluation{place}, {mean}"}
