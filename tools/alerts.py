"""The alerts: what is alarming about a run, and the words in which a person hears of it.

A build tool: no part of the package. `make rules` writes them to deploy/prometheus/rules/ddpdebug-alerts.yml, and with
the recording rules beside it into the PrometheusRule for Kubernetes. They are made here because each of them says which
ranks it is about ("rank 1 is", "ranks 1 and 2 are"), which Prometheus's templates can only say at length.

An alert is one for a run, whatever the number of its ranks: the annotations name these. What only a run that lives can
have is asked of runs of which a rank says that it runs, so that nothing fires for one that is finished or cancelled.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from textwrap import indent, wrap

#: The folder of the runbooks, with a slash at the end. The external label `ddpdebug_docs` says where docs/ is; without
#: it Prometheus serves them itself, started with `--web.user-assets=docs`.
RUNBOOKS = '{{ or $externalLabels.ddpdebug_docs (printf "%s/user/" $externalURL) }}runbooks/'
ALERTS_FILE, RECORDING_FILE = "ddpdebug-alerts.yml", "ddpdebug.yml"
_HEAD = """\
# Alerting rules for ddpdebug, made by `make rules` from tools/alerts.py. Every alert has a page in docs/runbooks/.
#
# They need the recording rules of ddpdebug.yml. Links lead to where the external label ddpdebug_docs says that docs/ is
# (with a slash at the end); without it to Prometheus itself, which serves docs/ if started with --web.user-assets=docs.
groups:
"""
_CLUSTER_HEAD = """\
# Made by `make rules` from the files of deploy/prometheus/rules/.
apiVersion: monitoring.coreos.com/v1
kind: PrometheusRule
metadata:
  name: ddpdebug
spec:
  groups:
"""
_WIDTH = 120
_BY_RUN = "max by (run_id, run)"
#: Of this run, in a query of an annotation.
_THIS = "run_id=%[1]q"
#: Not of a run whose ranks have all ended.
_ALIVE = "and on (run_id) run:ddpdebug_ranks_running:count"
#: The ranks' pages are read one after the other: until each has been, an alert cannot say which ranks it is about. What
#: is sent first is not mended before a minute has gone by.
_EACH_READ = "15s"
#: ... and then those that tell what has been found come, unless they tell the same.
_OTHERS_FIRST = "30s"


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One recording rule that only alerts need."""

    name: str
    expr: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Alert:
    """One alerting rule; in summary and description `{run}` stands for the run's name and id."""

    name: str
    expr: str
    severity: str  # critical: it is of no use to let it run on; warning: within the day; info: to be looked at
    summary: str
    description: str
    wait: str = ""  # how long it has to last
    family: str = ""  # the letters of the codes of findings about the same
    code: str = ""  # ... or the one code


# --- templates --------------------------------------------------------------------------------------------------------


def _ask(query: str, then: str, otherwise: str = "") -> str:
    """Return a template of what a query finds: `then` sees its result, `otherwise` stands for none."""
    rest = f"{{{{ else }}}}{otherwise}" if otherwise else ""
    return f"{{{{ with query (printf `{query}` $labels.run_id) }}}}{then}{rest}{{{{ end }}}}"


def _listing(label: str) -> str:
    """Return a template that lists a label of a query's result: `1`, `0, 1 and 2`, `0, 1, ... (12 in all)`."""
    value = f'{{{{ reReplaceAll "_" " " .Labels.{label} }}}}'
    comma = "{{ if $i }}{{ if eq (len (slice $all $i)) 1 }} and {{ else }}, {{ end }}{{ end }}"
    few = f"{{{{ range $i, $each := $all }}}}{comma}{{{{ with $each }}}}{value}{{{{ end }}}}{{{{ end }}}}"
    many = f"{{{{ range slice $all 0 8 }}}}{value}, {{{{ end }}}}... ({{{{ len . }}}} in all)"
    return f'{{{{ $all := sortByLabel "{label}" . }}}}{{{{ if gt (len .) 10 }}}}{many}{{{{ else }}}}{few}{{{{ end }}}}'


def _those() -> str:
    """Return a template of the ranks of a query's result: `rank 1`, `ranks 1 and 2`."""
    return "rank{{ if gt (len .) 1 }}s{{ end }} " + _listing("rank")


