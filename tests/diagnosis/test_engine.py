"""The order of judgement, details on demand, first causes, and that every rank comes to the same findings."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from ddpdebug.detectors.base import Detector
from ddpdebug.detectors.catalog import catalog
from ddpdebug.detectors.examples import contract, digest, gradients, step_at
from ddpdebug.detectors.ignored import read
from ddpdebug.diagnosis import engine
from ddpdebug.diagnosis.engine import DETAIL_TICKS, QUEUE_STEPS, Diagnosis, Request
from ddpdebug.diagnosis.reporter import Reporter
from ddpdebug.diagnosis.root_causes import QUIET_STEPS, Incidents, explains, refine
from ddpdebug.schema.announcements import read_announcement
from ddpdebug.schema.details import read_detail
from ddpdebug.schema.finding import Finding, Severity
from ddpdebug.schema.row import DIGESTS, Digest, Flag, Row
from ddpdebug.schema.step import Step
from ddpdebug.sinks import FindingIgnored, FindingRaised

Answers = Callable[[str, int, int], Any]
ROOT = Path(__file__).parent.parent.parent


def answer(diagnosis: Diagnosis, rank: int, optimizer: int, step: int, kind: str, value: Any) -> None:
    """Answer by a JSON value, as it comes from the wire."""
    diagnosis.answer(rank, optimizer, step, kind, read_detail(kind, value))


def tell(diagnosis: Diagnosis, topic: str, rank: int, value: Any) -> None:
    """Announce a JSON value, as it comes from the wire."""
    diagnosis.tell(topic, rank, read_announcement(topic, value))


def table(before: str = "a", previous: str | None = None) -> dict[str, Any]:
    own = {"w": before}
    return {"before": own, "after": own, "previous": {"w": previous or before}, "order": ["w"], "loads": []}


def healthy(kind: str, rank: int, step: int) -> Any:
    del step
    if kind == "parameters":
        return table()
    if kind == "gradients":
        return gradients(4)[rank]
    if kind == "contract":
        return contract(4)[rank]
    return [{"lr": 0.1}] if kind == "hyper" else {}


def run(
    steps: list[Step], answers: Answers = healthy, diagnosis: Diagnosis | None = None, *, shuffle: int = 0
) -> tuple[list[tuple[Finding, bool]], list[Request]]:
    """Feed steps, answer at once, tick; return what was told and asked."""
    diagnosis = diagnosis or Diagnosis(world=4)
    told: list[tuple[Finding, bool]] = []
    asked: list[Request] = []
    for step in steps:
        requests = diagnosis.feed(step)
        while requests:
            asked += requests
            ranks = list(range(step.world))
            random.Random(shuffle).shuffle(ranks)
            for request in requests:
                for rank in ranks:
                    value = answers(request.kind, rank, request.step)
                    answer(diagnosis, rank, request.optimizer, request.step, request.kind, value)
            told += diagnosis.tick()
            requests = diagnosis.requests()
        told += diagnosis.tick()
    return told + diagnosis.finish(), asked


def codes(told: list[tuple[Finding, bool]]) -> list[tuple[str, int | None]]:
    return [(finding.code, finding.step) for finding, new in told if new]


def edited(number: int, rank: int = 2, since: int = 5) -> dict[int, dict[str, Any]]:
    """Return the rows of a rank whose parameters were edited before step `since`."""
    if number < since:
        return {}
    flags = Flag.PARAMS_CHANGED_OUTSIDE if number == since else Flag(0)
    before, after = digest(70, rank, number), digest(70, rank, number + 1)
    return {rank: {"params_before_digest": before, "params_after_digest": after, "flags": flags}}


def with_edit(kind: str, rank: int, step: int) -> Any:
    if kind == "parameters" and rank == 2:
        return table("f", "a")
    return healthy(kind, rank, step)


def test_details_are_asked_for_once() -> None:
    """A cause is looked into when it begins; later steps only count."""
    told, asked = run([step_at(n, odd=edited(n)) for n in range(40)], with_edit)
    assert asked == [Request(optimizer=0, step=5, kind="parameters", ranks=frozenset(range(4)))]
    assert codes(told) == [("RANK101", 5)]
    first, last = told[0][0], told[-1][0]
    assert (first.ranks, first.subject, first.phase) == ((2,), ("w",), "outside-optimizer")
    assert (last.count, last.last_step, last.step) == (35, 39, 5)


def test_updates_are_told_ever_more_rarely() -> None:
    """A finding that is seen again in every step is told again at 2, 4, 8, ... occurrences and at the end."""
    told, _ = run([step_at(n, odd=edited(n)) for n in range(40)], with_edit)
    assert [finding.count for finding, _ in told] == [1, 2, 4, 8, 16, 32, 35]


def test_a_parked_step_holds_back_later_ones() -> None:
    """Steps are judged in the order in which they were fed."""
    diagnosis = Diagnosis(world=4)
    assert diagnosis.feed(step_at(4)) == []
    assert diagnosis.tick() == []
    (request,) = diagnosis.feed(step_at(5, odd=edited(5)))
    lr = {1: {"hyper_digest": 3, "lr": 0.5}}
    diagnosis.feed(step_at(6, odd={**edited(6), **lr}))
    assert diagnosis.busy
    for rank in range(3):
        answer(diagnosis, rank, 0, 5, request.kind, table())
        assert diagnosis.tick() == []
    answer(diagnosis, 3, 0, 5, request.kind, table())
    assert codes(diagnosis.tick()) == [("RANK101", 5)]
    for rank in range(4):
        answer(diagnosis, rank, 0, 6, "hyper", [{"lr": 0.1 + rank % 2}])
    assert codes(diagnosis.tick()) == [("RANK104", 6)]
    assert not diagnosis.busy


def test_a_silent_rank_is_not_waited_for_for_ever() -> None:
    """After so many ticks a step is judged with the details that are there."""
    diagnosis = Diagnosis(world=4)
    diagnosis.feed(step_at(5, odd=edited(5)))
    answer(diagnosis, 0, 0, 5, "parameters", table())
    told = [diagnosis.tick() for _ in range(DETAIL_TICKS + 1)]
    assert not any(told[:-1])
    assert codes(told[-1]) == [("RANK101", 5)]
    assert told[-1][0][0].ranks == (2,)


def test_a_rank_that_cannot_tell_counts_as_heard() -> None:
    """The answer None completes the details and stays out of them."""
    diagnosis = Diagnosis(world=4)
    diagnosis.feed(step_at(5, odd=edited(5)))
    for rank in range(4):
        answer(diagnosis, rank, 0, 5, "parameters", None)
    assert codes(diagnosis.tick()) == [("RANK101", 5)]


def test_the_queue_is_bounded() -> None:
    """A parked step is judged as it is when too many wait behind it."""
    diagnosis = Diagnosis(world=4)
    diagnosis.feed(step_at(5, odd=edited(5)))
    for n in range(6, 5 + QUEUE_STEPS):
        diagnosis.feed(step_at(n, odd=edited(n)))
    assert diagnosis.tick() == []
    diagnosis.feed(step_at(5 + QUEUE_STEPS, odd=edited(5 + QUEUE_STEPS)))
    assert codes(diagnosis.tick()) == [("RANK101", 5)]


def test_the_end_judges_what_is_left() -> None:
    """What is parked at the end is judged without the missing details."""
    diagnosis = Diagnosis(world=4)
    diagnosis.feed(step_at(5, odd=edited(5)))
    diagnosis.feed(step_at(6, odd=edited(6)))
    ((finding, new),) = diagnosis.finish()
    assert (finding.code, finding.count, new) == ("RANK101", 2, True)


def test_consequences_fold_into_the_first_cause() -> None:
    """Gradients that were not synchronised explain the state and the parameters that differ afterwards."""

    def steps() -> Iterator[Step]:
        for n in range(12):
            odd: dict[int, dict[str, Any]] = {}
            if n >= 4:
                odd = {r: {"params_after_digest": digest(71, r, n), "state_digest": digest(72, r, n)} for r in range(4)}
            if n == 4:
                odd = {r: {**row, "grads_digest": digest(73, r)} for r, row in odd.items()}
            if n > 4:
                odd = {r: {**row, "params_before_digest": digest(71, r, n - 1)} for r, row in odd.items()}
            yield step_at(n, odd=odd, flags=Flag.UNSYNCED_BACKWARD if n == 4 else Flag(0))

    def answers(kind: str, rank: int, step: int) -> Any:
        if kind == "contract":
            return contract(4, no_sync={"kind": "last-micro-batch", "location": "train.py:9"})[rank]
        if kind == "gradients":
            return gradients(4, {rank: {"w": str(rank)}})[rank]
        return healthy(kind, rank, step)

    told, _ = run(list(steps()), answers)
    assert codes(told) == [("SYNC205", 4)]
    finding = told[-1][0]
    assert finding.location == "train.py:9"
    assert finding.evidence["consequences"] == ["RANK103 since step 4", "RANK101 since step 4"]


def apart(number: int, *, since: int = 0, period: int | None = None, flags: Flag = Flag.UNSYNCED_BACKWARD) -> Step:
    """Return a step of replicas that train apart and are averaged before every step that `period` divides."""
    if number < since:
        return step_at(number)
    fresh = number == since or (period is not None and number % period == 0)
    odd = {}
    for rank in range(4):
        odd[rank] = {f: digest(i, rank, number) for i, f in enumerate(("grads_digest", "params_after_digest"))}
        if not fresh:
            odd[rank]["params_before_digest"] = digest(1, rank, number - 1)
    return step_at(number, odd=odd, flags=flags)


def not_synchronised(kind: str, rank: int, step: int) -> Any:
    if kind == "contract":
        return contract(4, no_sync={"kind": "last-micro-batch", "location": "train.py:9"})[rank]
    if kind == "gradients":
        return gradients(4, {rank: {"w": str(rank)}})[rank]
    return healthy(kind, rank, step)


def without_ddp(kind: str, rank: int, step: int) -> Any:
    return contract(4, ddp=0)[rank] if kind == "contract" else not_synchronised(kind, rank, step)


@pytest.mark.parametrize(
    "flags, answers, code",
    [(Flag.UNSYNCED_BACKWARD, not_synchronised, "SYNC205"), (Flag.NO_DDP, without_ddp, "SYNC208")],
)
def test_replicas_that_are_averaged_are_meant_to_part(flags: Flag, answers: Answers, code: str) -> None:
    """Local SGD, whoever averages; without an average in time it is what it looks like, from its first step."""
    for period in (4, 32):
        assert codes(run([apart(n, period=period, flags=flags) for n in range(80)], answers)[0]) == []
    for period in (None, 40):
        told, _ = run([apart(n, period=period, flags=flags) for n in range(80)], answers)
        assert codes(told)[0] == (code, 0)


def test_replicas_may_be_averaged_after_a_time_together_and_seen_now_and_then() -> None:
    """A phase of synchronised steps before does not count, and steps that were not checked show nothing."""
    assert codes(run([apart(n, since=48, period=8, flags=Flag.NO_DDP) for n in range(90)], without_ddp)[0]) == []
    digests = dict.fromkeys(DIGESTS, 0)
    for every in (3, 5, 10):
        steps = [apart(n, period=8) for n in range(240)]
        rows = [{rank: row._replace(**digests) for rank, row in step.rows.items()} for step in steps]
        seen = [s if s.step % every == 0 else replace(s, rows=r) for s, r in zip(steps, rows, strict=True)]
        assert codes(run(seen, not_synchronised)[0]) == []


def test_steps_that_nobody_has_checked_are_not_kept() -> None:
    """Batches differ in every step, and a run may check few: what waits for an average is bounded all the same."""
    diagnosis = Diagnosis(world=4)
    for number in range(200):
        step = apart(number)
        if number % 20:
            rows = {
                rank: row._replace(**{**dict.fromkeys(DIGESTS, 0), "batch_digest": rank + 1}, flags=row.flags & ~2)
                for rank, row in step.rows.items()
            }
            step = replace(step, rows=rows)
        diagnosis.feed(step)
        diagnosis.finish() if number == 199 else diagnosis.tick()
        assert sum(map(len, diagnosis._undecided.values())) <= 1 + number // 20


def test_saved_steps_of_local_sgd_are_judged_like_those_of_the_run() -> None:
    """From the average on they are saved as local; those before it were not yet known to be."""
    steps = [apart(n, period=4) for n in range(20)]
    diagnosis, saved = Diagnosis(world=4), []
    for step in steps:
        diagnosis.feed(step)
        diagnosis.tick()
        saved.append(diagnosis.local_steps.marked(step))
    assert [step.any(Flag.AVERAGED) for step in saved] == [False] * 4 + [True] * 16
    assert codes(run(saved, not_synchronised)[0]) == []
    assert codes(run([*saved[:4], *(apart(n) for n in range(4, 8))], not_synchronised)[0])[0] == ("SYNC205", 0)


def test_replicas_that_are_averaged_after_long_are_no_mistake_once_that_is_seen_twice() -> None:
    """The finding stays, and says so; one agreement may be a checkpoint that is loaded."""
    for number, severity in ((80, Severity.CRITICAL), (140, Severity.INFO)):
        diagnosis = Diagnosis(world=4)
        told, _ = run([apart(n, period=60) for n in range(number)], not_synchronised, diagnosis)
        newest = {finding.id: finding for finding, _ in [*told, *diagnosis.finish()] if finding.code == "SYNC205"}
        assert [finding.severity for finding in newest.values()] == [severity]
        assert ("local SGD" in newest["SYNC205-1"].title) == (severity is Severity.INFO)


def test_what_has_nothing_to_do_with_the_replicas_is_told_at_once() -> None:
    """While nobody knows yet whether they are averaged, and while ranks without DDP agree."""
    for flags in (Flag.UNSYNCED_BACKWARD, Flag.NO_DDP):
        for parted in (True, False):
            diagnosis = Diagnosis(world=4)
            for n in range(8):
                step = apart(n, flags=flags) if parted else step_at(n, flags=flags)
                odd = {rank: row._replace(flags=row.flags | Flag.CLIPPED_SCALED) for rank, row in step.rows.items()}
                for request in diagnosis.feed(replace(step, rows=odd)):
                    for rank in range(4):
                        value = not_synchronised(request.kind, rank, request.step)
                        answer(diagnosis, rank, 0, request.step, request.kind, value)
                told = codes(diagnosis.tick())
                assert not diagnosis.busy
                if told:
                    break
            assert told[0][0] == "RCP813"


@pytest.mark.parametrize(
    "steps, last",
    [
        ([apart(n) for n in range(40)], 32),  # the steps that they are given
        ([step_at(0), apart(1, since=1), step_at(2, odd={2: {"params_before_digest": 7}})], 2),
    ],
)
def test_replicas_that_are_not_averaged_are_told_before_the_end(steps: list[Step], last: int) -> None:
    """When they were given enough steps, or as soon as they synchronise again without having been averaged."""
    diagnosis, told_at = Diagnosis(world=4), None
    for step in steps:
        for request in diagnosis.feed(step):
            for rank in range(4):
                value = not_synchronised(request.kind, rank, request.step)
                answer(diagnosis, rank, 0, request.step, request.kind, value)
        told = diagnosis.tick()
        if told and told_at is None:
            told_at = step.step
            assert codes(told)[0] == ("SYNC205", steps[0].step if last == 32 else 1)
    assert told_at == last


def test_a_later_independent_cause_is_reported() -> None:
    """A weight corrupted on one rank and a learning rate changed later on another are two findings."""

    def steps() -> Iterator[Step]:
        for n in range(30):
            odd = edited(n)
            if n >= 20:
                odd[1] = {"hyper_digest": 3, "params_after_digest": digest(80, n + 1)}
                odd[1] |= {"params_before_digest": digest(80, n)} if n > 20 else {}
            yield step_at(n, odd=odd)

    def answers(kind: str, rank: int, step: int) -> Any:
        return [{"lr": 0.5 if rank == 1 else 0.1}] if kind == "hyper" else with_edit(kind, rank, step)

    told, asked = run(list(steps()), answers)
    assert codes(told) == [("RANK101", 5), ("RANK104", 20)]
    rate = next(finding for finding, _ in told if finding.code == "RANK104")
    assert (rate.ranks, rate.subject) == ((1,), ("param_groups[0].lr",))
    assert [request.step for request in asked] == [5, 20, 20]


@pytest.mark.parametrize("rank", [1, 2])
def test_an_edit_after_another_cause_is_reported(rank: int) -> None:
    """A parameter changed between two steps is a cause of its own even where another one is open already."""

    def steps() -> Iterator[Step]:
        for n in range(30):
            odd: dict[int, dict[str, Any]] = {}
            if n >= 5:
                odd[1] = {"hyper_digest": 3, "params_after_digest": digest(80, n + 1)}
                odd[1] |= {"params_before_digest": digest(80, n)} if n > 5 else {}
            late = edited(n, rank, 20).get(rank)
            yield step_at(n, odd={**odd, rank: {**odd.get(rank, {}), **late}} if late else odd)

    def answers(kind: str, who: int, step: int) -> Any:
        if kind == "hyper":
            return [{"lr": 0.5 if who == 1 else 0.1}]
        if kind == "parameters" and step == 20 and who == rank:
            return table("f", "a")
        return table("1") if kind == "parameters" and who == 1 else healthy(kind, who, step)

    told, _ = run(list(steps()), answers)
    assert codes(told) == [("RANK104", 5), ("RANK101", 20)]
    assert next(finding for finding, _ in told if finding.code == "RANK101").ranks == (rank,)


def test_what_a_cause_does_not_part_is_not_its_consequence() -> None:
    """Rank 1's learning rate does not explain that rank 3's parameters differ from rank 0's."""

    def steps() -> Iterator[Step]:
        for n in range(20):
            odd: dict[int, dict[str, Any]] = {}
            if n >= 5:
                odd[1] = {"hyper_digest": 3, "params_after_digest": digest(80, n)}
            if n >= 10:
                odd[3] = {"params_after_digest": digest(81, n)}
            yield step_at(n, odd=odd)

    told, _ = run(list(steps()))
    assert codes(told) == [("RANK104", 5), ("RANK101", 10)]


