"""The examples of the rules, judged; without pytest, so that fresh interpreters are quick with it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ddpdebug.detectors.base import Detector, Facts
from ddpdebug.diagnosis.engine import Diagnosis
from ddpdebug.schema.finding import Finding


def judge(rule: type[Detector], example: Iterable[Any]) -> list[Finding]:
    """Feed an example to the rule alone."""
    detector = rule()
    findings: list[Finding] = []
    for item in example:
        if isinstance(item, Facts):
            findings += detector.compare(item.topic, item.values)
        else:
            findings += detector.detect(item)
            detector.newest, detector.next_step = item, max(detector.next_step, item.step + 1)
    return [*findings, *detector.finish()]


def diagnose(rule: type[Detector], example: Iterable[Any]) -> list[Finding]:
    """Feed an example through the diagnosis; the steps' own details are the answers."""
    worlds = [len(item.values) if isinstance(item, Facts) else item.world for item in example]
    diagnosis = Diagnosis(world=max(worlds), detectors=[rule()])
    new: list[Finding] = []
    for item in example:
        if isinstance(item, Facts):
            for rank, value in item.values.items():
                diagnosis.tell(item.topic, rank, value)
        else:
            for request in diagnosis.feed(item):
                for rank in range(item.world):
                    value = item.details.get(request.kind, {}).get(rank)
                    diagnosis.answer(rank, request.optimizer, request.step, request.kind, value)
        new += [finding for finding, is_new in diagnosis.tick() if is_new]
    return new + [finding for finding, is_new in diagnosis.finish() if is_new]