def _ranks(query: str, one: str, several: str, otherwise: str) -> str:
    """Return a template: `rank 1 <one>`, `ranks 1 and 2 <several>`, or `otherwise` where the query finds none."""
    verb = one if one == several else f"{{{{ if eq (len .) 1 }}}}{one}{{{{ else }}}}{several}{{{{ end }}}}"
    return _ask(query, f"{_those()} {verb}", otherwise)


#: Where a finding lies, by the labels of its incident: ` on rank 2, layers.3.weight`.
_PLACE = (
    '{{ if .Labels.culprits }} on {{ if match "^[0-9]+$" .Labels.culprits }}rank{{ else }}ranks{{ end }}'
    " {{ .Labels.culprits }}{{ end }}{{ if .Labels.subject }}, {{ .Labels.subject }}{{ end }}"
)


def _incident(codes: str, then: str) -> str:
    """Return a template of the first finding of the last hour with such a code."""
    about = f"{{{_THIS}, {codes}}}[15m]"
    recent = f"last_over_time(ddpdebug_incident_timestamp_seconds{about}) > time() - 3600"
    found = (
        f"max by (code, subject, culprits) (last_over_time(ddpdebug_incident_step{about}) and on (incident) {recent})"
    )
    text = f"{{{{ with query (printf `bottomk(1, {found})` $labels.run_id"
    text += " $labels.code" if "%[2]q" in codes else ""
    return f"{text}) }}}}{{{{ with first . }}}}{then}{{{{ end }}}}{{{{ end }}}}"


def _cause(family: str) -> str:
    """Return a template: a sentence about the first finding of a family, nothing without one."""
    step = '{{ if ge (value .) 0.0 }}, since step {{ printf "%.0f" (value .) }}{{ end }}'
    return _incident(f'code=~"{family}.*"', f" The first finding is {{{{ .Labels.code }}}}{_PLACE}{step}.")


# --- expressions ------------------------------------------------------------------------------------------------------


def _new(counter: str, labels: str) -> str:
    """Return the counts that have grown, or appeared, in the last 15 minutes, also of runs that have ended since."""
    now = f"max by ({labels}) (max_over_time({counter}[15m]))"
    before = f"max by ({labels}) (last_over_time({counter}[15m] offset 15m))"
    return f"{now} > ({before} or 0 * {now})"


def _of_rank(metric: str, matchers: str = "", test: str = "> 0") -> str:
    """Return a query of an annotation: the ranks of this run of which a metric passes the test."""
    return f"max by (rank) ({metric}{{{_THIS}{matchers}}}) {test}"


# --- the alerts -------------------------------------------------------------------------------------------------------


def rules() -> Iterator[Record | Alert]:
    """Yield the rules in the order in which they are evaluated: what has failed silences what follows from it."""
    yield from _of_the_end()
    yield from _of_the_ranks()
    yield from _of_the_numbers()
    yield from _of_the_machine()
    yield from _of_findings()