def test_a_cause_that_has_gone_can_come_back() -> None:
    """After quiet steps a cause is closed; the same symptom later is a new finding."""

    def odd(n: int) -> dict[int, dict[str, Any]]:
        return {2: {"hyper_digest": 3, "lr": 0.7}} if n in {3, 4, 20, 21} else {}

    told, _ = run([step_at(n, odd=odd(n)) for n in range(30)], lambda kind, rank, step: [{"lr": 0.1 * (rank == 2)}])
    assert codes(told) == [("RANK104", 3), ("RANK104", 20)]
    assert [(f.count, f.last_step) for f, new in told if not new] == [(2, 4), (2, 21)]


def test_a_flickering_symptom_does_not_flood() -> None:
    """A cause that comes back again and again is one finding, and is closed ever more slowly."""
    odd = {2: {"hyper_digest": 3, "lr": 0.7}}
    steps = [step_at(n, odd=odd if n % (QUIET_STEPS + 1) == 0 else {}) for n in range(400)]
    told, asked = run(steps, lambda kind, rank, step: [{"lr": 0.1 * (rank == 2)}])
    assert (len(codes(told)), len(asked)) == (1, 2)
    assert told[-1][0].count == 100


@pytest.mark.smoke
def test_a_cause_that_comes_back_regularly_is_not_counted_anew() -> None:
    """What comes back soon is the same; what comes back for the second time after as many steps is so too."""
    odd = {2: {"hyper_digest": 3, "lr": 0.7}}

    def told(seen: set[int], other: frozenset[int] = frozenset()) -> list[tuple[str, int | None]]:
        odds = [{1: odd[2]} if n in other else odd if n in seen else {} for n in range(500)]
        steps = [step_at(n, odd=odds[n]) for n in range(500)]
        return codes(run(steps, lambda kind, rank, step: [{"lr": 0.1 * (rank == (1 if step in other else 2))}])[0])

    assert told({n for n in range(500) if n % 8 == 3}) == [("RANK104", 3)]
    assert told({n for n in range(500) if n % 100 == 3}) == [("RANK104", 3), ("RANK104", 103)]
    assert told({3, 103, 400}) == [("RANK104", 3), ("RANK104", 103), ("RANK104", 400)]
    assert told({3}, frozenset({11})) == [("RANK104", 3), ("RANK104", 11)]  # another rank


