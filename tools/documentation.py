"""Writes the reference pages of `docs/` from the code, so that they cannot say anything else.

A build tool: no part of the package. Torch is loaded for patches.md alone.

`make docs` calls it as `python tools/documentation.py docs/findings.md docs/metrics.md docs/options.md
docs/patches.md docs/thresholds.md`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, count, groupby
from pathlib import Path
from typing import Any

from ddpdebug.commands.explain import Page, pages
from ddpdebug.config.settings import Config, options
from ddpdebug.detectors.catalog import FAMILIES
from ddpdebug.detectors.thresholds import readers, thresholds
from ddpdebug.errors import UsageError
from ddpdebug.schema.coverage import Coverage
from ddpdebug.schema.finding import Finding, Severity
from ddpdebug.schema.row import Row
from ddpdebug.schema.step import Step
from ddpdebug.sinks import Covered, FindingRaised, RunStarted, Saved, StepJudged
from ddpdebug.sinks.prometheus.exporter import SERIES, SERIES_OF_ALL, SERIES_WITH_FINDINGS, PrometheusSink
from ddpdebug.sinks.prometheus.many import EVERY_RANK, EXTREMES, PREFIX, SHOWN, STATISTICS
from ddpdebug.sinks.prometheus.metrics import GAUGES, LAYER_NAMES, PHASES, SLOTS

_SUFFIXES = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count"), "summary": ("_sum", "_count")}
#: Labels with few fixed values, which are listed.
_LISTED_LABELS = ("what", "phase", "kind")

_FINDINGS_HEAD = """\
# Findings

Every problem that ddpdebug reports has a stable code. This page is made from the code by `make docs`;
`ddpdebug explain CODE` prints the same.

Severities: `critical` (the run is wrong or dead from this step on), `error` (wrong in part), `warning` (a person should
look), `info` (worth knowing; never fails a check).

**Detected** codes are raised by this version, those marked `preflight` by `ddpdebug preflight` and not while training.
**Planned** ones are not: their rules do not exist yet, and a run without them says nothing about them."""

_METRICS_HEAD = f"""\
# Metrics

What the Prometheus endpoint serves (`--metrics`, see [options.md](options.md)). This page is made from the code by
`make docs`.

`rank` is the rank that reports. What all ranks know alike is aggregated with `max`, not with `sum`, and without `rank`
and `instance`. Findings, incidents, disagreement and the steps apart are reported by two ranks only, the lowest and the
highest of those that take part; by every rank once they can no longer talk. With several optimizers, loss, norms, rates
and times are those of the one that has stepped most.

The number of series does not depend on the model: a rank has at most {SERIES} before anything is found, a GPU's
included, and at most {SERIES_WITH_FINDINGS} whatever is found (the counter of a code appears with its first finding).

Names of layers stand in the five newest incidents, and in the label `layer` of the `ddpdebug_layer_*` metrics. Each of
those has {SLOTS} slots; a layer keeps its slot until another one's value is a quarter larger, and after {LAYER_NAMES}
names in a run further layers are called `other`: a run of any length has at most {LAYER_NAMES} series of each, and
{SLOTS} called `other`.

`ddpdebug_render_timestamp_seconds` says how old an answer is.

[monitoring.md](monitoring.md) shows how to join `gpu_uuid` with the GPU's own metrics.

Besides the labels in the table every series has these two, each with one value per process, so that there are no more
series for it and no join is needed:

- `run_id`: six hexadecimal digits, another one for each run. A run that is started again on the same port has series of
  its own and inherits no counter.
- `run`: the name for people: `--name`, else the name of the script; letters, digits, `_`, `.` and `-`, 64 at most. Runs
  of the same script share it.

## The state of a run

`ddpdebug_run_state` is one number per process. The codes are fixed, and ordered so that the largest of a run's ranks is
the state of the run: `max by (run_id, run) (ddpdebug_run_state)`.

- **0 finished**: the script came to its end; `ddpdebug_run_outcome_info` says whether with findings.
- **1 running**: it runs, and nothing at `error` or above is current.
- **2 ill**: it runs, and a finding at `error` or `critical` is current: it was seen in the last 1000 steps, or is of a
  kind that is told only once.
- **3 cancelled**: somebody asked it to end, by SIGTERM, SIGINT (Ctrl-C) or SIGHUP, also one that a handler of the
  script turned into exit status 128 + n.
- **4 failed**: the script raised or left with another exit status than 0, or a finding ended it (`--guard stop`,
  `--on-finding raise`).