def _of_the_end() -> Iterator[Record | Alert]:
    yield Record(
        name="run:ddpdebug_ranks_running:count",
        expr="count by (run_id, run) (ddpdebug_run_state >= 1 <= 2)",
    )
    # A rank is lost that says so, that has left the exchange, or that was running when its endpoint fell silent and
    # whose target file is still there: who ends, however it ends, removes it. What was last heard counts for a quarter
    # of an hour, so that a file that nobody sweeps alarms nobody for ever.
    yield Record(
        name="run_rank:ddpdebug_lost:last15m",
        expr=(
            "max by (run_id, run, rank) ("
            "last_over_time(ddpdebug_run_state[15m]) == 5 "
            'or ((last_over_time(ddpdebug_run_state[15m]) >= 1 <= 2) and on (job, instance) (up{sd="file"} == 0)) '
            f"or ((5 - 5 * ddpdebug_rank_up) == 5 {_ALIVE})) "
            "unless on (run_id, rank) (ddpdebug_run_state >= 1 <= 2)"
        ),
    )
    ended = f"last_over_time(ddpdebug_run_end_timestamp_seconds{{{_THIS}}}[15m])"
    outcome = f'last_over_time(ddpdebug_run_outcome_info{{{_THIS}, outcome!~"clean|cancelled"}}[15m])'
    first = f"bottomk(1, max by (rank, outcome, cause) ({ended} * on (job, instance, rank) group_right () {outcome}))"
    cause = (
        "{{ with first . }}: {{ if .Labels.cause }}{{ .Labels.cause }}{{ else }}an exit code that is not 0{{ end }}"
        " on rank {{ .Labels.rank }}{{ end }}"
    )
    lost = _of_rank("run_rank:ddpdebug_lost:last15m")
    yield Alert(
        name="DdpdebugRunFailed",
        expr=(
            "(max by (run_id, run) (last_over_time(ddpdebug_run_state[15m])) == 4 "
            "unless on (run_id) run_rank:ddpdebug_lost:last15m) "
            "unless on (run_id) run:ddpdebug_ranks_running:count"
        ),
        wait="30s",
        severity="critical",
        summary="{run} has failed" + _ask(first, cause),
        description=(
            "{run} has ended with an error"
            + _ask(first, cause)
            + ". The other ranks may have failed because this one did."
            + _cause("[A-Z]+")
        ),
    )
    yield Alert(
        name="DdpdebugRunLost",
        expr=(
            "count by (run_id, run) (run_rank:ddpdebug_lost:last15m) "
            "unless on (run_id) run:ddpdebug_ranks_running:count"
        ),
        wait="1m",  # a directory is read anew every half minute where nobody tells Prometheus of a change
        severity="critical",
        summary="{run} is lost: " + _ranks(lost, "has", "have", "its ranks have") + " ended without a word",
        description=(
            "No rank of {run} answers any more, and "
            + _ranks(lost, "has", "have", "its ranks have")
            + " not said why: killed, perhaps for want of memory, on a node that is gone, or stopped, where no other"
            " rank serves metrics." + _cause("[A-Z]+")
        ),
    )


