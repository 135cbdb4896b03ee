"""Run overview: does this run train right, and if not, where to look next."""

from __future__ import annotations

from tools.dashboards import parts, promql as q
from tools.dashboards.parts import BAD, GOOD, WARN, Board, lines, listing, states, tile

_ZERO_IS_GOOD = ((None, GOOD), (1, BAD))
_AGREE = "parameters|optimizer_state|hyperparameters|buffers|modes"


def board() -> Board:
    """Return the dashboard."""
    made = Board(
        "ddpdebug-overview",
        "Run overview",
        "One run in five seconds: the top strip says whether the ranks agree, the rest says since when and who.",
    )
    made.size(3, 4)
    _agreement_tiles(made)
    _health_tiles(made)
    _progress_tiles(made)
    _coverage_tile(made)
    made.row("Training")
    loss = q.ranks("ddpdebug_loss")
    made.add(
        lines(q.spread(loss), zero=False),
        "Loss",
        "Loss as given to backward: the highest, median and lowest rank. Ranks see different data, so a spread is "
        "normal; one rank that leaves the others is not: choose it above and see Rank agreement.",
    )
    norm = q.ranks("ddpdebug_grad_norm")
    made.add(
        lines([(f"max({norm})", "highest rank"), (f"min({norm})", "lowest rank")]),
        "Gradient norm",
        "Norm of the reduced gradients before clipping. After the reduction all ranks must have the same: two lines "
        "that part are unsynchronised gradients. A jump by orders of magnitude: see Numerics.",
    )
    made.add(
        lines(
            [
                (f"avg({q.phase_seconds(phase, q.RANKS)})", phase)
                for phase in ("data", "forward", "backward", "optimizer")
            ],
            unit="s",
            stacked=True,
        ),
        "Step time by phase",
        "Mean over the ranks. Backward contains the wait for the slowest rank: see Ranks and stragglers. A growing "
        "data part is a loader that cannot keep up.",
    )
    made.add(
        states([(q.shared("ddpdebug_ranks_disagreeing", "what"), "{{what}}")], words=_AGREEMENT, missing="no data"),
        "Agreement over time",
        "What the ranks agree on. Red begins in the step in which the first rank was outvoted; Rank agreement says "
        "which one.",
    )
    _incidents(made)
    return made


_AGREEMENT = ((0, "agree", GOOD), (1, "differ", BAD))


def _agreement_tiles(made: Board) -> None:
    up = f"sum(max by (rank) ({q.chosen('ddpdebug_rank_up')}))"
    world = q.shared("ddpdebug_world_size")
    made.add(
        tile(f"{world} - ({up} or 0 * {world})", words=[(0, "all up", GOOD)], steps=_ZERO_IS_GOOD, missing="down"),
        "Ranks missing",
        "Ranks of the run that are not there: all up, or how many are missing. If ranks are missing, look at their "
        "logs first: the others wait for them in a collective.",
    )
    made.add(
        tile(
            q.shared(f'ddpdebug_ranks_disagreeing{{what=~"{_AGREE}"}}'), words=[(0, "agree", GOOD)], steps=_ZERO_IS_GOOD
        ),
        "Ranks agree",
        "How many ranks differ from the majority in parameters, buffers, optimizer state, settings or "
        "modes. Not agree: the model that you train depends on the rank; open Rank agreement.",
    )
    parted = q.shared('ddpdebug_ranks_disagreeing{what="gradients"}')
    unsynced = q.increase("ddpdebug_unsynchronised_steps_total", "5m")
    made.add(
        tile(f"{parted} + ceil({unsynced})", words=[(0, "in sync", GOOD)], steps=_ZERO_IS_GOOD),
        "Gradients",
        "In sync when all ranks step on the same gradients and every gradient went through DDP in the last 5 minutes. "
        "Otherwise look for no_sync, a bypassed wrapper or a smaller group: findings SYNC2xx.",
    )


