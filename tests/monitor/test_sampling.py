"""How often the sampled tier runs."""

from __future__ import annotations

import itertools
import random

import pytest

from ddpdebug.monitor.sampling import START_SECONDS, START_STEPS, WATCHED_STEPS, Schedule
from ddpdebug.schema.row import Flag, Row
from ddpdebug.schema.step import Step


def step(number: int, *, seconds: float, full: float, light: float, checked: bool, optimizer: int = 0) -> Step:
    cost = full if checked else light
    flags = int(Flag.CHECKED) if checked else 0
    rows = {r: Row(rank=r, step=number, flags=flags, step_seconds=seconds, overhead_seconds=cost) for r in range(2)}
    return Step(step=number, optimizer=optimizer, world=2, rows=rows)


def run(schedule: Schedule, steps: int, *, seconds: float, full: float, light: float = 0.0, first: int = 0) -> None:
    for number in range(first, first + steps):
        schedule.learn(step(number, seconds=seconds, full=full, light=light, checked=schedule.due(0, number)))


def test_a_dear_check_is_made_as_often_as_the_budget_allows() -> None:
    """6 ms of checks in 200 ms steps are 0.6 % when every fifth step is checked; the rest is for what clocks miss."""
    schedule = Schedule(budget=0.01, every_step=False)
    run(schedule, 400, seconds=0.2, full=0.006)
    assert schedule.interval(0, 400) == 5
    assert sum(schedule.due(0, n) for n in range(400, 1000)) == 120


def test_a_cheap_check_is_made_in_every_step() -> None:
    """Within the budget nothing is left out."""
    schedule = Schedule(budget=0.01, every_step=False)
    run(schedule, 400, seconds=0.2, full=0.001)
    assert schedule.interval(0, 400) == 1


def test_short_steps_are_all_checked_at_first() -> None:
    """Most mistakes show early; afterwards the budget holds."""
    schedule = Schedule(budget=0.01, every_step=False)
    run(schedule, START_STEPS - 200, seconds=0.005, full=0.0005)
    assert schedule.interval(0, START_STEPS - 200) == 1
    run(schedule, 400, seconds=0.005, full=0.0005, first=START_STEPS - 200)
    assert schedule.interval(0, 10**9) > 12


def test_what_the_first_steps_may_take_is_bounded() -> None:
    """A job of many short steps pays half a second for them, and no more than 64 steps where a check is dear."""
    for seconds, full in ((0.035, 0.012), (0.08, 0.03), (0.005, 0.002)):
        schedule = Schedule(budget=0.01, every_step=False)
        run(schedule, 800, seconds=seconds, full=full)
        checked = [n for n in range(800) if schedule.interval(0, n) == 1]
        assert checked == list(range(len(checked)))
        assert len(checked) >= WATCHED_STEPS
        assert full * len(checked) <= max(START_SECONDS, WATCHED_STEPS * full)
        assert schedule.interval(0, 800) in {32, 64}


def test_each_64th_step_is_checked_however_the_interval_changes() -> None:
    """What a check takes is not the same from step to step, on a machine that does much else."""
    for seed in range(20):
        draw, schedule = random.Random(seed), Schedule(budget=0.01, every_step=False)
        for number in range(1000):
            seconds, full = 0.035 * draw.uniform(0.7, 1.3), 0.012 * draw.uniform(0.7, 1.3)
            schedule.learn(step(number, seconds=seconds, full=full, light=0.0, checked=schedule.due(0, number)))
        due = [number for number in range(1000) if schedule.due(0, number)]
        assert max(later - earlier for earlier, later in itertools.pairwise(due)) <= 64


def test_the_overhead_is_that_of_the_time_not_the_mean_of_the_steps() -> None:
    """One step that was preempted in a hook says nothing about the others; the first step begins with the script."""
    schedule = Schedule(budget=0.01, every_step=False)
    schedule.learn(step(0, seconds=0.2, full=0.1, light=0.0, checked=True))
    run(schedule, 9, seconds=0.01, full=0.001, first=1)
    schedule.learn(step(10, seconds=0.1, full=0.09, light=0.0, checked=True))
    assert schedule.ratio == pytest.approx(0.099 / 0.091)
    assert schedule.ratio_of_run == pytest.approx(0.099 / 0.091)