def _of_the_ranks() -> Iterator[Alert]:
    lost = _of_rank("run_rank:ddpdebug_lost:last15m")
    yield Alert(
        name="DdpdebugRanksMissing",
        expr=f"count by (run_id, run) (run_rank:ddpdebug_lost:last15m) {_ALIVE}",
        wait="1m",
        severity="critical",
        summary=_ranks(lost, "is", "are", "a rank is") + " missing from {run}",
        description=(
            "For a minute, "
            + _ranks(lost, "of {run} does not answer or has", "of {run} do not answer or have", "a rank of {run} has")
            + " left the exchange. The others wait in their next collective."
        ),
    )
    yield _hang()
    outvoted = _of_rank("ddpdebug_rank_outvoted", ', what!="gradients"')
    everyone = f"count({outvoted}) == scalar(max(ddpdebug_world_size{{{_THIS}}})) > 1"
    what = _ask(f'max by (what) (ddpdebug_ranks_disagreeing{{{_THIS}, what!="gradients"}}) > 0', _listing("what"))
    yield Alert(
        name="DdpdebugRanksDisagree",
        expr=f'max by (run_id, run) (ddpdebug_ranks_disagreeing{{what!="gradients"}}) > 0 {_ALIVE}',
        wait=_EACH_READ,
        severity="critical",
        family="RANK",
        summary=_ask(
            everyone,
            "the ranks of {run} differ",
            _ranks(outvoted, "of {run} differs", "of {run} differ", "ranks of {run} differ"),
        )
        + f" in {what}",
        description=_ask(
            everyone,
            "No group of equal ranks of {run} is the largest: it is not known which ranks are wrong.",
            "In {run} "
            + _ranks(outvoted, "is", "are", "ranks are")
            + " not like the largest group of equal ranks, and no longer the same model as the others.",
        )
        + f" What differs: {what}."
        + _cause("RANK"),
    )
    own = (
        f"max by (rank) (increase(ddpdebug_unsynchronised_steps_total{{{_THIS}}}[5m])) > 0"
        f' or max by (rank) (ddpdebug_rank_outvoted{{{_THIS}, what="gradients"}}) > 0'
    )
    yield Alert(
        name="DdpdebugUnsynchronisedGradients",
        expr=(
            '(max by (run_id, run) (ddpdebug_ranks_disagreeing{what="gradients"}) > 0 '
            f"or max by (run_id, run) (increase(ddpdebug_unsynchronised_steps_total[5m])) > 0) {_ALIVE}"
        ),
        wait=_EACH_READ,
        severity="critical",
        family="SYNC",
        summary=_ranks(own, "of {run} steps", "of {run} step", "ranks of {run} step")
        + " on gradients that are not synchronised",
        description="In {run} "
        + _ranks(own, "steps", "step", "ranks step")
        + " on gradients that the ranks do not share, or that no DDP has reduced."
        + _cause("SYNC"),
    )
    # the first step tells nothing of how long others take: before one more has ended half an hour is too long
    since, timed = "run:ddpdebug_seconds_since_step:min", "run:ddpdebug_step_seconds:mean > 0"
    behind = f"max by (rank) (ddpdebug_step{{{_THIS}}}) < scalar(max(ddpdebug_step{{{_THIS}}}))"
    yield Alert(
        name="DdpdebugStalled",
        expr=(
            f"(({since} > 300 and {since} > 20 * run:ddpdebug_step_seconds:mean) "
            f"or ({since} > 1800 unless on (run_id) {timed})) {_ALIVE}"
        ),
        severity="critical",
        summary="{run} has not stepped for {{ humanizeDuration $value }}",
        description=(
            "No rank of {run} has finished a step for {{ humanizeDuration $value }}"
            + _ask(
                f"run:ddpdebug_step_seconds:mean{{{_THIS}}} > 0",
                ", more than 20 of its steps take",
                ", since its first one",
            )
            + ", although its endpoints answer: "
            + _ranks(behind, "is", "are", "no rank is")
            + " behind the others."
        ),
    )
    # of very many ranks the times of most are those of few steps: who costs most is known in each step
    many = f'on (run_id) ddpdebug_all_ranks_mean_straggler_cost_seconds{{{_THIS}, stat="max"}}'
    works = (
        f"run_rank:ddpdebug_straggler_cost:worst5m{{{_THIS}}} > 0.1 and {many} or "
        f"run_rank:ddpdebug_own_seconds:mean5m{{{_THIS}}} - scalar(run:ddpdebug_own_seconds:usual5m{{{_THIS}}}) "
        f"> 0.1 * scalar(run:ddpdebug_step_seconds:mean5m{{{_THIS}}}) unless {many}"
    )
    steps = f"max by (rank) (rate(ddpdebug_step_seconds_count{{{_THIS}}}[5m])) > 0"
    each = f"sum by (rank, phase) (rate(ddpdebug_own_seconds_total{{{_THIS}}}[5m])) / on (rank) group_left () ({steps})"
    slowest = f"on (rank) topk(1, {works})"
    usual = f"quantile by (phase) (0.5, {each} unless {slowest})"
    phase = f"topk(1, ({each} and {slowest}) - on (phase) group_left () {usual}) > 0"
    share = f"run_rank:ddpdebug_straggler_cost:worst5m{{{_THIS}}} > 0.01"
    yield Alert(
        name="DdpdebugStraggler",
        expr=f"run:ddpdebug_straggler:ratio > 0.1 {_ALIVE}",
        wait="10m",
        severity="warning",
        code="SLOW601",
        summary=_ranks(works, "slows", "slow", "a rank slows") + " down {run}" + _ask(phase, _IN_PHASE),
        description=(
            "For 10 minutes, "
            + _ranks(works, "of {run} works", "of {run} work", "a rank of {run} works")
            + " longer by itself than "
            + _ask(many.removeprefix("on (run_id) "), "any other", "the median of the others")
            + ", by up to {{ humanizePercentage $value }} of a step"
            + _ask(phase, ", most of it" + _IN_PHASE)
            + ". All others wait."
            + _ask(share, _COSTS)
            + _cause("SLOW601")
        ),
    )


#: The phase of a query's result; what its rank costs, and has cost: ` Rank 2 costs 12% of each step, 3m 6s so far.`
_IN_PHASE = "{{ with first . }} in {{ .Labels.phase }}{{ end }}"
_COSTS = (
    "{{ with first . }} Rank {{ .Labels.rank }} costs {{ humanizePercentage (value .) }} of each step"
    "{{ with query (printf `max(ddpdebug_straggler_cost_seconds_total{run_id=%[1]q, rank=%[2]q})` $labels.run_id"
    " .Labels.rank) }}, {{ humanizeDuration (. | first | value) }} so far{{ end }}.{{ end }}"
)


