"""How often the sampled tier runs."""

from __future__ import annotations

from ddpdebug.observations import Flag, Row
from ddpdebug.schedule import START_STEPS, Schedule
from ddpdebug.steps import Step


def step(number: int, *, seconds: float, full: float, light: float, checked: bool) -> Step:
    cost = full if checked else light
    flags = int(Flag.CHECKED) if checked else 0
    rows = {r: Row(rank=r, step=number, flags=flags, step_seconds=seconds, overhead_seconds=cost) for r in range(2)}
    return Step(step=number, optimizer=0, world=2, rows=rows)


def run(schedule: Schedule, steps: int, *, seconds: float, full: float, light: float = 0.0, first: int = 0) -> None:
    for number in range(first, first + steps):
        schedule.learn(step(number, seconds=seconds, full=full, light=light, checked=schedule.due(0, number)))


def test_a_dear_check_is_made_as_often_as_the_budget_allows() -> None:
    """6 ms of checks in 200 ms steps are 0.6 % when every fifth step is checked; the rest is for what clocks miss."""
    schedule = Schedule(budget=0.01, every_step=False)
    run(schedule, 400, seconds=0.2, full=0.006)
    assert schedule.interval(400) == 5
    assert sum(schedule.due(0, n) for n in range(400, 1000)) == 120


def test_a_cheap_check_is_made_in_every_step() -> None:
    """Within the budget nothing is left out."""
    schedule = Schedule(budget=0.01, every_step=False)
    run(schedule, 400, seconds=0.2, full=0.001)
    assert schedule.interval(400) == 1


def test_short_steps_are_all_checked_at_first() -> None:
    """Most mistakes show early; afterwards the budget holds."""
    schedule = Schedule(budget=0.01, every_step=False)
    run(schedule, START_STEPS - 200, seconds=0.005, full=0.002)
    assert schedule.interval(START_STEPS - 200) == 1
    run(schedule, 400, seconds=0.005, full=0.002, first=START_STEPS - 200)
    assert schedule.interval(10**9) > 16


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
    """Ranks learn of it at different moments, but before it applies: about two seconds later."""
    for seconds, lead in ((0.12, 16), (0.25, 9), (0.5, 5), (3.0, 4)):
        schedule = Schedule(budget=0.01, every_step=False)
        run(schedule, 3, seconds=seconds, full=0.02 * seconds)
        assert schedule.interval(2 + lead - 1) == 1
        assert schedule.interval(2 + lead) > 1


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