- **5 lost**: it was killed, or left without a word.

A process that has ended is served for some seconds more ([monitoring.md](monitoring.md#runs-that-have-ended)), where
`--sd-dir` or `--metrics-port` is given: its state, `ddpdebug_run_outcome_info` (`outcome` is `clean`, `findings`,
`failed`, `cancelled` or `lost`; `cause` a finding's code, an exception's type or a signal), the time of its end,
incidents, and all counters. Gauges of steps are gone then: nothing is served as if it were alive. After that the target
goes away, and its series end. So ask for what was last seen in a range, which also bounds how long it is told:

- state of each run, ended ones included: `max by (run_id, run) (last_over_time(ddpdebug_run_state[$__range]))`
- seconds since a run was last seen, the heartbeat: `time() - max by (run_id, run) (timestamp(ddpdebug_run_state))`; a
  run of which nothing answers any more is in `last_over_time(ddpdebug_run_state[15m])` and not in `ddpdebug_run_state`.
- failed or lost in the last quarter of an hour: `max by (run_id, run) (last_over_time(ddpdebug_run_state[15m])) >= 4`
- ranks that are listed, do not answer, and told of no end (a node that lost power), for a quarter of an hour:
  `(last_over_time(ddpdebug_run_state[15m]) > 0) < 3 and on (job, instance) up == 0`. A target that is no longer listed
  is no evidence: it may have ended in order where nothing can linger (a step of Slurm).
- the findings of ended runs: `last_over_time(ddpdebug_incident_step[$__range])`, and by severity
  `max by (run_id, run, severity) (max_over_time(ddpdebug_findings_total[$__range]))`

Targets carry the label `sd="file"` (or none), never `run_id`: what `up` says is of an address, and the expression above
says whose that was.

## What ranks wait for

`ddpdebug_waiting_seconds` says of each rank for how long it has been waiting for others in the call that it is in, from
one second on; it is 0 while the rank goes on. What that comes to is `ddpdebug_hang_state`, the largest of what the
ranks say: `max by (run_id, run) (ddpdebug_hang_state)`. From 3 on it is a hang ([hangs.md](hangs.md)).

- **0 none**: nobody waits, or for less than ten seconds, or it is too early to say.
- **1 at work**: the rank that is waited for is at work: evaluation, a checkpoint, a slow batch.
- **2 overdue**: the same, for a minute and ten times longer than ever before in this run (HANG501, a warning).
- **3 stuck**: nothing moves in it (HANG501).
- **4 silent**: its interpreter gives no sign of life (HANG501).
- **5 apart**: the ranks wait in different calls, or in a circle (HANG502).
- **6 left**: it has ended (HANG503).

While it is not 0, `ddpdebug_missing_rank` has a series for each rank that is waited for, eight at most: the label
`missing` is that rank, `phase` and `location` are where it was when this was found, the value is that of
`ddpdebug_hang_state`. Both go back, and its series end, when the ranks go on. They are told by the two ranks that tell
findings, and by a rank that cannot tell the others. What was told last counts for half a minute.

A rank whose interpreter does not run serves nothing: that it is silent is told by another one. Where rank 0 alone
serves (`--metrics rank0`) and is itself silent, only `up` shows it, and the finding in `ranks/<rank>/findings.jsonl`.

## Own time, waiting, and what slow ranks cost

The ranks of a job step together: how long a step takes says nothing about which of them is slow. So each step is
parted into what was a rank's own (`ddpdebug_own_seconds_total`, by phase: `data`, `forward`, `backward` until the
rank's last gradient, `optimizer`, and `other`, which is what lies between) and what it waited for others or exchanged
data with them (`ddpdebug_wait_seconds_total`). `ddpdebug_phase_seconds` has the phases as the script sees them, with
all of backward: they differ in backward only.

The first step of each optimizer, which has the start of the script and the compilation in it, counts in none of these
times.

- own time of a step, by rank: `sum by (run_id, run, rank) (rate(ddpdebug_own_seconds_total[5m])) / max by (run_id, run,
  rank) (rate(ddpdebug_step_seconds_count[5m]))`
- what a rank costs, as a share of the time of the run's steps: `rate(ddpdebug_straggler_cost_seconds_total[5m]) / on
  (run_id, run) group_left () max by (run_id, run) (rate(ddpdebug_step_seconds_sum[5m]))`. Where rank 0 speaks for many,
  the cost counts in every step, and the time in every step of rank 0 only: by its own time a rank would cost too much
- the share that waits for the loader: `rate(ddpdebug_phase_seconds_sum{{phase="data"}}[5m]) / ignoring (phase)
  rate(ddpdebug_step_seconds_sum[5m])`

A step would be shorter without its slowest rank by the difference to the next one: that is what the slowest costs, and
the others cost nothing in that step. **Somebody is last in every step**, so noise costs something in a healthy run too,
and the more so the more ranks there are. A rank that is slow is one that costs much more than the others; where ranks
cost about the same, being last goes by turns, as with batches of uneven length. Two ranks that are equally slow cost
next to nothing, for repairing one of them would change nothing: their own time is above the median all the same.

## All metrics"""

_MANY_HEAD = f"""\
## Large worlds behind one endpoint

With `--metrics rank0` rank 0 speaks for all. Up to {EVERY_RANK} ranks each one has the series above. In a larger world
there are at most {SERIES_OF_ALL} series and `ddpdebug_rank_up` of every rank:

- **Aggregates over all ranks**, in the table below: a gauge `{PREFIX}...` for each metric of single ranks, with its
  other labels and `stat` ({", ".join(STATISTICS)}; p05, p50 and p95 are percentiles, the values of ranks). A rank
  whose value is NaN does not count, and what no rank knows is absent. Those of counters only grow, so `rate()` and
  `increase()` work on them. They have no label `rank`, and no name that a metric of single ranks has.
- **Who holds an extreme**: `{EXTREMES}` has the rank as its value, with the labels `metric` (the name without
  `ddpdebug_`), `of` (the value of the metric's other label, where it has one) and `stat` (min, max). For example
  `{EXTREMES}{{metric="mean_own_seconds", stat="max"}}` is the rank that the others wait for, and
  `{EXTREMES}{{metric="mean_straggler_cost_seconds", stat="max"}}` the one that has cost most of late.
- **The series of {SHOWN} ranks and rank 0**: first those that are ill (ranks that others wait for, culprits of the five
  newest findings, those that have left, were outvoted, or met numbers that are not finite), then those that cost
  most, the slowest and those with the fullest memory. Who is shown stays for ten minutes at least, unless someone ill
  needs the place, so that series do not come and go: in ten minutes at most {SHOWN} ranks are new for either reason.
  What more than half of the ranks have is no reason.

`/metrics?detail=all` has the series of every rank instead, at any time and without a restart (in a scrape
configuration `params: {{detail: [all]}}`); its rendering has a budget of its own.

Of more than {EVERY_RANK} ranks most steps are known by the rows of some (`docs/decisions/033-many-ranks.md`): of
each kind of ranks the lowest, and those that are first in something. Steps and events are counted for all that
took them. Gauges of the other ranks are those of their newest row, once a minute at least, so that an aggregate
is one of the last minute. Times of a rank are sums over the steps of which the rows of all have come, for in the
others its row is only there because it was slow; what it has cost is counted in all. What a node's ranks use of
its memory together is only known where all their rows are, so that
`ddpdebug_memory_full_seconds` may be absent for the host."""

_OPTIONS_HEAD = """\
# Options

One set of options, named alike everywhere: `--every-step` on the command line is `every_step=True` for
`ddpdebug.watch`, `DDPDEBUG_EVERY_STEP=1` in the environment and `every_step = true` under `[tool.ddpdebug]` in
pyproject.toml. The strongest source first: command line or call, environment, pyproject.toml, default. A wrong name or
value is an error before any training starts. Switches have an opposite: `--no-every-step`.

This page is made from the code by `make docs`."""


_THRESHOLDS_HEAD = """\
# Thresholds

Every number that rules judge by, their windows and warm-ups included. Adjust one with `--threshold NAME=VALUE`, which
may be repeated, or in pyproject.toml:

```toml
[tool.ddpdebug.threshold]
dead_share = 0.7
```

A name that is not in the table is an error before any training starts. A source that begins with "chosen" is a
judgement; the others are measurements, calculations, arguments or cited figures. The losses of at most 512 steps are
kept: a window is never longer.

Nothing is said twice. Beyond the steps or samples in a row that the table asks for, a finding stays open until what it
is about has been gone for 3 steps, twice as long each time it comes back; back soon after, it is the same finding.

Not in the table: what rounding alone may do (SYNC204, SYNC206), which follows from the format of the numbers, and how
often a probe must have seen something in the training loop before it tells (three forwards are an
evaluation, four labels say something about a batch, a scheduler of forty steps was never stepped, a model of which more
than half is frozen is mostly frozen).

This page is made from the rules by `make docs`; [health.md](health.md) says what is
measured."""


_PATCHES_HEAD = """\
# What is patched

While a monitor is open there are looks in the code of these functions, which stay the same objects
([decision 45](decisions/045-looks-in-the-code.md)). All of it is registered in `ddpdebug/probes/entries.py`; what to
look at stands in `ddpdebug/instrument/patches.py`. `ddpdebug doctor --verbose` says what is in place on a machine, and
what somebody else has wrapped. This page is made by `make docs` from a real attaching."""

_PATCHES_MORE = "Nothing is put on models and on the classes of the script's own."


def findings_page() -> str:
    """Return docs/findings.md: every code by family, with its runbook where a rule detects it."""
    known = list(pages().values())
    families = {name: list(group) for name, group in groupby(known, key=lambda page: page.code.rstrip("0123456789"))}
    ordered = {name: families.pop(name) for name in FAMILIES}
    assert not families, f"families without a title: {sorted(families)}"
    parts = [_FINDINGS_HEAD, _table(("family", "", "detected", "planned"), _family_rows(ordered))]
    for name, group in ordered.items():
        parts.append(f"## {name}: {FAMILIES[name]}")
        parts.append(_table(("code", "severity", "", ""), map(_code_row, group)))
        parts += map(_section, group)
    return "\n\n".join(parts) + "\n"


def metrics_page() -> str:
    """Return docs/metrics.md: every metric that the endpoint can serve."""
    head = ("metric", "type", "labels", "meaning")
    many = (row for row in _metric_rows(EVERY_RANK + 1) if row[0].startswith((f"`{PREFIX}", f"`{EXTREMES}`")))
    return "\n\n".join((_METRICS_HEAD, _table(head, _metric_rows(2)), _MANY_HEAD, _table(head, many))) + "\n"


def _metric_rows(world: int) -> Iterator[tuple[str, ...]]:
    metric: Any
    for metric in _example_sink(world).collect():
        names = " ".join(f"`{metric.name}{suffix}`" for suffix in _SUFFIXES.get(metric.type, ("",)))
        labels: tuple[str, ...] = getattr(metric, "_labelnames", ())  # also of a metric that has no sample yet
        values = {name: {sample.labels[name]: None for sample in metric.samples} for name in labels}
        listed = [name for name in labels if name in _LISTED_LABELS and values[name]]
        shown = [f"`{name}` ({', '.join(values[name])})" if name in listed else f"`{name}`" for name in labels]
        yield names, metric.type, ", ".join(shown), metric.documentation


def metric_names() -> set[str]:
    """Return the name of every series that the endpoint can serve."""
    suffixes = {**_SUFFIXES, "gauge": ("",)}
    found = chain(_example_sink(2).collect(), _example_sink(EVERY_RANK + 1).collect())
    return {f"{metric.name}{suffix}" for metric in found for suffix in suffixes[metric.type]}


def options_page() -> str:
    """Return docs/options.md: every option with its values and default."""
    rows = []
    for option in options():
        default = Config.__dataclass_fields__[option.name].default
        shown = "" if default is None else f"`{str(default).lower() if option.switch else default}`"
        rows.append((f"`{option.flag}`", option.valid, shown, ", ".join(option.commands), option.help))
    return f"{_OPTIONS_HEAD}\n\n{_table(('option', 'values', 'default', 'commands', 'meaning'), rows)}\n"


def thresholds_page() -> str:
    """Return docs/thresholds.md: every threshold with its source."""
    rows = [
        (f"`{t.name}`", f"{t.value:g}", t.meaning, t.source, ", ".join(readers(t.name))) for t in thresholds().values()
    ]
    return f"{_THRESHOLDS_HEAD}\n\n{_table(('threshold', 'default', 'meaning', 'source', 'codes'), rows)}\n"


def patches_page() -> str:
    """Return docs/patches.md: what is wrapped while ddpdebug is attached, from an attaching to this process."""
    from ddpdebug.monitor.doctor import attach_and_detach  # noqa: PLC0415 - loads torch
    from ddpdebug.probes.entries import PASSING  # noqa: PLC0415 - loads torch

    rows: dict[tuple[str, str], list[str]] = {}
    for wrapper in attach_and_detach().wrappers:
        parts = wrapper.where.split(".")
        known = [n for n in range(1, len(parts)) if ".".join(parts[:n]) in sys.modules]
        module, name = ".".join(parts[: max(known, default=0)]), ".".join(parts[max(known, default=0) :])
        rows.setdefault((module, wrapper.why), []).append(name)
    lasting = [
        (f"`{module}`: {', '.join(f'`{name}`' for name in names)}" if module else names[0], why)
        for (module, why), names in rows.items()
    ]
    passing = [*PASSING.values()]
    parts = [_PATCHES_HEAD, _table(("where", "for"), lasting), _PATCHES_MORE, "For a time, or for one object:"]
    return "\n\n".join([*parts, _table(("what", "when"), passing)]) + "\n"


#: Each page by the name of its file.
PAGES: Mapping[str, Callable[[], str]] = {
    "findings.md": findings_page,
    "metrics.md": metrics_page,
    "options.md": options_page,
    "patches.md": patches_page,
    "thresholds.md": thresholds_page,
}


def _family_rows(families: Mapping[str, Sequence[Page]]) -> Iterator[tuple[str, ...]]:
    for name, group in families.items():
        detected = sum(page.detected for page in group)
        title = FAMILIES[name]
        anchor = f"{name}-{title}".lower().replace(" ", "-")
        yield f"[{name}](#{anchor})", title, str(detected), str(len(group) - detected)


def _code_row(page: Page) -> tuple[str, ...]:
    state = page.found_by or ("detected" if page.detected else "planned")
    return f"[{page.code}](#{page.code.lower()})", page.severity.label, page.title, state


def _section(page: Page) -> str:
    state = "detected" if page.detected else "**planned**: no rule of this version raises it"
    state += f" by `ddpdebug {page.found_by}`" if page.found_by else ""
    prose = page.prose
    lines = [f"### {page.code}", f"{page.severity.label} · {page.title} · {state}", _line(prose["meaning"])]
    if page.detected:
        lines += [f"*{name.title()}.* {_line(prose[name])}" for name in ("impact", "diagnosis")]
        lines.append("*Causes*, the likeliest first:")
        lines.append("\n".join(f"{i}. {_line(text)}" for i, text in enumerate(prose["causes"], 1)))
        lines.append("*Remedy:*")
        remedies = [prose["remedy"]] if isinstance(prose["remedy"], str) else prose["remedy"]
        lines.append("\n".join(f"- {_line(text)}" for text in remedies))
    return "\n\n".join(lines)


def _line(text: str) -> str:
    return " ".join(text.split())


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(map(_cell, line))} |" for line in lines)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "\\<")


def _example_sink(world: int) -> PrometheusSink:
    """Return a sink that has seen enough to show every metric, and serves nothing."""
    times = count(0.0, 10.0)
    sink = PrometheusSink(1, "", 0, mode="rank0", clock=lambda: next(times))
    sink.write(FindingRaised(finding=Finding(code="RANK101", severity=Severity.CRITICAL, title="", id="RANK101-1")))
    sink.write(RunStarted(run_id="", rank=1, world=world, directory=None, config={}, versions={}))
    for number in range(32):  # memory grows
        used, limit = (number + 1) << 26, 1 << 40
        row = _example_row(step=number, host_bytes=used, host_limit_bytes=limit, device_allocated_bytes=used,
                           device_peak_bytes=used, device_limit_bytes=limit)  # fmt: skip
        sink.write(StepJudged(step=Step(step=number, optimizer=0, world=2, rows={1: row})))
    weight = {"norm": 1.0, "update": 0.1, "grad_norm": 0.1, "dim": 2}
    layers = {"parameters": {"w": weight}, "modules": {"m": {"zero_units": 0.1, "saturated": 0.1}}}
    sink.write(Saved(kind="detail", payload={"rank": 1, "step": 31, "detail": "layers", "value": layers}))
    sink.write(Covered(coverage=Coverage(world=2, ended=True)))
    return sink


def _example_row(**fields: Any) -> Row:
    """Return a row in which everything is known, so that there is something to aggregate."""
    known = [*(field for field, _ in GAUGES.values()), *(f"{phase}_seconds" for phase in PHASES)]
    known = [name for name in known if name in Row._fields]
    return Row(rank=1, **{"step_seconds": 10.0, **dict.fromkeys(known, 1.0), **fields})


def main(files: Sequence[str]) -> int:
    """Write the pages named; return the exit code."""
    unknown = [file for file in files if Path(file).name not in PAGES]
    if unknown or not files:
        wrong = f"no page {unknown[0]!r}" if unknown else "name the pages to write"
        print(f"{wrong}; there are {', '.join(PAGES)}", file=sys.stderr)
        return UsageError.exit_code
    for file in files:
        Path(file).write_text(PAGES[Path(file).name](), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
