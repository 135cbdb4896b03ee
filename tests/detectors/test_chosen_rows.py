"""The rules' own examples as the judge of very many ranks sees them: chosen rows, and all where it asks for these."""

from __future__ import annotations

import base64
import math
import random
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ddpdebug.detectors.base import Detector, Facts
from ddpdebug.detectors.catalog import catalog
from ddpdebug.detectors.comparison import separate_groups
from ddpdebug.detectors.examples import healthy_row
from ddpdebug.diagnosis.engine import Diagnosis
from ddpdebug.exchange.partial import Key, Partial
from ddpdebug.monitor import many_ranks
from ddpdebug.monitor.many_ranks import WholeSteps, chosen_step
from ddpdebug.schema import step as steps
from ddpdebug.schema.announcements import WrapperGroup
from ddpdebug.schema.finding import Finding
from ddpdebug.schema.row import Flag, Row, encode
from ddpdebug.schema.step import Step

_DECISION = Path(__file__).resolve().parents[2] / "docs/decisions/033-many-ranks.md"
RULES = [rule for rule in catalog() if not rule.code.startswith("SLOW")]
#: Judge the rows of all ranks only, and ask for them by no chosen ones.
BLIND = {rule.code for rule in RULES if rule.all_ranks and rule.wants_all is Detector.wants_all}
#: Two ranks that are alike are seldom both chosen, nor are all that hold the same shards; what shows in one step of an
#: epoch is over when its details are asked for.
NOT_CHOSEN = {"DATA901-1", "RCP816-2", "SYNC201-2"}


class _Judge:
    """What the rank that judges does with the steps of very many."""

    def __init__(self, rule: type[Detector], world: int) -> None:
        self.diagnosis = Diagnosis(world=world, detectors=[rule()], on_trouble=self._fail)
        self.whole = WholeSteps(world, self._ask, lambda: 0.0, self.diagnosis.curious)
        self._now: Step
        self._asked, self.answers = False, True
        self.found: list[Finding] = []

    def take(self, item: Facts | Step) -> None:
        if isinstance(item, Facts):
            for rank, value in item.values.items():
                self.diagnosis.tell(item.topic, rank, value)
        elif item.rows:
            self._now = item
            partial = Partial()
            for row in item.rows.values():
                partial.add_row(encode(row))
            for key, part in partial.steps.items():
                self.whole.add(key, part, chosen_step(key, part, item.world))
            for row in item.rows.values() if self._asked and self.answers else ():
                self.whole.hear(row.rank, base64.b64encode(encode(row)).decode())
            self._asked = False
        self.wait()

    def wait(self) -> None:
        """Let a tick pass."""
        for step in self.whole.ready():
            self._feed(step)
        self.found += [finding for finding, is_new in self.diagnosis.tick() if is_new]

    def end(self) -> list[Finding]:
        return self.found + [finding for finding, is_new in self.diagnosis.finish() if is_new]

    def _ask(self, _: Key) -> None:
        self._asked = True

    def _feed(self, step: Step) -> None:
        for request in self.diagnosis.feed(step):
            for rank in request.ranks:
                value = self._now.details.get(request.kind, {}).get(rank)
                self.diagnosis.answer(rank, request.optimizer, request.step, request.kind, value)

    @staticmethod
    def _fail(part: str, message: str) -> None:
        raise AssertionError(f"{part}: {message}")


@pytest.fixture(autouse=True)
def _many(monkeypatch: pytest.MonkeyPatch) -> None:
    """The few ranks of the examples are very many, and nothing is whole because it is early."""
    monkeypatch.setattr(steps, "FLAT", 1)
    monkeypatch.setattr(many_ranks, "_FIRST_STEPS", frozenset())


def _judged(rule: type[Detector], example: Iterable[Any]) -> list[Finding]:
    items = list(example)
    judge = _Judge(rule, max(len(item.values) if isinstance(item, Facts) else item.world for item in items))
    for item in items:
        judge.take(item)
    return judge.end()


def _examples(rule: type[Detector], kind: str) -> Iterator[tuple[int, list[Any]]]:
    """Yield the examples of several ranks that are not long, with their numbers."""
    for number, example in enumerate(getattr(rule, kind)):
        items = list(example)
        several = [item for item in items if isinstance(item, Step) and item.world > 1]
        if 0 < len(several) <= 300:
            yield number, items


@pytest.mark.parametrize("rule", [rule for rule in RULES if rule.code not in BLIND], ids=lambda rule: rule.code)
def test_a_rule_fires_on_its_examples(rule: type[Detector]) -> None:
    """Of chosen rows, but for rules that see the rows of all in the first steps and once a minute only."""
    for number, example in _examples(rule, "fires_on"):
        if f"{rule.code}-{number}" not in NOT_CHOSEN:
            assert {finding.code for finding in _judged(rule, example)} == {rule.code}, number


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.code)
def test_a_rule_is_silent_on_its_examples(rule: type[Detector]) -> None:
    """What some rows do not show is no reason to speak."""
    for number, example in _examples(rule, "silent_on"):
        assert _judged(rule, example) == [], number