def _hang() -> Alert:
    """Return the alert of a hang; one that ends by itself, or with its run, within half a minute wakes nobody."""
    of_this = f"{{{_THIS}}} >= 3"
    renamed = f'max by (rank) (label_replace(ddpdebug_missing_rank{of_this}, "rank", "$1", "missing", "(.*)"))'
    place = _ask(
        f"max by (phase, location) (ddpdebug_missing_rank{of_this})",
        "{{ with first . }}{{ if .Labels.phase }} in {{ .Labels.phase }}{{ end }}"
        "{{ if .Labels.location }} at {{ .Labels.location }}{{ end }}{{ end }}",
    )
    waits = _ask(
        f"max(run:ddpdebug_waiting_seconds:max{{{_THIS}}}) > 0", " for {{ humanizeDuration (. | first | value) }}"
    )
    words = _ask(renamed, f"{_those()} {_by_state(_HANGS)}", _by_state(_HANGS))
    return Alert(
        name="DdpdebugHang",
        expr=f"run:ddpdebug_hang_state:max >= 3 {_ALIVE}",
        wait="30s",
        severity="critical",
        family="HANG",
        summary="{run} hangs: " + words + place,
        description=(
            "The ranks of {run} have waited"
            + waits
            + ": "
            + words
            + place
            + ". It will not end by itself."
            + _cause("HANG")
        ),
    )


#: State of `ddpdebug_hang_state` -> words, after the ranks that are meant.
_HANGS = {
    3: "not moving",
    4: "without a sign of life",
    5: "in different calls, or in a circle",
    6: "gone, while others wait",
}


def _by_state(words: dict[int, str]) -> str:
    """Return a template of words by the alert's value."""
    first, *rest = words.items()
    cases = f"{{{{ if eq $value {first[0]}.0 }}}}{first[1]}"
    cases += "".join(f"{{{{ else if eq $value {value}.0 }}}}{text}" for value, text in rest)
    return f"{cases}{{{{ end }}}}"


def _of_the_numbers() -> Iterator[Alert]:
    origin = _of_rank("ddpdebug_nonfinite_origin")
    what = _ask(f"run_what:ddpdebug_nonfinite_steps:increase5m{{{_THIS}}} > 0", _listing("what"))
    yield Alert(
        name="DdpdebugNonfinite",
        expr=(
            "max by (run_id, run) (increase(ddpdebug_nonfinite_steps_total[5m])) "
            f"> 0.5 + max by (run_id, run) (increase(ddpdebug_skipped_steps_total[5m])) {_ALIVE}"
        ),
        wait=_EACH_READ,
        severity="critical",
        family="NUM",
        summary="NaN or infinity in {run}" + _ask(origin, ", first on " + _those()),
        description=(
            'In {run} these were NaN or infinite in about {{ printf "%.0f" $value }} of the steps of the last'
            " 5 minutes, more than the loss scaler has skipped: " + what + "." + _cause("NUM")
        ),
    )
    skipped = "max by (run_id, run) (rate(ddpdebug_skipped_steps_total[15m])) / run:ddpdebug_steps:rate15m > 0.5"
    yield Alert(
        name="DdpdebugScalerCollapse",
        expr=f"(max by (run_id, run) (ddpdebug_loss_scale) < 1 or {skipped}) {_ALIVE}",
        wait="10m",
        severity="critical",
        summary="the loss scaler of {run} has collapsed",
        description=(
            "For 10 minutes the loss scale of {run} has been below 1, or more than half of its steps have been"
            " skipped: hardly anything is learned any more." + _cause("NUM")
        ),
    )
    yield Alert(
        name="DdpdebugClipRate",
        expr=(
            "max by (run_id, run) (rate(ddpdebug_clipped_steps_total[15m])) / run:ddpdebug_steps:rate15m > 0.95 "
            f"{_ALIVE}"
        ),
        wait="30m",
        severity="warning",
        summary="nearly every step of {run} is clipped",
        description=(
            "For half an hour {{ humanizePercentage $value }} of the steps of {run} have been clipped: the learning"
            " rate is in effect smaller than set."
        ),
    )


