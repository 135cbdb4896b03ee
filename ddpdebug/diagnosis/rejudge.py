"""Judges a saved run again, with the same rules and the same result. Torch-free; reads only the run directory.

What was heard lies in the files in the order in which it came: rows as the steps that were judged, and between them
the ranks' details and announcements. They pass through the same diagnosis as in the run.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from ddpdebug.detectors.base import Detector
from ddpdebug.diagnosis.engine import Diagnosis
from ddpdebug.diagnosis.reporter import Reporter
from ddpdebug.run_directory.reader import Observed, numbered_steps, read_last_state, read_observations, read_run
from ddpdebug.schema.announcements import read_announcement
from ddpdebug.schema.details import Detail, read_detail
from ddpdebug.schema.finding import Finding
from ddpdebug.schema.requests import Request
from ddpdebug.schema.step import Step

_Place = tuple[int, int, str, bool]  # optimizer, step, kind of detail, whether of what the last step has left


def rejudge(directory: Path, *, detectors: Sequence[Detector] | None = None) -> list[Finding]:
    """Return the findings of a saved run, in the order in which they arise.

    Code, step, ranks and subject are those of the run. What was measured outside the rules (the first differing
    element) and the time are not judged again. Of a run that was too long to be kept whole, what was kept is judged.

    Args:
        detectors: the rules; all of this version's catalogue by default.

    Raises:
        ValueError: the directory is not that of a run, or its rows have the layout of another version.
    """
    run = read_run(directory)
    config, size = run.get("config"), run.get("world") or 1
    reporter = Reporter(lambda _: None, lambda: "")
    reporter.run_id = run["run"]
    settings = {**(config if isinstance(config, dict) else {}), "world": size}
    diagnosis = Diagnosis(world=size, config=settings, detectors=detectors)
    replay(directory, diagnosis, reporter.report)
    if run.get("outcome") is not None:  # what only the end shows is known of a run that reached it
        reporter.report(diagnosis.finish())
    return reporter.findings


def replay(directory: Path, diagnosis: Diagnosis, report: Callable[[list[tuple[Finding, bool]]], object]) -> None:
    """Feed the records of a run directory to a new diagnosis, and report its findings."""
    fed, observed = _Replay(diagnosis, report), deque(read_observations(directory))
    fed.expect(observed)
    for number, step in numbered_steps(directory):
        while observed and observed[0].rows <= number:
            fed.hear(observed.popleft())
        fed.feed(step)
    while observed:
        fed.hear(observed.popleft())
    fed.judge()


class _Replay:
    """A saved run, fed to a diagnosis in the order in which it was recorded."""

    def __init__(self, diagnosis: Diagnosis, report: Callable[[list[tuple[Finding, bool]]], object]) -> None:
        self._diagnosis, self._report = diagnosis, report
        self._to_come: dict[_Place, set[int]] = {}
        self._heard: dict[_Place, dict[int, Detail | None]] = {}
        self._answered = False  # since steps were last judged

    def expect(self, observed: Iterable[Observed]) -> None:
        """Learn which answers the run got, so that nothing waits for others."""
        for one in observed:
            if (place := _place(one)) is not None:
                self._to_come.setdefault(place, set()).update(_ranks(one))

    def hear(self, one: Observed) -> None:
        """Pass on an answer or an announcement."""
        payload, place, ranks = one.payload, _place(one), _ranks(one)
        if place is not None:
            value = read_detail(place[2], payload.get("value"))
            for rank in ranks:
                self._heard.setdefault(place, {})[rank] = value
                self._diagnosis.answer(rank, *place[:3], value, last=place[3])
            self._answered = True
        elif one.kind == "last_state" and (step := read_last_state(payload, self._diagnosis.world)) is not None:
            self.feed(step)
        elif one.kind == "fact" and ranks and isinstance(payload.get("topic"), str):
            if self._answered:
                self.judge()  # a step whose answers were complete was judged before this was heard
            topic = payload["topic"]
            announcement = read_announcement(topic, payload.get("value"))
            for rank in ranks:
                self._diagnosis.tell(topic, rank, announcement)

    def feed(self, step: Step) -> None:
        """Pass on a step."""
        self._answer(self._diagnosis.feed(step))
        self.judge()

    def judge(self) -> None:
        """Judge what is known."""
        self._answered = False
        self._report(self._diagnosis.tick())
        while requests := self._diagnosis.requests():
            self._answer(requests)
            self._report(self._diagnosis.tick())

    def _answer(self, requests: Iterable[Request]) -> None:
        """Answer at once what was heard already, and with nothing what never came."""
        for request in requests:
            place = (request.optimizer, request.step, request.kind, request.last)
            heard = self._heard.get(place, {})
            for rank in range(self._diagnosis.world):
                if rank in heard or rank not in self._to_come.get(place, ()):
                    self._diagnosis.answer(rank, *place[:3], heard.get(rank), last=request.last)


def _ranks(one: Observed) -> list[int]:
    """Return who has said it: one rank, or several of very many in the same words."""
    told = one.payload.get("ranks", [one.payload.get("rank")])
    return [rank for rank in told if isinstance(rank, int)] if isinstance(told, list) else []


def _place(one: Observed) -> _Place | None:
    """Return which question a saved detail answers."""
    payload = one.payload
    optimizer, step, kind = payload.get("optimizer"), payload.get("step"), payload.get("detail")
    if one.kind != "detail" or not isinstance(payload.get("rank"), int):
        return None
    if isinstance(optimizer, int) and isinstance(step, int) and isinstance(kind, str):
        return optimizer, step, kind, payload.get("last") is True
    return None
