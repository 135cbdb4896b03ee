"""Ranks and stragglers: where each rank runs, how long it works, for whom the others wait."""

from __future__ import annotations

from tools.dashboards import promql as q
from tools.dashboards.parts import BAD, GOOD, WARN, Board, Panel, density, lines, listing, tile, worded

_UP = ((0, "gone", BAD), (1, "up", GOOD))


def board() -> Board:
    """Return the dashboard."""
    made = Board(
        "ddpdebug-ranks",
        "Ranks and stragglers",
        "The slowest rank sets the pace: DDP's backward ends for nobody before it has ended for everybody. Own work "
        "is the time before that wait: data and forward.",
    )
    made.size(6, 5)
    made.add(
        tile(q.STRAGGLER, unit="percentunit", steps=((None, GOOD), (0.2, WARN), (0.5, BAD)), missing="no steps"),
        "Slowest rank above the median",
        "Own work of the slowest rank compared with the median rank. What could be gained by repairing it.",
    )
    made.add(
        tile(
            f"max({q.by_rank('ddpdebug_step')}) - min({q.by_rank('ddpdebug_step')})",
            steps=((None, GOOD), (2, WARN), (10, BAD)),
        ),
        "Steps apart",
        "How far the ranks' step counters are apart. More than one or two: ranks that do not step together, as with "
        "uneven shards (RANK112).",
    )
    own = q.phase_seconds(q.OWN_PHASES, q.RANKS)
    made.add(
        lines([(f"max({own})", "highest rank"), (f"quantile(0.5, {own})", "median rank")], unit="s"),
        "Own work per step",
        "Data and forward of the slowest and the median rank. The gap is what all others wait in every step.",
        width=12,
    )
    _who(made)
    return made


_TABLE_TEXT = (
    "Every rank that was there in this time range: where it runs, its last step, how long ago. gone: its endpoint no "
    "longer answers or it left the exchange; read its log. The GPU's name is that of NVIDIA's own exporter."
)


def _table(up: str) -> Panel:
    labels = "rank, local_rank, node, gpu_uuid"
    columns = {
        "rank": "Rank",
        "node": "Node",
        "local_rank": "Local rank",
        "gpu_uuid": "GPU",
        "Value #A": "State",
        "Value #B": "Step",
        "Value #C": "Last step ago",
        "Value #D": "Loss",
    }
    place = f"max by ({labels}) ({q.chosen(f'ddpdebug_rank_info{{{q.RANKS}}}')})"
    joined = "* on (rank) group_left (local_rank, node, gpu_uuid)"
    panel = listing(
        [
            f"{up} {joined} {place} or on (rank) ({up})",
            f"{q.ranks('ddpdebug_step')} {joined} {place}",
            f"time() - {q.ranks('ddpdebug_last_step_timestamp_seconds')} {joined} {place}",
            f"{q.ranks('ddpdebug_loss')} {joined} {place}",
        ],
        names=columns,
        units={"Last step ago": "s", "Step": "none"},
        missing="no rank was seen in this time range",
    )
    return worded(panel, "State", _UP)


def _who(made: Board) -> None:
    own = q.phase_seconds(q.OWN_PHASES, q.RANKS)
    made.row("Who")
    made.add(
        lines([(q.worst(5, own), "rank {{rank}}")], unit="s", missing="no steps in this time range"),
        "Slowest ranks",
        "The five ranks with the most own work. Always the same: its node, its GPU's clock, its shard. Taking turns: "
        "batches of uneven length.",
    )
    made.add(
        lines(
            [(q.worst(5, q.phase_seconds("data", q.RANKS)), "rank {{rank}}")],
            unit="s",
            missing="no steps in this time range",
        ),
        "Longest wait for data",
        "The five ranks that wait longest for their loader. More than a few percent of the step: more workers, or "
        "faster storage.",
    )
    made.add(
        density(f"sum by (le) ({q.chosen('increase(ddpdebug_step_seconds_bucket[$__rate_interval])')})"),
        "Step time of all ranks",
        "How many steps took how long, over all ranks. A second band: steps that wait for something, as checkpoints "
        "or evaluation.",
    )
    up = f"max by (rank) ({q.chosen(f'ddpdebug_rank_up{{{q.RANKS}}}')})"
    seen = f"max by (rank) (last_over_time(({up})[$__range:$__interval]))"
    left = f"({seen} unless on (rank) ({up})) * 0 or {up}"
    made.add(
        lines([(f"sum({up})", "ranks up"), (q.shared("ddpdebug_world_size"), "ranks of the run")]),
        "Ranks over time",
        "How many ranks take part. A drop is a rank that died or left: the table says which.",
    )
    made.add(_table(left), "Ranks now", _TABLE_TEXT, width=24, height=10)
