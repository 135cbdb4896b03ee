"""Ranks and stragglers: where each rank runs, how long it works, for whom the others wait."""

from __future__ import annotations

from tools.dashboards import promql as q
from tools.dashboards.parts import (
    GOOD,
    RUN_STATES,
    WAITS,
    WARN,
    Board,
    Panel,
    density,
    lines,
    listing,
    states,
    tile,
    worded,
)

#: What a rank does before it waits for the others: what makes a straggler.
_OWN = "data|forward|other"


def board() -> Board:
    """Return the dashboard."""
    made = Board(
        "ddpdebug-ranks",
        "Ranks and stragglers",
        "The slowest rank sets the pace: DDP's backward ends for nobody before it has ended for everybody. Own work "
        "is the time outside that wait: data, forward, and what lies between the phases.",
    )
    made.size(6, 5)
    made.add(
        tile(
            q.verdict(q.of_run("run:ddpdebug_straggler:ratio")),
            unit="percentunit",
            steps=((None, GOOD), (0.1, WARN)),
            missing="no steps",
        ),
        "Slowest rank above the median",
        "What the slowest rank works longer than the median one, as a share of the step: what could be gained by "
        "repairing it. The alert DdpdebugStraggler fires from 10 % on.",
    )
    made.add(
        tile(
            q.verdict(q.of_run("run:ddpdebug_steps_apart:max")),
            words=[(0, "in step", GOOD)],
            steps=((None, GOOD), (2, WARN)),
            unit="suffix:steps",
        ),
        "Steps apart",
        "How far the ranks are apart at one moment, as they tell each other. More than one or two: ranks that do not "
        "step together, as with uneven shards (RANK112).",
    )
    own = q.phase_seconds(_OWN)
    made.add(
        lines([(f"max({own})", "highest rank"), (f"quantile(0.5, {own})", "median rank")], unit="s"),
        "Own work per step",
        "Data, forward and what lies between of the slowest and the median rank. The gap is what all others wait in "
        "every step.",
        width=12,
    )
    _missing(made)
    _who(made)
    return made


def _missing(made: Board) -> None:
    made.row("Who waits for whom")
    missing = f"max by (missing, phase, location) ({q.chosen('run_missing:ddpdebug_missing_rank:max')})"
    made.add(
        states([(missing, "rank {{missing}}: {{phase}} {{location}}")], words=WAITS, missing="no rank was waited for"),
        "Missing ranks",
        "The ranks that others waited for, where they were, and what that came to; a bar ends when the ranks went on. "
        "Red is a hang: the finding (HANG501 to HANG503) has the stacks.",
    )
    longest = q.of_run("run:ddpdebug_waiting_seconds:max")
    waiting = f"{q.by_rank('ddpdebug_waiting_seconds')} > 0"
    made.add(
        lines(
            [(q.worst(5, waiting), "rank {{rank}}"), (f"{longest} > 0", "longest")], unit="s", missing="nobody waits"
        ),
        "Waiting for others",
        "For how long ranks have been waiting for others in one call: the five longest. It falls to 0 as they go on; "
        "a line that only rises is a hang, or a very long evaluation.",
    )


_TABLE_TEXT = (
    "Every rank that was there in this time range, also of a run that is over: where it runs, how it is or how it "
    "ended, its last step. lost: it was killed; cancelled beside it: the launcher ended the others. gone: it no longer "
    "answers; read its log. The GPU's name is that of NVIDIA's own exporter."
)


def _table() -> Panel:
    """Return a row for each rank that was seen: all queries ask for last values, so that all return the same ranks."""
    columns = {
        "rank": "Rank",
        "node": "Node",
        "local_rank": "Local rank",
        "gpu_uuid": "GPU",
        "Value #A": "State",
        "Value #B": "Step",
        "Value #C": "Last step",
        "Value #D": "Loss",
    }
    state, seen = "ddpdebug_run_state", q.last_by_rank("ddpdebug_step")
    ended = f"{q.last_by_rank(state)} != 1 != 2"
    # where rank 0 speaks for all, the others have no state of their own
    states = f"{q.by_rank(state)} or ({ended}) or 6 - 5 * {q.by_rank('ddpdebug_rank_up')} or 0 * {seen} + 6"
    place = q.last(q.chosen("ddpdebug_rank_info", q.RANKS))
    panel = listing(
        [
            states,
            seen,
            f"1000 * {q.last_by_rank('ddpdebug_last_step_timestamp_seconds')}",
            q.last_by_rank("ddpdebug_loss"),
            f"max by (rank, local_rank, node, gpu_uuid) ({place})",
        ],
        names=columns,
        units={"Last step": "dateTimeFromNow", "Step": "none"},
        missing="no rank was seen in this time range",
    )
    return worded(panel, "State", RUN_STATES)


def _who(made: Board) -> None:
    made.row("Who")
    made.add(
        lines([(q.worst(5, q.phase_seconds(_OWN)), "rank {{rank}}")], unit="s", missing="no steps in this time range"),
        "Slowest ranks",
        "The five ranks with the most own work. Always the same: its node, its GPU's clock, its shard. Taking turns: "
        "batches of uneven length.",
    )
    made.add(
        lines(
            [(q.worst(5, q.phase_seconds("data")), "rank {{rank}}")],
            unit="s",
            missing="no steps in this time range",
        ),
        "Longest wait for data",
        "The five ranks that wait longest for their loader. More than a few percent of the step: more workers, or "
        "faster storage.",
    )
    buckets = q.chosen("ddpdebug_step_seconds_bucket", q.RANKS)
    made.add(
        density(f"sum by (le) (increase({buckets}[$__rate_interval]))"),
        "Step time of all ranks",
        "How many steps took how long, over all ranks; the bounds lie about the run's usual step, 20 % apart. A second "
        "band: steps that wait for something, as checkpoints or evaluation.",
    )
    made.add(
        lines(
            [
                (q.of_run("run:ddpdebug_ranks_up:sum"), "ranks up"),
                (q.of_run("run:ddpdebug_world_size:max"), "ranks of the run"),
            ],
            count=True,
        ),
        "Ranks over time",
        "How many ranks take part. A drop is a rank that died or left: the table says which.",
    )
    made.add(_table(), "Ranks", _TABLE_TEXT, width=24, height=10)
