"""Fleet: all runs that this Prometheus sees, the ill ones first."""

from __future__ import annotations

from tools.dashboards.parts import BAD, GOOD, Board, Panel, lines, listing, opens, states, tile, worded
from tools.dashboards.promql import by_run

_STATE = ((0, "agree", GOOD), (1, "differ", BAD))


def board() -> Board:
    """Return the dashboard."""
    made = Board(
        "ddpdebug-fleet",
        "Fleet",
        "All runs that this Prometheus scrapes. Choose a run in the table to open its overview.",
        run=False,
    )
    made.size(6, 4)
    runs = "count(count by (run_id) (ddpdebug_run_info))"
    made.add(
        tile(runs, missing="none"),
        "Runs",
        "Runs with at least one rank that answers. None although jobs run: the targets page of Prometheus, then "
        "docs/monitoring.md.",
    )
    ill = f"count({by_run('ddpdebug_ranks_disagreeing')} > 0) or vector(0)"
    made.add(
        tile(ill, words=[(0, "none", GOOD)], steps=((None, GOOD), (1, BAD))),
        "Runs whose ranks disagree",
        "Runs in which some rank is outvoted now. Each of them trains different models on different ranks.",
    )
    ranks = "count(max by (run_id, rank) (ddpdebug_rank_up * on (job, instance) group_left (run_id) ddpdebug_run_info))"
    made.add(
        tile(ranks),
        "Ranks",
        "Ranks of all runs that take part now. A sudden drop by a whole number of ranks per node: a node that failed.",
    )
    found = 'ddpdebug_findings_total{severity="critical"}'
    critical = (  # a code's counter appears with its first finding, which is no increase
        f"sum(max by (run_id, code) ((increase({found}[1h]) > 0 or ({found} unless {found} offset 1h))"
        " * on (job, instance) group_left (run_id) ddpdebug_run_info))"
    )
    made.add(
        tile(f"ceil({critical})", words=[(0, "none", GOOD)], steps=((None, GOOD), (1, BAD))),
        "Critical findings, last hour",
        "Causes found in the last hour that make a run wrong or dead from that step on.",
    )
    _runs(made)
    return made


def _table() -> Panel:
    worlds = "max by (run_id, world_size, torch, ddpdebug) (ddpdebug_run_info)"
    queries = [
        f"{by_run('ddpdebug_ranks_disagreeing')} * on (run_id) group_left (world_size, torch, ddpdebug) {worlds}",
        by_run("ddpdebug_step"),
        f"time() - {by_run('ddpdebug_last_step_timestamp_seconds')}",
        f"sum by (run_id) ({by_run('ddpdebug_findings_total', 'code')})",
        by_run("ddpdebug_overhead_ratio"),
    ]
    columns = {
        "run_id": "Run",
        "world_size": "Ranks",
        "Value #A": "State",
        "Value #B": "Step",
        "Value #C": "Last step ago",
        "Value #D": "Findings",
        "Value #E": "Overhead",
        "torch": "torch",
        "ddpdebug": "ddpdebug",
    }
    units = {"Last step ago": "s", "Step": "none", "Overhead": "percentunit"}
    panel = listing(queries, names=columns, units=units, sort="Findings", missing="no run is scraped")
    return opens(worded(panel, "State", _STATE), "Run", "ddpdebug-overview")


def _runs(made: Board) -> None:
    made.row("Run by run")
    made.add(
        _table(),
        "All runs",
        "One row for each run; those with most findings first. Click on a run to open its overview.",
        width=24,
        height=9,
    )
    made.add(
        states([(by_run("ddpdebug_ranks_disagreeing"), "{{run_id}}")], words=_STATE, missing="no runs"),
        "Agreement by run",
        "When the ranks of a run parted. Several runs at once: a shared cause, as a new library or a bad node.",
    )
    rate = by_run("rate(ddpdebug_steps_total[$__rate_interval])")
    made.add(
        lines([(f"topk(20, {rate})", "{{run_id}}")], unit="ops"),
        "Steps per second",
        "Speed of the runs (the 20 fastest). Zero: stalled. A drop on all at once: shared storage or network.",
    )
