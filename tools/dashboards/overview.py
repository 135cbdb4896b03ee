"""Run overview: does this run train right, how did it end, and where to look next."""

from __future__ import annotations

from tools.dashboards import promql as q
from tools.dashboards.parts import (
    AGREE,
    BAD,
    GOOD,
    NOTE,
    RUN_STATES,
    SEVERITIES,
    WAITS,
    WARN,
    WORST,
    Board,
    alerts,
    graded,
    lines,
    linked,
    listing,
    states,
    stragglers_cost,
    tile,
    worded,
)

_ZERO_IS_GOOD = ((None, GOOD), (1, BAD))


def board() -> Board:
    """Return the dashboard."""
    made = Board(
        "ddpdebug-overview",
        "Run overview",
        "One run in five seconds: the top strip says how it is or how it ended, the rest says since when and who.",
        variables=("run", "docs"),
    )
    made.size(4, 4)
    _state_tiles(made)
    made.size(3, 4)
    _agreement_tiles(made)
    _progress_tiles(made)
    _incidents(made)
    _training(made)
    return made


def _state_tiles(made: Board) -> None:
    made.add(
        tile(q.STATE, words=RUN_STATES),
        "Run state",
        "How the run is, or how it ended. ill: a finding at error or critical is current. lost: a rank was killed or "
        "vanished without a word; the launcher's log and the scheduler say why. gone: it no longer answers and left "
        "no word, which can have been in order; its run.json has the outcome.",
    )
    worst = "run:ddpdebug_findings_worst:max"
    made.add(
        tile(f"max({q.last(q.chosen(worst))}) > 0 or {q.verdict(q.of_run(worst))}", words=WORST),
        "Worst finding",
        "The most severe finding of the run up to the end of the time range, also of a run that has ended. The table "
        "below says what it is; critical: the run is wrong or dead from that step on.",
    )
    made.add(
        tile(
            q.verdict(q.of_run("run:ddpdebug_unchecked:max")),
            words=[(0, "all checked", GOOD), (1, "not in all", WARN), (2, "nothing compared", BAD)],
            steps=((None, GOOD), (1, WARN), (2, BAD)),
            missing="not known yet",
        ),
        "Checked",
        "Whether everything is checked that normally is. Not in all: ddpdebug_checks_off says what is missing. Nothing "
        "compared: the green tiles beside this one mean nothing; run.json and the log of rank 0 say why.",
    )
    made.add(
        tile(
            q.verdict(q.of_run("run:ddpdebug_memory:ratio").join(("1 - ", ""))),
            unit="percentunit",
            steps=((None, BAD), (0.05, WARN), (0.15, GOOD)),
            missing="limit unknown",
        ),
        "Memory headroom",
        "What is left of the memory limit of the fullest device or node. Under 5 %: the next longer batch may be the "
        "last; Memory says when it will be full.",
    )
    made.add(
        stragglers_cost(),
        "What stragglers cost",
        "By how much the steps of the last 5 minutes would have been shorter without the rank that costs most: the "
        "name below is that rank. Somebody is last in every step, so that a healthy run has a few percent too. Above "
        "10 %: open Ranks and stragglers.",
    )
    made.add(
        tile(
            q.verdict(q.of_run("run:ddpdebug_overhead_ratio:max")),
            unit="percentunit",
            decimals=1,
            steps=((None, GOOD), (0.02, NOTE), (0.05, WARN)),
            missing="not yet",
        ),
        "Overhead",
        "Time that ddpdebug itself takes, as a share of the step. Above the budget for long: lower it with "
        "--budget, or leave --every-step out.",
    )


def _agreement_tiles(made: Board) -> None:
    made.size(4, 4)
    made.add(
        tile(
            q.verdict(q.of_run("run:ddpdebug_ranks_missing:max")),
            words=[(0, "all up", GOOD)],
            steps=_ZERO_IS_GOOD,
        ),
        "Ranks missing",
        "Ranks of the run that are not there: all up, or how many are missing. If ranks are missing, look at their "
        "logs first: the others wait for them in a collective.",
    )
    parted = q.of_run("run_what:ddpdebug_ranks_disagreeing:max", 'what!="gradients"')
    made.add(
        tile(q.verdict(parted), words=[(0, "agree", GOOD)], steps=_ZERO_IS_GOOD, unit="suffix:differ"),
        "Ranks agree",
        "How many ranks differ from the largest group of equals in parameters, buffers, optimizer state, settings or "
        "modes. Not agree: the model that you train depends on the rank; open Rank agreement.",
    )
    parted = q.of_run("run_what:ddpdebug_ranks_disagreeing:max", 'what="gradients"')
    unsynced = q.of_run("run:ddpdebug_unsynchronised_steps:increase5m")
    made.add(
        tile(q.verdict(f"{parted} + ceil({unsynced})"), words=[(0, "in sync", GOOD)], steps=_ZERO_IS_GOOD),
        "Gradients",
        "In sync when all ranks step on the same gradients and every gradient went through DDP in the last 5 minutes. "
        "Otherwise look for no_sync, a bypassed wrapper or a smaller group: findings SYNC2xx.",
    )
    nonfinite = q.of_run("run:ddpdebug_nonfinite_steps:increase5m")
    made.add(
        tile(q.verdict(f"ceil({nonfinite})"), words=[(0, "finite", GOOD)], steps=_ZERO_IS_GOOD, unit="suffix:steps"),
        "Numbers",
        "Steps of the last 5 minutes in which loss or gradients were NaN or infinite on some rank, less those that a "
        "loss scaler skipped. More than none: Numerics says which rank made the first one.",
    )


