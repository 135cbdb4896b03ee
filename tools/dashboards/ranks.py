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
    stragglers_cost,
    tile,
    worded,
)

#: Mean own time per step of each of the chosen ranks: what makes a straggler.
_STEPS = f"max by (rank) ({q.rate('ddpdebug_step_seconds_count', q.RANKS)})"
_OWN = f"sum by (rank) ({q.rate('ddpdebug_own_seconds_total', q.RANKS)}) / {_STEPS}"
_LENGTH = f"max by (rank) ({q.rate('ddpdebug_step_seconds_sum', q.RANKS)})"
_WAITS_FOR_DATA = q.rate("ddpdebug_phase_seconds_sum", q.RANKS, 'phase="data"')
_DATA = f"max by (rank) ({_WAITS_FOR_DATA}) / {_LENGTH}"


def board() -> Board:
    """Return the dashboard."""
    made = Board(
        "ddpdebug-ranks",
        "Ranks and stragglers",
        "The slowest rank sets the pace: DDP's backward ends for nobody before it has ended for everybody. Own time "
        "is the step without that wait: data, forward, backward until the rank's last gradient, optimizer, and what "
        "lies between.",
    )
    made.size(6, 5)
    made.add(
        stragglers_cost(),
        "What stragglers cost",
        "By how much the steps of the last 5 minutes would have been shorter without the rank that costs most, which "
        "is the name below. Two ranks that are equally slow cost nothing each: the tile beside this one shows them.",
    )
    made.add(
        tile(
            q.verdict(q.of_run("run:ddpdebug_straggler:ratio")),
            unit="percentunit",
            steps=((None, GOOD), (0.1, WARN)),
            missing="no steps",
        ),
        "Slowest rank above the median",
        "By how much the slowest rank's own time is longer than the median of the others', as a share of the step; of "
        "more than 64 ranks behind one endpoint, than the next slowest one's. The alert DdpdebugStraggler fires from "
        "10 % on.",
    )
    made.add(
        tile(
            q.verdict(q.of_run("run:ddpdebug_data:ratio5m")),
            unit="percentunit",
            steps=((None, GOOD), (0.2, WARN)),
            missing="no steps",
        ),
        "Waiting for data",
        "The share of its step that the median rank waits for its loader; of two ranks that of the one that waits "
        "less. Above 20 % the run is input-bound: more workers, cheaper samples or faster storage would make it "
        "shorter; SLOW602 says which.",
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
    made.size(12, 8)
    waits = f"sum by (rank) ({q.rate('ddpdebug_wait_seconds_total', q.RANKS)}) / {_STEPS}"
    made.add(
        lines(
            [
                (f"max({_OWN})", "highest rank"),
                (q.usual(f"({_OWN})"), "median rank"),
                (f"quantile(0.5, {waits})", "waiting"),
            ],
            unit="s",
        ),
        "Own time per step",
        "Of the slowest rank and the median of the others, and how long the median rank waits. Slow ranks make the gap "
        "and the waiting; waiting without a gap is the reduction itself.",
    )
    # of very many ranks it is known in every step, and how long that took of the first rank only
    clock = f"scalar(max({q.rate('ddpdebug_step_seconds_sum')}))"
    cost = f"max by (rank) ({q.rate('ddpdebug_straggler_cost_seconds_total', q.RANKS)}) / {clock}"
    made.add(
        lines(
            [(q.worst(5, cost), "rank {{rank}}"), (q.of_run("run:ddpdebug_straggler_cost:ratio5m"), "all ranks")],
            unit="percentunit",
            missing="no steps in this time range",
        ),
        "What slow ranks cost over time",
        "By how much the steps would have been shorter without each rank, the five that cost most, as a share of the "
        "step. One line near that of all ranks is a straggler. Many small ones, by turns, are noise or batches of "
        "uneven length: that costs too, and no single rank is to blame.",
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
        lines([(q.worst(5, _OWN), "rank {{rank}}")], unit="s", missing="no steps in this time range"),
        "Slowest ranks",
        "The five ranks with the most own time. Always the same: its node, its GPU's clock, its shard. Taking turns: "
        "batches of uneven length.",
    )
    made.add(
        lines(
            [(q.worst(5, _DATA), "rank {{rank}}"), (f"quantile(0.5, {_DATA})", "median rank")],
            unit="percentunit",
            missing="no steps in this time range",
        ),
        "Share of the step that waits for data",
        "The five ranks that wait longest for their loader, and the median one. All of them from 20 % on: the run is "
        "input-bound, and needs more workers, cheaper samples or faster storage. A few only: their share of the data.",
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
