"""The rules of a run behind calls and replies in JSON: the leading rank calls, the rules reply.

The same calls reach them in the companion's process and, where there can be none, in the rank itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ddpdebug.companion.calls import step_of_json
from ddpdebug.diagnosis.engine import Diagnosis
from ddpdebug.diagnosis.rejudge import replay
from ddpdebug.schema.announcements import read_announcement
from ddpdebug.schema.details import read_detail
from ddpdebug.schema.finding import Finding
from ddpdebug.schema.requests import Request


class Judge:
    """The diagnosis of one run.

    Args:
        begin: what the rank says first: `world`, `config`, and `directory`, from whose records to go on, if any.
    """

    def __init__(self, begin: Mapping[str, Any]) -> None:
        self._troubles: list[tuple[str, str]] = []
        self._found: list[tuple[Finding, bool]] = []
        self._asks: list[Request] = []
        self._curious_of: list[str] = []
        self._diagnosis = Diagnosis(world=begin["world"], config=begin["config"], on_trouble=self._trouble)
        if begin["directory"] is not None:
            replay(Path(begin["directory"]), self._diagnosis, self._found.extend)
        self._acts: dict[str, Callable[..., object]] = {
            "step": self._feed,
            "detail": self._answer,
            "fact": self._tell,
            "meet": self._diagnosis.meet,
            "adopt": self._adopt,
            "tick": lambda: self._found.extend(self._diagnosis.tick()),
            "news": lambda: self._found.extend(self._diagnosis.news()),
            "finish": lambda: self._found.extend(self._diagnosis.finish()),
            "curious": self._curious,
        }

    def _trouble(self, part: str, message: str) -> None:
        self._troubles.append((part, message))

    def reply(self, calls: Iterable[Sequence[Any]]) -> dict[str, Any]:
        """Apply calls, each a name with arguments; return the findings and the detail requests."""
        for name, *arguments in calls:
            self._acts[name](*arguments)
        found, self._found = self._found, []
        troubles, self._troubles = self._troubles, []
        curious, self._curious_of = self._curious_of, []
        asks, self._asks = self._asks + self._diagnosis.requests(), []
        return {
            "found": [(finding.to_json(), new) for finding, new in found],
            "asks": [(asked.optimizer, asked.step, asked.kind, asked.last, sorted(asked.ranks)) for asked in asks],
            "busy": self._diagnosis.busy,
            "waits": self._diagnosis.waits,
            "curious": curious,
            "troubles": troubles,
        }

    def _feed(self, step: Mapping[str, Any]) -> None:
        self._asks += self._diagnosis.feed(step_of_json(step))

    def _answer(self, rank: int, optimizer: int, step: int, kind: str, value: Any, last: bool) -> None:  # noqa: FBT001 - from JSON
        self._diagnosis.answer(rank, optimizer, step, kind, read_detail(kind, value), last=last)

    def _tell(self, topic: str, rank: int, value: Any) -> None:
        self._diagnosis.tell(topic, rank, read_announcement(topic, value))

    def _adopt(self, findings: Sequence[str]) -> None:
        self._diagnosis.adopt([Finding.from_json(text) for text in findings])

    def _curious(self, step: Mapping[str, Any]) -> None:
        self._curious_of += self._diagnosis.curious(step_of_json(step))
