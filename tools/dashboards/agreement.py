"""Rank agreement: what agrees with what, who is outvoted and in what, since when."""

from __future__ import annotations

from tools.dashboards import promql as q
from tools.dashboards.parts import AGREE, BAD, Board, lines, linked, states

_OUTVOTED = ((1, "outvoted", BAD),)


def board() -> Board:
    """Return the dashboard."""
    made = Board(
        "ddpdebug-agreement",
        "Rank agreement",
        "Which ranks are no longer the same model. Read the first red of the upper panel from left to right: what "
        "parted first is usually the cause of the rest.",
    )
    made.size(12, 9)
    differing = f"max by (what) ({q.chosen('run_what:ddpdebug_ranks_disagreeing:max')})"
    made.add(
        states([(differing, "{{what}}")], words=AGREE, missing="no data"),
        "What agrees",
        "One row for each thing that is compared. hyperparameters before parameters: a schedule. gradients before "
        "parameters: a missing reduction. parameters alone: an edit or a load on one rank.",
    )
    made.add(
        lines([(differing, "{{what}}")], count=True),
        "How many ranks differ",
        "Ranks outside the largest group of equals; all of them where no group is the largest, as always with two "
        "ranks: then it is not known which of them is right.",
    )
    made.row("Ranks")
    outvoted = q.chosen("run_rank_what:ddpdebug_rank_outvoted:max", q.RANKS)
    panel = states(
        [(q.worst(60, f"max by (rank, what) ({outvoted})"), "rank {{rank}}: {{what}}")],
        words=_OUTVOTED,
        missing="no rank was outvoted in this time range",
    )
    made.add(
        linked(panel, "what this rank does", "ddpdebug-ranks", "rank"),
        "Outvoted ranks",
        "Only ranks that were outvoted have a row, one for each thing in which they were. One rank alone: its node, "
        "its GPU, its code path. All ranks of a node: that node, or a group that ends at it. All ranks of the run: "
        "no group of equals is the largest, so that nobody can be blamed.",
        width=24,
        height=9,
    )
    for what in ("parameters", "optimizer_state"):
        query = q.of_run("run_what:ddpdebug_ranks_disagreeing:max", f'what="{what}"')
        made.add(
            lines([(query, "ranks")], missing="not compared yet", count=True),
            f"Ranks outvoted on {what.replace('_', ' ')}",
            f"How many ranks differ in their {what.replace('_', ' ')}. From the first step on: initialisation or "
            "loading. Later: something happened on these ranks only.",
        )
    _why(made)
    return made


def _why(made: Board) -> None:
    made.row("Why")
    unsynced = f"max by (rank) ({q.rate('ddpdebug_unsynchronised_steps_total', q.RANKS)})"
    made.add(
        lines([(q.worst(8, unsynced), "rank {{rank}}")], count=True),
        "Unsynchronised steps per second",
        "Steps on gradients that no DDP had reduced: no_sync around the last backward, or a call past the wrapper. "
        "More than zero trains each rank on its own.",
    )
    made.add(
        lines(q.spread("ddpdebug_local_grad_norm")[:2]),
        "Own gradient norm",
        "Norm of the ranks' gradients before the reduction, without the loss scale. A rank far above the median "
        "drives the mean: look at its batch in Numerics.",
    )
    made.add(
        lines(q.spread("ddpdebug_learning_rate")[::2]),
        "Learning rate",
        "Must be one line. Two lines: a scheduler that is driven by a number of its own rank, or stepped on some "
        "ranks only (RANK104).",
    )
    made.add(
        lines([(q.of_run("ddpdebug_check_interval_steps"), "steps between full checks")]),
        "Check interval",
        "A difference is seen at the next full check at the latest. Raise --budget, or use --every-step, to see it "
        "in the step in which it happens.",
    )
