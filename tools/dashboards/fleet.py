"""Fleet: all runs of the time range, the ill ones first, and how those ended that are over."""

from __future__ import annotations

from tools.dashboards import promql as q
from tools.dashboards.parts import (
    AGREE,
    BAD,
    FINITE,
    GOOD,
    NEUTRAL,
    RUN_STATES,
    WORST,
    Board,
    Panel,
    alerts,
    board_url,
    lines,
    listing,
    opens,
    states,
    tile,
    worded,
)

_STATES = "run:ddpdebug_run_state:max"
_NONE_IS_GOOD = ((None, GOOD), (1, BAD))


def board() -> Board:
    """Return the dashboard."""
    made = Board(
        "ddpdebug-fleet",
        "Fleet",
        "All runs of the time range. Choose one in the table to open its overview.",
        variables=("docs",),
    )
    made.size(4, 4)
    alive = f"{_STATES} == 1 or {_STATES} == 2"
    for query, title, steps, text in (
        (f"count({alive})", "Runs", ((None, NEUTRAL),), _RUNS),
        (f"count({_STATES} == 2)", "Ill runs", _NONE_IS_GOOD, _ILL),
        (
            "count(max by (run_id) (run_what:ddpdebug_ranks_disagreeing:max) > 0)",
            "Runs whose ranks disagree",
            _NONE_IS_GOOD,
            "Runs in which some rank is outvoted now. Each of them trains different models on different ranks.",
        ),
        (f"count(({q.last(_STATES)} >= 4) <= 5)", "Runs that failed or were lost", _NONE_IS_GOOD, _DEAD),
        (
            "count(last_over_time(run:ddpdebug_findings_worst:max[$__range]) == 4)",
            "Runs with critical findings",
            _NONE_IS_GOOD,
            "Runs of the time range, alive or ended, that a finding says are wrong or dead from some step on.",
        ),
        ("sum(run:ddpdebug_ranks_up:sum)", "Ranks", ((None, NEUTRAL),), _RANKS),
    ):
        made.add(
            tile(
                f"{query} or vector(0)",
                words=[(0, "none", GOOD)]
                if "run" in title.lower() and title != "Runs"
                else [(0, "no ranks" if title == "Ranks" else "no runs", NEUTRAL)],
                steps=steps,
            ),
            title,
            text,
        )
    _runs(made)
    return made


_RUNS = (
    "Runs that answer now. None although jobs run: the targets page of Prometheus, then whether it has loaded the "
    "rules of ddpdebug, then docs/monitoring.md."
)
_ILL = "Runs that train on although a finding of them is an error or critical. Stop them, or open their overview."
_DEAD = "Runs that ended with an error or vanished without a word in the time range. The table says which."
_RANKS = "Ranks of all runs that take part now. A sudden drop by a whole number of ranks per node: a node that failed."


def _table() -> Panel:
    def column(expression: str) -> str:
        return f"max by (run_id, run) ({expression})"

    columns = {
        "run": "Name",
        "run_id": "Run",
        "world_size": "Ranks",
        "Value #A": "State",
        "Value #B": "Worst finding",
        "Value #C": "Agreement",
        "Value #D": "Numbers",
        "Value #E": "Step",
        "Value #F": "Last step",
        "Value #G": "Overhead",
        "scheduler_job": "Job",
        "torch": "torch",
        "ddpdebug": "ddpdebug",
    }
    ever = "max_over_time"
    queries = [
        column(q.last(_STATES)),
        column(q.last("run:ddpdebug_findings_worst:max")),
        column(q.last("run_what:ddpdebug_ranks_disagreeing:max")),
        column(f"{ever}(run:ddpdebug_nonfinite_steps:increase5m[$__range])"),
        column(q.last("run:ddpdebug_step:max")),
        f"1000 * {column(q.last('run:ddpdebug_last_step_timestamp_seconds:max'))}",
        column(q.last("run:ddpdebug_overhead_ratio:max")),
        f"max by (run_id, run, scheduler_job, world_size, torch, ddpdebug) ({q.last('run:ddpdebug_run_info:max')})",
    ]
    units = {"Last step": "dateTimeFromNow", "Step": "none", "Overhead": "percentunit", "Agreement": "suffix:differ"}
    panel = listing(queries, names=columns, units=units, sort="Worst finding", missing="no run in this time range")
    panel = worded(worded(panel, "State", RUN_STATES), "Worst finding", WORST)
    panel = worded(worded(panel, "Agreement", ((0, "agree", GOOD), ((1, 1e9), "", BAD))), "Numbers", FINITE)
    return opens(panel, "Run", "open this run", board_url("ddpdebug-overview"))


def _runs(made: Board) -> None:
    made.row("Run by run")
    made.add(
        _table(),
        "All runs",
        "One row for each run of the time range, those with the worst findings first; runs that are over stay, with "
        "how they ended and what they were like last. Click on a run's id to open its overview.",
        width=24,
        height=9,
    )
    made.add(
        states([(f"max by (run_id, run) ({_STATES})", "{{run}} ({{run_id}})")], words=RUN_STATES, missing="no runs"),
        "State by run",
        "When each run began, fell ill and ended. Several at once: a shared cause, as a new library, a bad node or "
        "storage that was gone.",
    )
    differ = "max by (run_id, run) (run_what:ddpdebug_ranks_disagreeing:max)"
    made.add(
        states([(differ, "{{run}} ({{run_id}})")], words=AGREE, missing="no runs"),
        "Agreement by run",
        "When the ranks of a run parted. Several runs at once: a shared cause, as a new library or a bad node.",
    )
    rate = "max by (run_id, run) (run:ddpdebug_steps:rate2m)"
    made.add(
        lines([(f"topk(20, {rate})", "{{run}} ({{run_id}})")], unit="ops"),
        "Steps per second",
        "Speed of the runs (the 20 fastest). Zero: stalled. A drop on all at once: shared storage or network.",
    )
    made.add(
        alerts('ALERTS{alertname=~"Ddpdebug.+", alertstate="firing"}', run=True),
        "Firing alerts",
        "The alerts about all runs that fire at the end of the time range; a click on one opens its runbook: meaning, "
        "impact, diagnosis, mitigation.",
    )