def _job(count: int, odd: Callable[[int, int], dict[str, Any]], world: int = 40) -> Iterator[Step]:
    """Yield steps of many ranks, whose times vary; `odd` gives the fields in which a rank differs in a step."""
    chance = random.Random(5)
    for number in range(count):
        rows = {}
        for rank in range(world):
            row = healthy_row(rank, number, world)._replace(step_seconds=chance.random(), backward_seconds=0.0)
            more = odd(rank, number)
            rows[rank] = row._replace(**{**more, "flags": int(row.flags) | int(more.get("flags", 0))})
        yield Step(step=number, optimizer=0, world=world, rows=rows)


def _codes(code: str, job: Iterable[Step]) -> list[Finding]:
    return _judged(next(rule for rule in RULES if rule.code == code), job)


def test_an_odd_loss_is_found_by_chosen_rows() -> None:
    """Of one rank of many, high or low, and where all are alike of none; nor are two that take turns."""
    for loss in (9.0, 0.01):
        (found,) = _codes("RANK108", _job(60, lambda rank, _, loss=loss: {"loss": loss} if rank == 17 else {}))
        assert found.ranks == (17,)
    assert not _codes("RANK108", _job(60, lambda rank, number: {"loss": 9.0} if rank == 17 + number % 2 else {}))
    assert not _codes("RANK108", _job(60, lambda *_: {}))


def test_a_mean_is_that_of_all_ranks() -> None:
    """Not that of the chosen rows, among which the odd ones are."""
    losses = [1.0] * 39 + [41.0]
    (step,) = _job(1, lambda rank, _: {"loss": losses[rank], "val_loss": losses[rank] if rank % 2 else math.nan})
    partial = Partial()
    for row in step.rows.values():
        partial.add_row(encode(row))
    ((key, part),) = partial.steps.items()
    chosen = chosen_step(key, part)
    assert chosen.mean_loss == step.mean_loss == 2.0
    assert chosen.total("val_loss told") == step.total("val_loss told") == (20, 60.0)


@pytest.mark.parametrize("parted", [False, True])
def test_what_is_not_finite_is_found_where_the_rows_of_all_do_not_come(parted: bool) -> None:
    """Also in steps in which healthy ranks are of several kinds; a kind is named with all ranks of it."""
    rule = next(rule for rule in RULES if rule.code == "NUM303")
    judge = _Judge(rule, 40)
    judge.answers = False
    for step in _job(
        6,
        lambda rank, number: {
            "flags": Flag.LOCAL_GRADS_NONFINITE if number == 5 and rank >= 20 else 0,
            "modes_digest": 5 if parted and rank % 2 else 6,
        },
    ):
        judge.take(step)
    for _ in range(200):
        judge.wait()
    (found,) = judge.end()
    assert (found.step, found.ranks) == (5, tuple(range(20, 40)))


def test_a_rank_with_a_gradient_less_is_named_with_its_kind() -> None:
    """In the fifth step in which the same ranks lack the same."""
    (found,) = _codes(
        "SYNC207",
        _job(6, lambda rank, _: {"presence_digest": 5, "without_grad": 1} if rank in {3, 30} else {}),
    )
    assert found.ranks == (3, 30)


def test_ranks_that_are_numbered_higher_than_the_rows_make_no_group_smaller() -> None:
    """A step knows how many ranks the job has, however few of them are chosen."""
    partial = Partial()
    for rank in range(40):
        partial.add_row(encode(Row(rank=rank, step=3)))
    ((key, part),) = partial.steps.items()
    group = {"group:0": {0: WrapperGroup(ranks=tuple(range(40)))}}
    assert not separate_groups(replace(chosen_step(key, part, 40), facts=group))
    assert separate_groups(replace(chosen_step(key, part, 80), facts=group))
    assert not chosen_step(key, part, 80).complete


def test_the_decision_says_which_rules_judge_by_the_rows_of_all() -> None:
    """And which ask for them."""
    lines = [line.split("|")[1:3] for line in _DECISION.read_text().splitlines() if line.startswith("| ")]
    said = {what.strip(): {*re.findall(r"[A-Z]+\d{3}", rules)} for rules, what in lines}
    assert said["the rows of all, as they come"] == BLIND
    asking = {rule.code for rule in RULES if rule.wants_all is not Detector.wants_all}
    assert set().union(*(codes for what, codes in said.items() if "ask for" in what or "asks for" in what)) == asking
