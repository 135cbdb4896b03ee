"""Rank agreement: what agrees with what, who is outvoted, since when."""

from __future__ import annotations

from tools.dashboards import promql as q
from tools.dashboards.parts import BAD, GOOD, Board, lines, linked, states

_DIFFER = ((0, "agree", GOOD), (1, "differ", BAD))
_MINORITY = ((0, "majority", GOOD), (1, "outvoted", BAD))


def board() -> Board:
    """Return the dashboard."""
    made = Board(
        "ddpdebug-agreement",
        "Rank agreement",
        "Which ranks are no longer the same model. Read the first red of the upper panel from left to right: what "
        "parted first is usually the cause of the rest.",
    )
    made.size(12, 9)
    made.add(
        states([(q.shared("ddpdebug_ranks_disagreeing", "what"), "{{what}}")], words=_DIFFER, missing="no data"),
        "What agrees",
        "One row for each thing that is compared. hyperparameters before parameters: a schedule. gradients before "
        "parameters: a missing reduction. parameters alone: an edit or a load on one rank.",
    )
    made.add(
        lines([(q.shared("ddpdebug_ranks_disagreeing", "what"), "{{what}}")]),
        "How many ranks differ",
        "Ranks outvoted; all of them where there is no majority, as always with two ranks. Jumps to the world size: "
        "everybody has parted from everybody.",
    )
    made.row("Ranks")
    outvoted = f"ddpdebug_rank_outvoted{{{q.RANKS}}}"
    worst = f"max by (rank) ({q.chosen(outvoted)})"
    ever = f"max_over_time(({worst})[$__range:$__interval]) > 0"
    panel = states(
        [(f"{worst} and on (rank) ({ever})", "rank {{rank}}")],
        words=_MINORITY,
        missing="no rank was outvoted in this time range",
    )
    made.add(
        linked(panel, "what this rank does", "ddpdebug-ranks", "rank"),
        "Minority ranks",
        "Only ranks that were outvoted in this time range have a row. One rank alone: its node, its GPU, its code "
        "path. All ranks of a node: that node, or a group that ends at it.",
        width=24,
        height=9,
    )
    for what in ("parameters", "optimizer_state"):
        query = q.chosen(f'ddpdebug_rank_outvoted{{what="{what}", {q.RANKS}}}')
        made.add(
            lines([(f"sum(max by (rank) ({query}))", "ranks")], missing="not compared yet"),
            f"Ranks outvoted on {what.replace('_', ' ')}",
            f"How many ranks differ in their {what.replace('_', ' ')}. From the first step on: initialisation or "
            "loading. Later: something happened on these ranks only.",
        )
    _why(made)
    return made


def _why(made: Board) -> None:
    made.row("Why")
    made.add(
        lines([(q.rate("ddpdebug_unsynchronised_steps_total", "rank"), "rank {{rank}}")]),
        "Unsynchronised steps per second",
        "Steps on gradients that no DDP had reduced: no_sync around the last backward, or a call past the wrapper. "
        "More than zero trains each rank on its own.",
    )
    made.add(
        lines(
            [
                (f"max({q.ranks('ddpdebug_local_grad_norm')})", "highest rank"),
                (f"quantile(0.5, {q.ranks('ddpdebug_local_grad_norm')})", "median rank"),
            ]
        ),
        "Own gradient norm",
        "Norm of the ranks' gradients before the reduction. A rank far above the median drives the mean: look at its "
        "batch in Numerics.",
    )
    learning = q.ranks("ddpdebug_learning_rate")
    made.add(
        lines([(f"max({learning})", "highest rank"), (f"min({learning})", "lowest rank")]),
        "Learning rate",
        "Must be one line. Two lines: a scheduler that is driven by a number of its own rank, or stepped on some "
        "ranks only (RANK104).",
    )
    made.add(
        lines([(f"max({q.chosen('ddpdebug_check_interval_steps')})", "steps between full checks")]),
        "Check interval",
        "A difference is seen at the next full check at the latest. Raise --budget, or use --every-step, to see it "
        "in the step in which it happens.",
    )