def _of_the_machine() -> Iterator[Alert]:
    each = f"ddpdebug_memory_full_seconds{{{_THIS}}}"
    of_all = f'ddpdebug_all_ranks_memory_full_seconds{{{_THIS}, stat="min"}}'  # also of ranks that are not shown apart
    soon = f"min by (rank) ({each}) < 1800"
    yield Alert(
        name="DdpdebugMemoryExhaustion",
        expr=f"run:ddpdebug_memory_full_seconds:min < 1800 {_ALIVE}",
        wait="1m",
        severity="warning",
        summary=_ranks(soon, "of {run} runs", "of {run} run", "a rank of {run} runs")
        + " out of memory in {{ humanizeDuration $value }}",
        description=(
            "At its present growth, which has been steady for a minute or more, the memory of "
            + _ranks(soon, "of {run} is", "of {run} is", "a rank of {run} is")
            + " full in {{ humanizeDuration $value }} or little later ("
            + _ask(f"min by (kind) ({each} or {of_all}) < 1800", _listing("kind"))
            + ")."
        ),
    )
    share = "{{ humanizePercentage $value }}"
    yield Alert(
        name="DdpdebugOverhead",
        expr=(f"run:ddpdebug_overhead_ratio:max > 2 * max by (run_id, run) (ddpdebug_overhead_budget_ratio) {_ALIVE}"),
        wait="15m",
        severity="warning",
        summary=f"ddpdebug takes {share} of the time of {{run}}",
        description=f"For 15 minutes ddpdebug has taken {share} of the time of {{run}}, more than twice its budget.",
    )
    parts = f"max by (part) (ddpdebug_checks_off{{{_THIS}}}) > 0"
    yield Alert(
        name="DdpdebugNotChecked",
        expr=f"min by (run_id, run) (ddpdebug_coverage_complete) == 0 {_ALIVE}",
        wait="2m",
        severity="warning",
        summary="{run} is not checked in full" + _ask(parts, ": " + _listing("part") + " missing"),
        description=(
            "Something that ddpdebug normally checks is not checked in {run}"
            + _ask(parts, " (" + _listing("part") + ")")
            + ": having no findings does not mean that it is healthy. Where no ranks are compared, nobody would see"
            " them part."
        ),
    )
    failed = _new(f"ddpdebug_internal_errors_total{{{_THIS}}}", "rank")
    yield Alert(
        name="DdpdebugInternalError",
        expr=f"{_BY_RUN} ({_new('ddpdebug_internal_errors_total', 'run_id, run, rank')}) {_ALIVE}",
        severity="warning",
        summary="a part of ddpdebug has switched itself off on " + _ask(failed, _those(), "a rank") + " of {run}",
        description=(
            "A part of ddpdebug has failed in {run} and switched itself off on "
            + _ask(failed, _those(), "a rank")
            + "; the job goes on, but something is no longer checked."
        ),
    )