def _progress_tiles(made: Board) -> None:
    made.add(
        tile(q.verdict(q.of_run("run:ddpdebug_hang_state:max")), words=WAITS, missing="not known"),
        "Waiting",
        "Whether ranks wait for another one, and what that is doing. at work: evaluation, a checkpoint, a slow batch; "
        "overdue: far longer than ever before in this run. Red is a hang: Ranks and stragglers names the missing rank "
        "and its line, ddpdebug explain HANG501 says what to do.",
    )
    since = q.of_run("run:ddpdebug_seconds_since_step:min")
    step = q.of_run("run:ddpdebug_step_seconds:mean")
    # as the alert: before a second step has ended nobody knows how long one takes
    alone = f"({since} > 1800 unless {step} > 0)"
    late, stalled = (f"(({since} > {least} and {since} > 20 * {step}) or {alone})" for least in (30, 300))
    made.add(
        graded(
            [
                (f"{since} unless {late}", "stepping", GOOD),
                (f"{late} unless {stalled}", "late", WARN),
                (stalled, "stalled", BAD),
                (f"-1 - {q.STATE} unless {since}", "ended", GOOD),
            ],
            unit="s",
            missing="no step yet",
        ),
        "Last step ago",
        "Time since the last optimizer step of any rank. Yellow: longer than 20 steps take and half a minute, as in "
        "evaluation or a checkpoint. Red: more than 5 minutes, or half an hour after the first step; Waiting says "
        "whether a rank is missing.",
    )


def _incidents(made: Board) -> None:
    made.row("Findings")
    labels = "severity, code, subject, culprits, location, incident"
    columns = {
        "severity": "Severity",
        "code": "Code",
        "subject": "What",
        "culprits": "Ranks",
        "location": "Where",
        "Value #A": "Step",
        "Value #B": "Since",
    }
    step, since = (
        f"max by ({labels}) ({q.last(q.chosen(f'run_incident:ddpdebug_incident_{what}:max'))})"
        for what in ("step", "timestamp_seconds")
    )
    panel = listing(
        [step, f"1000 * {since}"],
        names=columns,
        units={"Since": "dateTimeFromNow", "Step": "none"},
        sort="Since",
        missing="none",
        hidden=("incident",),
    )
    made.add(
        linked(worded(panel, "Severity", SEVERITIES), "see the ranks", "ddpdebug-agreement"),
        "Newest findings",
        "The newest findings of the time range, also of a run that has ended in it: what happened, on which rank, "
        "since which step. `ddpdebug explain CODE` prints likely causes and remedies, findings.jsonl in the run "
        "directory has all with their evidence.",
        width=16,
    )
    made.add(
        alerts(f'ALERTS{{{q.RUN}, alertstate="firing"}}'),
        "Firing alerts",
        "The alerts about this run that fire at the end of the time range; a click on one opens its runbook: meaning, "
        "impact, diagnosis, mitigation.",
        width=8,
    )


def _training(made: Board) -> None:
    made.row("Training")
    loss = [(q.of_run(f"run:ddpdebug_loss:{which}"), f"{name} rank") for which, name in _SPREAD]
    made.add(
        lines(loss, zero=False),
        "Loss",
        "Loss as given to backward: the highest, median and lowest rank. Ranks see different data, so a spread is "
        "normal; one rank that leaves the others is not: see Rank agreement.",
    )
    made.add(
        lines([(q.of_run(f"run:ddpdebug_grad_norm:{which}"), f"{name} rank") for which, name in _SPREAD[::2]]),
        "Gradient norm",
        "Norm of the reduced gradients before clipping, without the loss scale. After the reduction all ranks must "
        "have the same: two lines that part are unsynchronised gradients. A jump by orders of magnitude: see Numerics.",
    )
    phases, waits = "run_phase:ddpdebug_phase_seconds:mean2m", "run_kind:ddpdebug_wait_seconds:mean2m"
    backward, reduction = q.of_run(phases, 'phase="backward"'), q.of_run(waits, 'kind="reduction"')
    others = q.chosen(phases, 'phase!="backward"')
    own = [
        (f"max by (phase) ({others})", "{{phase}}"),
        (f"clamp_min({backward} - {reduction}, 0)", "backward"),
        (f"sum({q.chosen(waits)})", "waiting"),
    ]
    made.add(
        lines(own, unit="s", stacked=True),
        "Step time, own and waiting",
        "Mean over the ranks. Yellow is waiting for others and the reduction itself; the rest is a rank's own time, "
        "backward until its last gradient. A growing data part is a loader that cannot keep up; other is what lies "
        "between the phases: augmentation, copies, logs. Much waiting: see Ranks and stragglers.",
    )
    differing = f"max by (what) ({q.chosen('run_what:ddpdebug_ranks_disagreeing:max')})"
    made.add(
        states([(differing, "{{what}}")], words=AGREE, missing="no data"),
        "Agreement over time",
        "What the ranks agree on. Red begins where the first rank was outvoted; Rank agreement says which one. "
        "Nothing is drawn before the run began and after it ended.",
    )


_SPREAD = (("max", "highest"), ("median", "median"), ("min", "lowest"))