def test_what_costs_too_much_is_not_watched_in_each_step() -> None:
    """2 ms in steps of 10 ms: one of some 64 is watched, one a second at least, and the first 64 all."""
    schedule = Schedule(budget=0.01, every_step=False)
    for number in range(20_000):
        if schedule.watched(0, number):
            checked = schedule.due(0, number)
            cost = 0.01 if checked else 0.002
            schedule.learn(step(number, seconds=0.01 + cost, full=cost, light=cost, checked=checked))
    assert all(schedule.watched(0, n) for n in range(WATCHED_STEPS))
    late = [n for n in range(10_000, 20_000) if schedule.watched(0, n)]
    assert max(later - earlier for earlier, later in itertools.pairwise(late)) * 0.01 <= 1.0
    assert len(late) * 0.002 <= 2 * 0.01 * 10_000 * 0.01
    assert schedule.ratio < 0.03


@pytest.mark.parametrize("seldom", [0, 1])
def test_an_optimizer_that_steps_seldom_holds_nothing_up(seldom: int) -> None:
    """Steps count for each optimizer; the plan begins for all of them at about the same time."""
    schedule, often = Schedule(budget=0.01, every_step=False), 1 - seldom
    steps = {often: 0, seldom: 0}
    watched: list[int] = []  # of the seldom one
    for number in range(3000):
        for optimizer in (often, seldom) if number % 10 == 9 else (often,):
            own = steps[optimizer]
            if schedule.watched(optimizer, own):
                checked = schedule.due(optimizer, own)
                cost = 0.005 if checked else 0.002
                one = step(own, seconds=0.01 + cost, full=cost, light=cost, checked=checked, optimizer=optimizer)
                schedule.learn(one, progress=steps[often])
                watched += [own] if optimizer == seldom else []
            steps[optimizer] += 1
    assert watched[:4] == [0, 1, 2, 3]
    assert len([own for own in watched if own >= WATCHED_STEPS]) <= 240 // 8


def test_long_steps_are_all_watched() -> None:
    """What watching takes is within the budget."""
    schedule = Schedule(budget=0.01, every_step=False)
    run(schedule, 300, seconds=0.6, full=0.03, light=0.002)
    assert all(schedule.watched(0, n) for n in range(1000))


def test_a_step_that_is_checked_is_watched() -> None:
    """Also one whose check was brought forward."""
    schedule = Schedule(budget=0.01, every_step=False)
    run(schedule, 300, seconds=0.005, full=0.003, light=0.001)
    schedule.bring_forward(300)
    due = [n for n in range(400) if schedule.due(0, n)]
    assert any(n > 300 for n in due)
    assert all(schedule.watched(0, n) for n in due)


def test_every_step_means_every_step() -> None:
    """Whatever it costs."""
    schedule = Schedule(budget=0.0, every_step=True)
    run(schedule, 300, seconds=0.2, full=0.2)
    assert all(schedule.due(0, n) for n in range(1000))


def test_all_ranks_come_to_the_same_schedule() -> None:
    """It is a function of the gathered rows."""
    one, other = (Schedule(budget=0.01, every_step=False) for _ in range(2))
    for schedule in (one, other):
        run(schedule, 500, seconds=0.15, full=0.004, light=0.0002)
    assert [one.due(0, n) for n in range(2000)] == [other.due(0, n) for n in range(2000)]


def test_a_new_interval_takes_effect_later_than_any_rank_has_come() -> None:
    """Ranks learn of it at different moments, but before it applies: about half a second later."""
    for seconds, lead in ((0.12, 5), (0.11, 5), (0.5, 4), (3.0, 4)):
        schedule = Schedule(budget=0.01, every_step=False)
        run(schedule, 3, seconds=seconds, full=0.02 * seconds)
        assert schedule.interval(0, 2 + lead - 1) == 1
        assert schedule.interval(0, 2 + lead) > 1


def test_dear_checks_of_long_steps_are_thinned_out_at_once() -> None:
    """The first steps of a run whose steps are long are no reason to spend ten budgets."""
    schedule = Schedule(budget=0.01, every_step=False)
    run(schedule, 16, seconds=0.5, full=0.02, light=0.002)
    assert sum(schedule.due(0, n) for n in range(16)) <= 8


def test_a_slow_beginning_does_not_pass_for_long_steps() -> None:
    """Compilers and autotuning take their time in the first steps: the shorter of two steps counts."""
    schedule = Schedule(budget=0.01, every_step=False)
    schedule.learn(step(1, seconds=5.0, full=0.02, light=0.0, checked=True))
    schedule.learn(step(2, seconds=0.05, full=0.02, light=0.0, checked=True))
    assert all(schedule.due(0, n) for n in range(64))


# --- suspicion --------------------------------------------------------------------------------------------------------