def _of_findings() -> Iterator[Alert]:
    """Yield the alerts that tell of findings that no alert above has told of in other words."""
    told = 'max_over_time(ALERTS{alertstate="firing", alertname=~"%s"}[15m])'
    others = "Ddpdebug(Nonfinite|RanksDisagree|UnsynchronisedGradients)"
    # what is about to be told as well: rules may be evaluated once a minute only, and then all that wait come together
    specific = f'({told % others} or ALERTS{{alertstate="pending", alertname=~"{others}"}})'
    slow = told % "DdpdebugStraggler"
    over = told % "DdpdebugRun(Failed|Lost)"
    words = {
        "critical": "it makes the run wrong or dead from that step on",
        "error": "it makes the run wrong in part",
        "warning": "a person should look at it",
    }
    for severity, alarm in (("critical", "critical"), ("error", "warning"), ("warning", "info")):
        every = f'severity="{severity}", code!=""'
        grown = _new(f"ddpdebug_findings_total{{{every}}}", "run_id, run, code")
        # what a rank has failed with is told as the end of the run, unless others go on; a hang by an alert of its own
        if severity == "critical":
            own, failed = f'{every}, code!~"(FAIL|HANG).*"', f'{every}, code=~"FAIL.*"'
            grown, late = (_new(f"ddpdebug_findings_total{{{which}}}", "run_id, run, code") for which in (own, failed))
            grown = f"({grown} or {late} and on (run_id) run:ddpdebug_ranks_running:count)"
        if severity == "warning":  # that ranks have waited for long is nothing to look at once they go on
            own, hangs = f'{every}, code!~"HANG.*"', f'{every}, code=~"HANG.*"'
            grown, waits = (_new(f"ddpdebug_findings_total{{{which}}}", "run_id, run, code") for which in (own, hangs))
            grown = f"({grown} or {waits} and on (run_id) run:ddpdebug_hang_state:max >= 2)"
        expr = f'label_replace({grown}, "family", "$1", "code", "([A-Z]+).*")'
        if severity == "critical":
            expr += f" unless on (run_id, family) {specific} unless on (run_id) {over}"
        if severity == "warning":
            expr += f" unless on (run_id, code) {slow}"
        place = _incident("code=%[2]q", _PLACE)
        yield Alert(
            name=f"DdpdebugFinding{severity.title()}",
            expr=expr,
            wait=_OTHERS_FIRST,
            severity=alarm,
            summary="{{ $labels.code }} in {run}" + place,
            description=(
                "ddpdebug has found {{ $labels.code }} in {run}" + place + f": {words[severity]}."
                " `ddpdebug explain {{ $labels.code }}` says what it means and what to do."
            ),
        )


# --- the files --------------------------------------------------------------------------------------------------------


def alerting_text() -> str:
    """Return the file of the alerts for Prometheus."""
    parts = ["  - name: ddpdebug-alerts\n    rules:\n"]
    for rule in rules():
        fields = _record(rule) if isinstance(rule, Record) else _alert(rule)
        first, *rest = (line for key, value in fields for line in _field(key, value))
        parts.append(indent("\n".join([f"- {first}", *(f"  {line}" for line in rest)]), " " * 6) + "\n")
    return _HEAD + "\n".join(parts).replace("rules:\n\n", "rules:\n")


def cluster_text(*files: str) -> str:
    """Return the PrometheusRule for Kubernetes with the groups of the files for Prometheus, where the comments are."""
    groups = [re.sub(r"(?m)^ *#.*\n", "", text.partition("\ngroups:\n")[2]) for text in files]
    return _CLUSTER_HEAD + indent("\n".join(groups), "  ")


def _record(rule: Record) -> list[tuple[str, str]]:
    return [("record", rule.name), ("expr", rule.expr)]


def _alert(rule: Alert) -> list[tuple[str, str]]:
    name = "{{ $labels.run }} ({{ $labels.run_id }})"
    summary, description = (text.replace("{run}", f"run {name}") for text in (rule.summary, rule.description))
    fields = [("alert", rule.name), ("expr", rule.expr)]
    fields += [("for", rule.wait)] if rule.wait else []
    fields += [("labels", ""), ("  severity", rule.severity)]
    fields += [("  family", rule.family)] if rule.family else []
    fields += [("  code", rule.code)] if rule.code else []
    fields += [("annotations", ""), ("  summary", summary), ("  description", description)]
    return [*fields, ("  runbook_url", f"{RUNBOOKS}{rule.name}.md")]


def _field(key: str, value: str) -> Iterator[str]:
    """Yield the lines of a key and its value; what is no plain word is folded."""
    if not value or value.replace(":", "").replace("_", "").isalnum():
        yield f"{key}: {value}".rstrip()
        return
    yield f"{key}: >-"
    margin = " " * (len(key) - len(key.lstrip()) + 2)
    yield from (margin + line for line in wrap(value, _WIDTH - 10, break_long_words=False, break_on_hyphens=False))


def main(folder: Path, cluster: Path) -> None:
    """Write the alerts beside the recording rules of the folder, and all of them for the cluster."""
    alerts = alerting_text()
    (folder / ALERTS_FILE).write_text(alerts, encoding="utf-8")
    recording = (folder / RECORDING_FILE).read_text(encoding="utf-8")
    cluster.write_text(cluster_text(recording, alerts), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