def test_what_followed_from_a_cause_that_is_gone_is_reported_when_it_comes_alone() -> None:
    """A consequence that comes back without its cause has another one."""
    state = {"state_digest": 7, "params_after_digest": 8}
    odds = {3: {2: {**state, "hyper_digest": 3, "lr": 0.7}}, 9: {2: state}}
    steps = [step_at(n, odd=odds.get(n, {})) for n in range(20)]
    told, _ = run(steps, lambda kind, rank, step: [{"lr": 0.1 * (rank == 2)}] if kind == "hyper" else {})
    assert codes(told) == [("RANK104", 3), ("RANK103", 9)]


def test_the_same_line_again_is_the_same_cause() -> None:
    """A mistake with a known place in the code is one finding, however long it did no harm in between."""

    def answers(kind: str, rank: int, step: int) -> Any:
        return contract(4, bypass={"location": "a.py:3"})[rank] if kind == "contract" else healthy(kind, rank, step)

    odd = {rank: {"grads_digest": 5 + rank} for rank in range(4)}
    steps = [step_at(n, odd=odd if n % 20 == 3 else {}, flags=Flag.BYPASS) for n in range(100)]
    told, _ = run(steps, answers)
    assert codes(told) == [("SYNC202", 3)]
    assert (told[-1][0].count, told[-1][0].last_step) == (5, 83)