def _health_tiles(made: Board) -> None:
    nonfinite = q.increase("ddpdebug_nonfinite_steps_total", "5m")
    made.add(
        tile(f"ceil({nonfinite})", words=[(0, "finite", GOOD)], steps=_ZERO_IS_GOOD),
        "Numbers",
        "Steps of the last 5 minutes in which loss or gradients were NaN or infinite on some rank. Skips of a loss "
        "scaler that starts high are normal. Otherwise open Numerics: it says which rank was first.",
    )
    made.add(
        tile(q.HEADROOM, unit="percentunit", steps=((None, BAD), (0.05, WARN), (0.15, GOOD)), missing="limit unknown"),
        "Memory headroom",
        "What is left of the memory limit on the fullest rank, device or host. Under 5 %: the next longer batch may "
        "be the last; open Memory.",
    )
    made.add(
        tile(q.STRAGGLER, unit="percentunit", steps=((None, GOOD), (0.2, WARN), (0.5, BAD)), missing="no steps"),
        "Slowest rank",
        "How much longer the slowest rank works per step (data and forward) than the median rank. All others wait "
        "for it in backward. Above 20 %: open Ranks and stragglers.",
    )


def _progress_tiles(made: Board) -> None:
    made.add(
        tile(
            q.shared("ddpdebug_overhead_ratio"),
            unit="percentunit",
            decimals=1,
            steps=((None, GOOD), (0.02, WARN), (0.05, BAD)),
            missing="not yet",
        ),
        "Overhead",
        "Time that ddpdebug itself takes, as a share of the step. Above the budget for long: lower it with "
        "--budget, or leave --every-step out.",
    )
    silent = f"time() - max({q.chosen('ddpdebug_last_step_timestamp_seconds')})"
    made.add(
        tile(silent, unit="s", steps=((None, GOOD), (120, WARN), (600, BAD)), missing="no step yet"),
        "Last step ago",
        "Time since the last optimizer step of any rank. Much longer than a step: evaluation, a checkpoint, or a "
        "hang; then py-spy dump on each rank says where.",
    )


def _coverage_tile(made: Board) -> None:
    complete = f"min({q.chosen('ddpdebug_coverage_complete')})"
    compared = f"max({q.chosen('ddpdebug_ranks_compared')})"
    # 0: everything is checked; 1: a part is not; 2: there are several ranks, or none, and nothing is compared
    state = f"(1 - {complete}) * (1 + ({compared} == bool 0))"
    made.add(
        tile(
            state,
            words=[(0, "all checked", GOOD), (1, "not in all", WARN), (2, "nothing compared", BAD)],
            steps=((None, GOOD), (1, WARN), (2, BAD)),
            missing="not known yet",
        ),
        "Checked",
        "Whether everything is checked that normally is. Not in all: ddpdebug_checks_off says what is missing. Nothing "
        "compared: the green tiles beside this one mean nothing; run.json and the log of rank 0 say why.",
        width=6,
    )


def _incidents(made: Board) -> None:
    made.row("Findings")
    labels = ("severity", "code", "subject", "culprits", "incident")
    columns = {
        "severity": "Severity",
        "code": "Code",
        "subject": "What",
        "culprits": "Ranks",
        "Value #A": "Step",
        "Value #B": "Since",
        "incident": "Incident",
    }
    since = f"1000 * {q.shared('ddpdebug_incident_timestamp_seconds', *labels)}"
    panel = listing(
        [q.shared("ddpdebug_incident_step", *labels), since],
        names=columns,
        units={"Since": "dateTimeFromNow", "Step": "none"},
        sort="Since",
        missing="no findings: nothing wrong was seen",
    )
    made.add(
        parts.linked(panel, "see the ranks", "ddpdebug-agreement"),
        "Newest findings",
        "The five newest findings. What happened, on which rank, since which step; `ddpdebug explain CODE` prints "
        "likely causes and remedies, findings.jsonl in the run directory has all with their evidence.",
        width=16,
    )
    made.add(
        lines(
            [(f"sum by (severity) (max by (code, severity) ({q.chosen('ddpdebug_findings_total')}))", "{{severity}}")]
        ),
        "Findings so far",
        "Causes found since the run began, by severity; each counts once however often it shows.",
        width=8,
    )