def sampled(interval: int = 16) -> Schedule:
    """A schedule that has come to check every 16th step of a quarter of a second."""
    schedule = Schedule(budget=0.0, every_step=False)
    run(schedule, 64, seconds=0.25, full=0.02)
    assert schedule.interval(0, 100) == interval
    return schedule


def rows(number: int, **columns: tuple[float, float]) -> Step:
    """A step of two ranks with these values."""
    made = {r: Row(rank=r, step=number, **{name: pair[r] for name, pair in columns.items()}) for r in range(2)}  # type: ignore[arg-type]
    return Step(step=number, optimizer=0, world=2, rows=made)


def noisy(number: int) -> float:
    return 1.0 + 0.02 * (number * 7 % 5 - 2)


def told(schedule: Schedule, first: int, last: int, odd: dict[int, Step] | None = None) -> list[int]:
    """Feed ordinary steps (but for the odd ones) and return which of them and of the 64 after them are checked."""
    due = []
    for number in range(first, last):
        usual = rows(number, loss=(noisy(number), noisy(number + 1)), clip_norm=(noisy(number),) * 2)
        schedule.learn((odd or {}).get(number, usual))
        due.append(number) if schedule.due(0, number) else None
    return due + [n for n in range(last, last + 64) if schedule.due(0, n)]


SIGNS = {
    "loss of one rank": rows(85, loss=(noisy(85), 9.0)),
    "loss of one rank is NaN": Step(
        step=85,
        optimizer=0,
        world=2,
        rows={0: Row(rank=0, step=85, loss=1.0), 1: Row(rank=1, step=85, flags=int(Flag.LOSS_NONFINITE))},
    ),
    "norm": rows(85, clip_norm=(30.0, 30.0)),
    "norms of the ranks": rows(85, clip_norm=(1.0, 1.001)),
    "scale": rows(85, loss_scale=(32768.0, 32768.0)),
    "skipped": rows(85, flags=(int(Flag.SKIPPED),) * 2),
    "absent": Step(step=85, optimizer=0, world=2, rows={0: Row(rank=0, step=85)}),
}


@pytest.mark.parametrize("sign", SIGNS)
def test_a_suspicion_brings_the_next_check_forward(sign: str) -> None:
    """From step 96 to 88, which no rank has reached when it hears of step 85."""
    schedule = sampled()
    scaled = rows(84, loss_scale=(65536.0, 65536.0))
    assert told(schedule, 66, 90, {84: scaled, 85: SIGNS[sign]})[:3] == [80, 88, 96]


def test_what_all_ranks_show_is_no_suspicion() -> None:
    """A hard batch, noise, and one rank whose loss always was another."""
    schedule = sampled()
    odd = {85: rows(85, loss=(9.0, 8.0)), 87: rows(87, loss=(0.97, 1.03)), 88: rows(88, clip_norm=(1.1, 1.1))}
    assert told(schedule, 66, 90, odd)[:2] == [80, 96]
    harder = {n: rows(n, loss=(noisy(n), 50 * noisy(n + 1))) for n in range(66, 90)}
    assert told(sampled(), 66, 90, harder)[:2] == [80, 96]


def test_a_check_that_comes_as_soon_is_not_doubled() -> None:
    """Step 95 looks odd, step 96 is checked anyway."""
    assert told(sampled(), 66, 97, {95: rows(95, loss=(1.0, 9.0))})[:3] == [80, 96, 112]


def test_noise_does_not_turn_every_step_into_a_full_check() -> None:
    """One check in four is added at most, whatever the losses do."""
    schedule = sampled()
    wild = {n: rows(n, loss=(1.0, 9.0 if n % 10 == 0 else noisy(n))) for n in range(66, 1000)}
    due = told(schedule, 66, 1000, wild)
    extra = [n for n in due if n % 16]
    assert 8 <= len(extra) <= 2 + 1000 // (4 * 16)


def test_all_ranks_bring_the_same_check_forward() -> None:
    """They see the same rows; where another is when it hears of them does not matter."""
    one, other = sampled(), sampled()
    for number in range(66, 90):
        both = rows(number, loss=(noisy(number), 9.0 if number == 85 else noisy(number + 1)))
        one.learn(both, 87)
        other.learn(both, 87)
    assert [one.due(0, n) for n in range(300)] == [other.due(0, n) for n in range(300)]
    assert one.due(0, 90)


def test_one_rank_has_nobody_to_part_from() -> None:
    """A single process is checked as often as before."""
    schedule = sampled()
    schedule.learn(Step(step=66, optimizer=0, world=1, rows={0: Row(rank=0, step=66, flags=int(Flag.SKIPPED))}))
    assert not any(schedule.due(0, n) for n in range(66, 80))