def test_stages_of_a_pipeline_are_not_compared() -> None:
    """Separate groups that wrapped different models agree inside, and need not agree with each other."""
    fields = ("grads_digest", "hyper_digest", "state_digest", "params_before_digest", "params_after_digest")
    last_stage = {name: digest(33, i) for i, name in enumerate(fields)}

    def told(odd: dict[int, dict[str, Any]], *, models: bool = True) -> list[tuple[str, int | None]]:
        diagnosis = Diagnosis(world=4)
        for rank in range(4):
            entries = [["parameter", f"stage{rank // 2}.w" if models else "w", [4], "float32", True]]
            tell(diagnosis, "structure:0", rank, {"digest": str(rank // 2 if models else 0), "entries": entries})
        for rank in range(4):
            tell(diagnosis, "group:0", rank, {"ranks": [0, 1] if rank < 2 else [2, 3]})
        rows = {rank: {**(last_stage if rank > 1 else {}), **odd.get(rank, {})} for rank in range(4)}
        steps = [step_at(n, odd={r: {**rows[r], "record_digest": digest(3, n, r % 2)} for r in rows}) for n in range(8)]
        return codes(run(steps, healthy, diagnosis)[0])

    assert told({}) == []
    assert told({3: {"hyper_digest": 9}}) == [("RANK104", 0)]
    assert ("SYNC201", 0) in told({}, models=False)


def test_unchecked_steps_say_nothing() -> None:
    """Digests that were not computed neither raise nor close a cause."""
    unchecked = {"params_before_digest": 0, "params_after_digest": 0}
    steps = [step_at(n, **({} if n % 8 == 5 else unchecked), odd=edited(n) if n % 8 == 5 else {}) for n in range(60)]
    told, asked = run(steps, with_edit)
    assert codes(told) == [("RANK101", 5)]
    assert len(asked) == 1


def test_details_without_a_result_are_asked_for_less_and_less() -> None:
    """An average that rank 0 keeps for itself differs in every step, and soon nobody asks any more."""

    def answers(kind: str, rank: int, step: int) -> Any:
        digest_ = f"{step if rank == 0 else 0:x}"
        return {"EMA": {"digest": digest_, "tensors": {"w": digest_}, "changed": rank == 0, "used": False}}

    steps = [step_at(n, replicas_digest=7, odd={0: {"replicas_digest": 8 + n}}) for n in range(500)]
    told, asked = run(steps, answers)
    assert told == []
    assert 3 < len(asked) < 12


def test_a_rule_that_raises_is_switched_off() -> None:
    """The trouble is reported once, the other rules go on."""

    class Broken(Detector):
        """Raises."""

        code, severity, title = "RANK000", Severity.INFO, "broken"

        def detect(self, step: Step) -> Iterator[Finding]:
            raise KeyError(step.step)
            yield

    troubles: list[tuple[str, str]] = []
    rules = [Broken(), *(rule() for rule in catalog())]
    diagnosis = Diagnosis(world=4, detectors=rules, on_trouble=lambda *args: troubles.append(args))
    told, _ = run([step_at(n, odd=edited(n)) for n in range(10)], with_edit, diagnosis)
    assert codes(told) == [("RANK101", 5)]
    assert troubles == [("detector:RANK000", "KeyError: 0")]


def test_announcements_are_compared_when_all_have_spoken() -> None:
    """The n-th announcements of a topic are compared with each other."""
    diagnosis = Diagnosis(world=2)
    loader = {"distributed": True, "replicas": 2, "shuffle": True, "length": 80, "attributes": {}}
    for rank in (0, 1):
        tell(diagnosis, "loader:0", rank, {**loader, "seed": 0, "rank": rank, "epoch": 0, "iterations": 1})
        assert diagnosis.tick() == []
    tell(diagnosis, "loader:0", 0, {**loader, "seed": 0, "rank": 0, "epoch": 1, "iterations": 2})
    assert diagnosis.tick() == []
    tell(diagnosis, "loader:0", 1, {**loader, "seed": 1, "rank": 1, "epoch": 1, "iterations": 2})
    ((finding, new),) = diagnosis.tick()
    assert (finding.code, finding.subject, new) == ("DATA910", ("seed",), True)


def ignoring(*entries: str) -> Diagnosis:
    return Diagnosis(world=4, config={"ignore": entries})


def test_what_is_ignored_is_marked_and_explains_nothing() -> None:
    """Its consequences are told: they would disappear with it."""
    steps = [step_at(n, odd=edited(n)) for n in range(12)]
    told, asked = run(steps, with_edit, ignoring("RANK101:w # meant so", "RANK104"))
    assert {(finding.code, finding.ignored) for finding, _ in told} == {("RANK101", "RANK101:w # meant so")}
    assert told[-1][0].count == 7
    assert len(asked) <= 4  # and nobody is asked much more often
    assert not any(finding.ignored for finding, _ in run(steps, with_edit, ignoring("RANK101:v"))[0])

    def diverge(kind: str, rank: int, step: int) -> Any:
        return [{"lr": 0.1 * (1 + (rank == 2))}] if kind == "hyper" else healthy(kind, rank, step)

    odd = {2: {"hyper_digest": 3, "params_after_digest": 5, "state_digest": 7}}
    (whole,) = [f for f, new in run([step_at(0, odd=odd)], diverge)[0] if new]
    told, _ = run([step_at(0, odd=odd)], diverge, ignoring("RANK104"))
    assert whole.code == "RANK104"
    assert {text.split()[0] for text in whole.evidence["consequences"]} & {f.code for f, _ in told if not f.ignored}
    assert {f.code for f, _ in told if f.ignored} == {"RANK104"}


@pytest.mark.parametrize("since", [9, 12, 33, 60])
def test_another_fault_behind_an_ignored_one_is_told(since: int) -> None:
    """The same ranks part by something else as well: it is looked for again, ever more rarely, and in the end."""

    def answers(kind: str, rank: int, step: int) -> Any:
        if kind != "hyper":
            return healthy(kind, rank, step)
        other = rank == 2
        return [{"lr": 0.2 if other and step >= since else 0.1, "weight_decay": 0.5 if other else 0.1}]

    odd = {2: {"hyper_digest": 3}}
    steps = [step_at(n, odd={2: {"hyper_digest": 3 + (n >= since)}} if n else odd) for n in range(90)]
    told, asked = run(steps, answers, ignoring("RANK104:*.weight_decay"))
    silent = [finding for finding, _ in told if finding.ignored]
    assert silent[0].subject == ("param_groups[0].weight_decay",)
    (found,) = {(f.code, f.subject[0]) for f, _ in told if not f.ignored}
    assert found == ("RANK104", "param_groups[0].lr")
    first = next(finding for finding, _ in told if not finding.ignored)
    assert first.step is not None
    assert since <= first.step <= since + 17
    assert len(asked) < 20


def test_what_is_more_than_was_meant_is_told() -> None:
    """An incident that was ignored by its name, and to which another name is added."""
    incidents = Incidents(4, read(["RANK101:w"]))
    rule = next(rule() for rule in catalog() if rule.code == "RANK101")
    group, found = incidents.group(rule, 0), replace(reported("x"), code="RANK101", id=None, step=3, subject=("w",))
    incidents.admit(rule, found, group, None)
    ((first, new),) = incidents.news()
    assert (first.ignored, new) == ("RANK101:w", True)
    incidents.admit(rule, replace(found, step=4), group, None)
    assert all(finding.ignored for finding, _ in incidents.news())
    incidents.admit(rule, replace(found, step=4, subject=("v",)), incidents.group(rule, 1), None)  # another optimizer's
    (last, new) = incidents.news()[0]
    assert (last.ignored, last.subject, last.id, new) == (None, ("w", "v"), first.id, True)


def test_structure_explains_what_follows() -> None:
    """Crossed parameters are the cause of gradients and parameters that differ by name."""
    diagnosis = Diagnosis(world=4)
    a, b = ["parameter", "a.w", [4], "float32", True], ["parameter", "b.w", [4], "float32", True]
    for rank in range(4):
        entries = [b, a] if rank == 2 else [a, b]
        tell(diagnosis, "structure:0", rank, {"digest": str(rank == 2), "entries": entries})
    for rank in range(4):
        tell(diagnosis, "group:0", rank, {"ranks": [0, 1, 2, 3]})
    odd = {2: {"grads_digest": 3, "params_before_digest": 4, "params_after_digest": 5}}
    told, _ = run([step_at(0, odd=odd)], healthy, diagnosis)
    assert codes(told) == [("RANK105", 0)]
    assert told[0][0].ranks == (2,)
    consequences = [text for finding, _ in told for text in finding.evidence.get("consequences", ())]
    assert set(consequences) == {"RANK101 since step 0", "SYNC201 since step 0"}


def test_one_mistake_in_several_optimizers_is_one_finding() -> None:
    """Two optimizers whose forward goes around DDP share the finding."""
    odd = {rank: {"grads_digest": 5 + rank} for rank in range(4)}
    steps = [step_at(n // 2, optimizer=n % 2, odd=odd, flags=Flag.BYPASS) for n in range(10)]

    def answers(kind: str, rank: int, step: int) -> Any:
        return contract(4, bypass={"location": "gan.py:7"})[rank] if kind == "contract" else healthy(kind, rank, step)

    told, _ = run(steps, answers)
    assert codes(told) == [("SYNC202", 0)]
    assert told[-1][0].last_step == 4


def test_a_skipped_step_explains_everything_after_it() -> None:
    """A rank that is a step behind has other gradients, settings, state and parameters."""

    def steps() -> Iterator[Step]:
        for n in range(12):
            odd: dict[int, dict[str, Any]] = {}
            if n >= 6:
                names = ("grads_digest", "hyper_digest", "state_digest", "params_before_digest", "params_after_digest")
                odd = {3: {**{name: digest(90, n, i) for i, name in enumerate(names)}, "syncs": n + 2}}
            yield step_at(n, odd=odd)

    told, _ = run(list(steps()))
    assert codes(told) == [("RANK112", 6)]
    assert told[0][0].ranks == (3,)
    assert {text[:7] for text in told[-1][0].evidence["consequences"]} == {"RANK101", "RANK103", "RANK104", "SYNC201"}


def test_refinement_and_explanation() -> None:
    """Ranks part for good; what parts no others than the causes do is explained by them."""
    first = refine(None, {0: "a", 1: "a", 2: "b"})
    assert len({first[0], first[1], first[2]}) == 2
    both = refine(first, {0: "x", 1: "y", 2: "x"})
    assert len(set(both.values())) == 3
    assert explains([first], {0: 1, 1: 1, 2: 9})
    assert not explains([first], {0: 1, 1: 2, 2: 1})
    assert explains([first, refine(None, {0: 0, 1: 1, 2: 0})], {0: 1, 1: 2, 2: 3})


@st.composite
def jobs(draw: st.DrawFn) -> list[Step]:
    """Return a short run in which digests of random ranks differ at random steps."""
    fields = ["grads_digest", "hyper_digest", "state_digest", "params_before_digest", "params_after_digest"]
    fields += ["buffers_digest", "modes_digest", "replicas_digest", "syncs", "loss_scale", "batch_digest"]
    steps = []
    for n in range(draw(st.integers(3, 8))):
        odd: dict[int, dict[str, Any]] = {}
        for rank in draw(st.sets(st.integers(0, 3), max_size=3)):
            chosen = draw(st.sets(st.sampled_from(fields), max_size=3))
            odd[rank] = {name: draw(st.integers(1, 4)) for name in sorted(chosen)}
            odd[rank]["flags"] = draw(st.sampled_from([Flag(0), Flag.BYPASS, Flag.SKIPPED, Flag.LOADED]))
        steps.append(step_at(n, odd=odd))
    return steps


@pytest.mark.smoke
@settings(max_examples=60, deadline=None)
@given(jobs(), st.integers(0, 1000))
def test_the_order_in_which_ranks_answer_does_not_matter(steps: list[Step], seed: int) -> None:
    """All ranks come to the same findings, whoever is heard first."""

    def text(told: list[tuple[Finding, bool]]) -> list[tuple[str, bool]]:
        return [(finding.to_json(), new) for finding, new in told]

    assert text(run(steps)[0]) == text(run(steps, shuffle=seed)[0])


_PROBE = """
import sys
sys.path[:0] = [{root!r}, {support!r}]
from ddpdebug.detectors.catalog import catalog
from rule_examples import diagnose
for rule in catalog():
    for example in (*rule.fires_on, *rule.silent_on):
        print(*[f.to_json() for f in diagnose(rule, example)], sep="\\n")
assert "torch" not in sys.modules
"""


@pytest.mark.slow
def test_the_hash_seed_does_not_matter() -> None:
    """The rules give the same findings in processes with different hash seeds, and load no torch."""
    code = _PROBE.format(root=str(ROOT), support=str(ROOT / "tests" / "support"))
    outputs = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            check=True,
            text=True,
        ).stdout
        for seed in ("0", "4711")
    }
    assert len(outputs) == 1
    assert "RANK101" in outputs.pop()


_BROADCAST = {"kind": "broadcast", "step": 0, "loss": "MseLoss", "prediction": [8, 1], "result": [8, 8]}


def test_what_every_rank_runs_into_is_told_with_all_of_them() -> None:
    """The first rank to say so does not stand there as the only one."""
    diagnosis = Diagnosis(world=2)
    tell(diagnosis, "alone:loss", 1, _BROADCAST)
    assert diagnosis.tick() == []
    diagnosis.feed(step_at(0))
    tell(diagnosis, "alone:loss", 0, _BROADCAST)
    ((finding, new),) = diagnosis.tick()
    assert (finding.code, finding.ranks, new) == ("RCP819", (0, 1), True)


@pytest.mark.parametrize("how", ["steps", "ticks", "end"])
def test_what_one_rank_alone_runs_into_does_not_wait_for_long(how: str) -> None:
    """It is told when the others have gone on, when nothing goes on, or at the end."""
    diagnosis = Diagnosis(world=2)
    tell(diagnosis, "alone:loss", 1, _BROADCAST)
    told = diagnosis.tick()
    if how == "steps":
        for n in range(4):
            diagnosis.feed(step_at(n))
            told += diagnosis.tick()
    elif how == "ticks":
        for _ in range(30):
            told += diagnosis.tick()
    else:
        told += diagnosis.finish()
    assert [(finding.code, finding.ranks) for finding, _ in told] == [("RCP819", (1,))]


def test_what_a_rank_said_before_it_failed_explains_the_failure() -> None:
    """Nobody waits for the other ranks' word when one has failed: its own may be the cause."""
    names = ["encoder.weight"]
    diagnosis = Diagnosis(world=2)
    parts = [{"path": "encoder", "names": names}]
    tell(diagnosis, "alone:audit", 1, {"kind": "no_grad", "step": 0, "parts": parts})
    reason = "exception: RuntimeError: Expected to have finished reduction in the prior iteration"
    tell(diagnosis, "alone:failure", 1, {"reason": reason, "missing": names, "step": 0})
    told = diagnosis.tick() + diagnosis.finish()
    assert [finding.code for finding, new in told if new] == ["RCP810", "FAIL1001"]
    assert told[0][0].evidence["consequences"] == ["SYNC207 since step 0"]


def reported(id_: str, count: int = 1) -> Finding:
    return Finding(code="C1", severity=Severity.ERROR, title="t", id=id_, count=count, evidence={"found": 1})


def test_evidence_that_is_found_later_stays_with_its_finding() -> None:
    """Each record holds all that is known: what was added twice, the first time and the newest count."""
    records: list[Any] = []
    times = iter("abc")
    reporter = Reporter(records.append, lambda: next(times))
    reporter.report([(reported("C1-1"), True), (reported("C1-2"), True)])
    reporter.add("C1-1", {"index": [4]})
    reporter.add("C1-1", {"holders": ["x"]})
    reporter.add("C1-9", {"index": [5]})  # of none that was reported
    reporter.report([(reported("C1-1", count=2), False)])
    last = records[-1].finding
    assert (last.count, last.time, last.evidence) == (2, "a", {"found": 1, "index": [4], "holders": ["x"]})
    assert [(r.finding.id, r.new) for r in records] == [("C1-1", True), ("C1-2", True), *[("C1-1", False)] * 3]
    assert [f.id for f in reporter.findings] == ["C1-1", "C1-2"]


def test_what_is_ignored_is_a_record_of_its_own() -> None:
    """Nobody acts upon it: it is neither among the findings nor among the new ones."""
    records: list[Any] = []
    reporter = Reporter(records.append, lambda: "now")
    silent = replace(reported("C1-1"), ignored="C1 # known")
    assert reporter.report([(silent, True)]) == []
    assert reporter.findings == []
    assert [type(record) for record in records] == [FindingIgnored]
    assert reporter.report([(reported("C1-1", count=2), True)]) == reporter.findings != []
    assert isinstance(records[-1], FindingRaised)


def test_what_two_threads_report_is_written_in_its_order() -> None:
    """The second neither waits for the first one's disk nor is undone by it."""
    records: list[Any] = []

    def write(record: Any) -> None:
        if not records:
            records.append(record)
            other = threading.Thread(target=reporter.add, args=("C1-1", {"index": [4]}))
            other.start()
            other.join(60)
            assert not other.is_alive()
            assert len(records) == 1
        else:
            records.append(record)

    reporter = Reporter(write, lambda: "")
    reporter.report([(reported("C1-1"), True)])
    reporter.report([(reported("C1-1", count=2), False)])
    assert [(r.finding.count, "index" in r.finding.evidence) for r in records] == [(1, False), (1, True), (2, True)]


def test_of_very_many_ranks_those_that_differ_are_asked() -> None:
    """Whatever healthy ranks do not have in common, and more of the others."""
    rows = {
        rank: Row(rank=rank, step=3, batch_digest=Digest(rank + 1), params_after_digest=Digest(2 if rank == 77 else 1))
        for rank in range(100)
    }
    asked = engine._asked(Step(step=3, optimizer=0, world=100, rows=rows))
    assert 77 in asked
    assert len(asked) == engine.MOST_ASKED // 2 + 1


def test_who_judges_next_goes_on_from_what_was_told() -> None:
    """The same ranks that differ are not new, what follows from it neither, and others have a number of their own."""
    told, _ = run([step_at(n, odd=edited(n)) for n in range(9)], with_edit)
    assert [(f.code, f.id) for f, new in told if new] == [("RANK101", "RANK101-1")]
    later = [step_at(n, odd=edited(n)) for n in range(20, 24)]
    assert [f.id for f, new in run(later, with_edit)[0] if new] == ["RANK101-1"]  # another one, with the same name
    second = Diagnosis(world=4)
    second.adopt([Finding.from_json(finding.to_json()) for finding, _ in told])
    known, _ = run(later, with_edit, second)
    assert {(f.id, new) for f, new in known} == {("RANK101-1", False)}
    third = Diagnosis(world=4)
    third.adopt([replace(finding, ranks=(3,), phase="load", location="other.py:1") for finding, _ in told])
    other, _ = run(later, with_edit, third)
    assert [f.id for f, new in other if new] == ["RANK101-2"]
    (ranks,) = {finding.ranks for finding, _ in told}
    fourth = Diagnosis(world=4)  # of those that were named before some have left
    fourth.adopt([replace(finding, ranks=(*ranks, 3), phase="load", location="other.py:1") for finding, _ in told])
    assert {(f.id, new) for f, new in run(later, with_edit, fourth)[0]} == {("RANK101-1", False)}


def test_what_becomes_known_later_words_a_finding_anew() -> None:
    """A detail that comes after its step was judged changes what was found there, and is told as the same finding."""
    diagnosis = Diagnosis(world=2)
    loss = {"value": float("nan"), "micro_batch": 0, "backward": "train.py:60", "expression": "train.py:58"}
    seen = {"output_finite": False, "loss": loss, "called_at": "train.py:57", "model": "Net"}
    early = {**seen, "replay": {"complete": False, "reason": "it was not over yet"}}
    late = {**seen, "replay": {"complete": True, "op": "aten.log.default", "module": "gate", "location": "net.py:9"}}
    (request,) = diagnosis.feed(step_at(7, world=2, odd={1: {"flags": Flag.LOSS_NONFINITE}}))
    answer(diagnosis, 0, 0, 7, request.kind, {})
    answer(diagnosis, 1, 0, 7, request.kind, early)
    ((found, new),) = diagnosis.tick()
    assert (found.code, found.subject, found.location, new) == ("NUM301", ("(model)",), "train.py:57", True)
    assert found.evidence["replay"] == "it was not over yet"
    diagnosis.feed(step_at(8, world=2))
    assert diagnosis.tick() == []
    answer(diagnosis, 1, 0, 7, request.kind, late)
    ((again, new),) = diagnosis.tick()
    assert (again.id, again.subject, again.location, new) == (found.id, ("gate", "(model)"), "net.py:9", False)
    assert again.evidence["operation"] == "aten.log.default"
    assert "replay" not in again.evidence
    answer(diagnosis, 1, 0, 7, "gradients", gradients(2)[1])  # of which nobody learns anything
    assert diagnosis.tick() == []


def test_a_loss_whose_model_was_not_looked_at() -> None:
    """The title says what is known, and the line that calls the model is given where nothing better is."""
    diagnosis = Diagnosis(world=1)
    (request,) = diagnosis.feed(step_at(7, world=1, odd={0: {"flags": Flag.LOSS_NONFINITE}}))
    answer(diagnosis, 0, 0, 7, request.kind, {"called_at": "train.py:57", "model": "Net"})
    ((found, _),) = diagnosis.tick()
    assert (found.code, found.location, found.evidence["model"]) == ("NUM302", "train.py:57", "Net")
    assert "finite, the loss is not" not in found.title
    assert "not looked at" in str(found.evidence["observed"])


def test_causes_are_ordered_by_the_finding() -> None:
    """Those of its phase first, then those of any phase, then those of others; a flipped bit comes before all."""
    causes = ["`load`: a", "any", "`init`: b", "`flipped bits`: c"]
    records: list[Any] = []
    reporter = Reporter(records.append, lambda: "now")
    finding = Finding(
        code="RANK101", severity=Severity.CRITICAL, title="t", phase="init", causes=causes, actions=causes, id="x"
    )
    reporter.report([(finding, True)])
    assert list(records[-1].finding.causes) == ["`init`: b", "any", "`load`: a", "`flipped bits`: c"]
    reporter.add("x", {"flipped_bits": [3]})
    assert [cause[:5] for cause in records[-1].finding.actions[:2]] == ["`flip", "`init"]
