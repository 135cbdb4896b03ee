"""The kinds of rules: what counts as a streak, who of a chain speaks, which announcements are heard."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from ddpdebug.detectors.base import Facts
from ddpdebug.detectors.catalog import catalog
from ddpdebug.detectors.examples import step_at
from ddpdebug.detectors.kinds import ChainRule, EventRule, Streak, StreakRule
from ddpdebug.detectors.thresholds import Threshold
from ddpdebug.schema.finding import Finding, Severity
from ddpdebug.schema.row import Flag
from ddpdebug.schema.step import Step
from ddpdebug.sinks.prometheus.exporter import TOLD_ONCE

CHAINS = [rule for rule in catalog() if issubclass(rule, ChainRule)]


class Slow(StreakRule):
    """A rank whose loss is above 1 in three steps in a row; a skipped step does not count."""

    code, severity, title = "TEST001", Severity.INFO, "slow"
    slow_steps = enough = Threshold(3, "steps", source="chosen")

    def shown(self, step: Step) -> Mapping[int, bool] | None:
        return None if step.any(Flag.SKIPPED) else {rank: row.loss > 1 for rank, row in step.rows.items()}

    def report(self, step: Step, streaks: Mapping[int, Streak]) -> Iterator[Finding]:
        for rank, streak in streaks.items():
            yield self.finding(step, step=streak.first, ranks=(rank,), evidence={"length": streak.length})


class Heard(EventRule):
    """Two kinds of announcements."""

    code, severity, title = "TEST002", Severity.INFO, "heard"
    events = ("loss", "audit:detached")

    def judge(self, fact: Any) -> Mapping[str, Any] | None:
        return None if fact.step == 8 else {"location": "train.py:1"}


def test_a_streak_is_counted_for_each_thing_and_optimizer() -> None:
    """What interrupts one leaves the others; steps that do not count neither end nor lengthen it."""
    rule, high = Slow(), {"loss": 2.0}
    shown = [{0: high}, {0: high, 1: high}, {1: high}, {0: high, 1: high}]
    found: list[Finding] = []
    for number, odd in enumerate(shown):
        found += rule.detect(step_at(number, world=2, odd=odd, loss=0.0))
        found += rule.detect(step_at(number, world=2, optimizer=1, loss=0.0))
        found += rule.detect(step_at(number, world=2, flags=Flag.SKIPPED, loss=0.0))
    assert [(f.step, f.last_step, f.ranks, f.evidence) for f in found] == [(1, 3, (1,), {"length": 3})]
    assert rule.running(0) == [1, 0]
    assert rule.running(1) == []


def test_how_long_a_streak_must_be_is_a_setting() -> None:
    """Under the threshold's own name."""
    rule = Slow({"threshold": {"slow_steps": 1}})
    assert len(list(rule.detect(step_at(0, world=2, loss=2.0)))) == 2


@pytest.mark.parametrize(
    "topic, fact, count",
    [
        ("loss", {"kind": "range", "loss": "Bce", "low": 0.0, "high": 2.0}, 1),
        ("loss", {"kind": "input", "loss": "NllLoss", "before": ["Softmax"]}, 1),
        ("audit", {"kind": "detached"}, 1),
        ("audit", {"kind": "frozen", "share": 0.9}, 0),
        ("schedule", {"class": "StepLR"}, 0),
    ],
)
def test_an_event_rule_hears_what_it_names(topic: str, fact: dict[str, Any], count: int) -> None:
    """A whole topic, or one kind of it; step and rank are those of the announcement."""
    facts = Facts(topic=f"alone:{topic}", values={3: {"step": 7, **fact}, 4: {"step": 8, **fact}})
    found = list(Heard().compare(facts.topic, facts.values))
    assert [(f.step, f.ranks, f.location) for f in found] == [(7, (3,), "train.py:1")] * count


@pytest.mark.parametrize("rule", CHAINS, ids=lambda rule: rule.code)
def test_one_rule_of_a_chain_speaks(rule: type[ChainRule]) -> None:
    """Whatever the step shows, it is one code: that of the first link that can explain it."""
    links = [other() for other in CHAINS if other.group == rule.group]
    for example in rule.fires_on:
        steps = [item for item in example if not isinstance(item, Facts)]
        spoken = [{finding.code for link in links for finding in link.detect(step)} for step in steps]
        assert {rule.code} in spoken
        assert all(len(codes) <= 1 for codes in spoken)


def test_a_chain_has_one_beginning() -> None:
    """Each link but the first names another one of its group, and no two the same."""
    for group in {rule.group for rule in CHAINS}:
        links = [rule for rule in CHAINS if rule.group == group]
        before = [rule.after for rule in links]
        assert len(set(before)) == len(links)
        assert None in before


def test_an_exporter_knows_which_findings_are_never_over() -> None:
    """By their codes, for a rank that serves metrics does not load the rules."""
    once = {rule.code for rule in catalog() if issubclass(rule, EventRule)}
    assert {rule.code for rule in catalog() if rule.code.startswith(TOLD_ONCE)} == once
