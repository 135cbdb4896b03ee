"""Writes the reference pages of `docs/` from the code, so that they cannot say anything else.

A build tool: no part of the package. Torch is loaded for patches.md alone.

`make docs` calls it as `python tools/documentation.py docs/findings.md docs/metrics.md docs/options.md
docs/patches.md docs/thresholds.md`.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, count, groupby
from pathlib import Path
from typing import Any

from ddpdebug.config.settings import Config, options
from ddpdebug.detectors.catalog import FAMILIES
from ddpdebug.detectors.pages import Page, pages
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

Each code with its severity, its title and its impact. `ddpdebug explain CODE` prints the whole runbook: what was
measured, how to look closer, causes and remedies. A finding shows those first that its phase and its evidence speak
for.

Severities: `critical` (the run is wrong or dead from this step on), `error` (wrong in part), `warning` (a person should
look), `info` (worth knowing; never fails a check). Codes marked `preflight` are found by `ddpdebug preflight`, not
while training. This page is made from the rules by `make docs`."""

_METRICS_HEAD = f"""\
# Metrics

The metrics of the Prometheus endpoint (`--metrics`, see [options.md](options.md)), made from the code by `make docs`.
[monitoring.md](monitoring.md) has dashboards, alerts and the join of `gpu_uuid` with the GPU's own metrics.

- `rank` is the rank that reports. Facts that all ranks share (findings, incidents, disagreement) are exported by the
  lowest and the highest rank that take part, and by every rank once the ranks have lost each other: aggregate them with
  `max` without `rank` and `instance`, never with `sum`.
- With several optimizers, loss, norms, rates and times are those of the optimizer that has stepped most.
- The number of series does not depend on the model: a rank has at most {SERIES} before anything is found,
  and {SERIES_WITH_FINDINGS} with findings. The `ddpdebug_layer_*` metrics have {SLOTS} slots each; after {LAYER_NAMES}
  names in a run further layers are called `other`.
- Every series also has `run_id` (six hexadecimal digits, new for each run) and `run` (`--name`, else the script's
  name).

## The state of a run

`max by (run_id, run) (ddpdebug_run_state)` is the state of a run:

- **0 finished**: the script came to its end; `ddpdebug_run_outcome_info` says whether with findings.
- **1 running**: no finding at `error` or above is current.
- **2 ill**: a finding at `error` or `critical` is current: seen in the last 1000 steps, or of a kind reported only
  once.
- **3 cancelled**: ended by SIGTERM, SIGINT (Ctrl-C) or SIGHUP, also through a handler that exits with 128+n.
- **4 failed**: the script raised or left with an exit status other than 0, or a finding ended it (`--guard stop`,
  `--on-finding raise`).
- **5 lost**: it was killed, or left without a report.

The state, the outcome (`clean`, `findings`, `failed`, `cancelled` or `lost`, with a code, exception or signal as
`cause`), the incidents and the counters of an ended process are
[served for a while](monitoring.md#runs-that-have-ended).
So ask for what was last seen in a range:

- state of each run, ended ones included: `max by (run_id, run) (last_over_time(ddpdebug_run_state[$__range]))`
- seconds since a run was last seen: `time() - max by (run_id, run) (timestamp(ddpdebug_run_state))`
- failed or lost in the last quarter of an hour: `max by (run_id, run) (last_over_time(ddpdebug_run_state[15m])) >= 4`
- ranks that are listed, do not answer, and announced no end, for a quarter of an hour:
  `(last_over_time(ddpdebug_run_state[15m]) > 0) < 3 and on (job, instance) up == 0`
- findings of ended runs by severity: `max by (run_id, run, severity)
  (max_over_time(ddpdebug_findings_total[$__range]))`

Targets have the label `sd="file"` or none, never `run_id`.

## What ranks wait for

`max by (run_id, run) (ddpdebug_hang_state)` is the verdict about ranks that wait, from 3 on a hang
([hangs.md](hangs.md)):

- **0 none**, or less than ten seconds
- **1 at work**: the rank that is waited for is evaluating, saving a checkpoint, loading a slow batch
- **2 overdue**: the same, for five minutes and ten times longer than ever before in this run (HANG501, a warning)
- **3 stuck**: nothing moves in it (HANG501)
- **4 silent**: its interpreter gives no sign of life (HANG501)
- **5 apart**: the ranks wait in different calls, or in a circle (HANG502)
- **6 left**: it has ended (HANG503)

While it is not 0, `ddpdebug_missing_rank` has a series for each rank that is waited for, eight at most. A silent rank
is reported by the others; after a minute also by its own page.

## Own time, waiting, and what slow ranks cost

Each step is divided into the rank's [own time](slowness.md) (`ddpdebug_own_seconds_total`, by phase: `data`, `forward`,
`backward`, `optimizer`, `other`) and waiting or exchange (`ddpdebug_wait_seconds_total`). `ddpdebug_phase_seconds` has
the phases as the script sees them. The first step of each optimizer counts in none of them.

- own time of a step, by rank: `sum by (run_id, run, rank) (rate(ddpdebug_own_seconds_total[5m])) / max by (run_id, run,
  rank) (rate(ddpdebug_step_seconds_count[5m]))`
- cost of a rank as a share of the steps' time: `rate(ddpdebug_straggler_cost_seconds_total[5m]) / on
  (run_id, run) group_left () max by (run_id, run) (rate(ddpdebug_step_seconds_sum[5m]))`
- share that waits for the loader: `rate(ddpdebug_phase_seconds_sum{{phase="data"}}[5m]) / ignoring (phase)
  rate(ddpdebug_step_seconds_sum[5m])`

The slowest rank of a step costs the difference to the next one. **Some rank is last in every step**, so noise costs
something in a healthy run too: a slow rank is one that costs much more than the others. Two equally slow ranks cost
next to nothing; their own time is above the median.

## All metrics

Names that end in `_total` are counters, those with `_bucket` histograms, those with `_sum` and `_count` alone
summaries; all others are gauges."""

_MANY_HEAD = f"""\
## Large worlds behind one endpoint

With `--metrics rank0`, rank 0 exports for all ranks. Up to {EVERY_RANK} ranks each has the series above. In a larger
world there are at most {SERIES_OF_ALL} series and `ddpdebug_rank_up` of every rank:

- **Aggregates over all ranks**, listed below: `{PREFIX}...` for each metric of single ranks, with `stat`
  ({", ".join(STATISTICS)}). NaN does not count. Aggregates of counters only grow, so `rate()` works.
- **Who holds an extreme**: `{EXTREMES}` has the rank as its value, with `metric`, `of` (the metric's other label) and
  `stat` (min, max): `{EXTREMES}{{metric="mean_own_seconds", stat="max"}}` is the rank that the others wait for.
- **The series of {SHOWN} ranks and rank 0**: ill ones first, then those that cost most, are slowest, or have the
  fullest memory.

`/metrics?detail=all` has the series of every rank (`params: {{detail: [all]}}` in a scrape configuration). Gauges of
ranks whose rows were not chosen ([decision 33](decisions/033-many-ranks.md)) are at most a minute old; their times are
sums over the steps of which all rows came."""

_SAME = """\
Aggregates of metrics above, with the same meaning, their other labels and `stat`:"""

_OPTIONS_HEAD = """\
# Options

One set of options, named alike everywhere: `--every-step` on the command line is `every_step=True` for
`ddpdebug.watch`, `DDPDEBUG_EVERY_STEP=1` in the environment and `every_step = true` under `[tool.ddpdebug]` in
pyproject.toml. The strongest source first: command line or call, environment, pyproject.toml, default. A wrong name or
value is an error before any training starts. Switches have an opposite: `--no-every-step`.

This page is made from the code by `make docs`. `run` and `check` have an option, or the commands in brackets."""

#: The commands of most options, which are not named for each.
_USUAL = {"run", "check"}

_THRESHOLDS_HEAD = """\
# Thresholds

Every number that rules judge by, by the rules that share it. Change one with `--threshold NAME=VALUE`, which may be
repeated, or in pyproject.toml; an unknown name is an error before training starts:

```toml
[tool.ddpdebug.threshold]
dead_share = 0.7
```

Why a number is what it is (a measurement, a calculation, a citation, or "chosen") is the `source` beside it in the
rule's file, `ddpdebug/detectors/`. Losses of at most 512 steps are kept, so a window is never longer. A finding stays
open until its subject has been gone for 3 steps, twice as long each time it comes back.

Not in the list: what rounding alone may do (SYNC204, SYNC206), and how often a probe must have seen something before it
announces it (three forwards are an evaluation, four labels describe a batch).

This page is made from the rules by `make docs`; [health.md](health.md) explains what is measured."""


_PATCHES_HEAD = """\
# What is patched

While a monitor is open, ddpdebug has looks in the code of these functions, which stay the same objects
([decision 45](decisions/045-looks-in-the-code.md)). `ddpdebug doctor --verbose` lists what is in place on a machine.
This page is made by `make docs` from a real attaching."""

_PATCHES_MORE = "Nothing is put on models and on the classes of the script's own."


def findings_page() -> str:
    """Return docs/findings.md: every code by family, with one sentence about its impact where a rule detects it."""
    families = {
        name: list(group) for name, group in groupby(pages().values(), key=lambda page: page.code.rstrip("0123456789"))
    }
    ordered = {name: families.pop(name) for name in FAMILIES}
    assert not families, f"families without a title: {sorted(families)}"
    parts = [_FINDINGS_HEAD]
    for name, group in ordered.items():
        parts.append(f"## {name}: {FAMILIES[name]}")
        parts += map(_section, group)
    return "\n\n".join(parts) + "\n"


def metrics_page() -> str:
    """Return docs/metrics.md: every metric that the endpoint can serve."""
    head = ("metric", "labels", "meaning")
    single = list(_metric_rows(2))
    meant = {f"Over all ranks: {meaning}" for _, _, meaning in single}
    many = [row for row in _metric_rows(EVERY_RANK + 1) if row[0].startswith((f"`{PREFIX}", f"`{EXTREMES}`"))]
    alike = ",\n".join(names for names, _, meaning in many if meaning in meant)
    others = _table(head, (row for row in many if row[2] not in meant))
    return "\n\n".join((_METRICS_HEAD, _table(head, single), _MANY_HEAD, _SAME, alike, others)) + "\n"


def _metric_rows(world: int) -> Iterator[tuple[str, ...]]:
    metric: Any
    for metric in _example_sink(world).collect():
        names = " ".join(f"`{metric.name}{suffix}`" for suffix in _SUFFIXES.get(metric.type, ("",)))
        labels: tuple[str, ...] = getattr(metric, "_labelnames", ())  # also of a metric that has no sample yet
        values = {name: {sample.labels[name]: None for sample in metric.samples} for name in labels}
        listed = [name for name in labels if name in _LISTED_LABELS and values[name]]
        shown = [f"`{name}` ({', '.join(values[name])})" if name in listed else f"`{name}`" for name in labels]
        yield names, ", ".join(shown), metric.documentation


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
        commands = "" if set(option.commands) == _USUAL else f" ({', '.join(option.commands)})"
        rows.append((f"`{option.flag}`", option.valid, shown, f"{option.help}{commands}"))
    return f"{_OPTIONS_HEAD}\n\n{_table(('option', 'values', 'default', 'meaning'), rows)}\n"


def thresholds_page() -> str:
    """Return docs/thresholds.md: every threshold with its default and meaning, by the rules that read it."""
    by_rules: dict[tuple[str, ...], list[str]] = {}
    for t in thresholds().values():
        by_rules.setdefault(readers(t.name), []).append(f"- `{t.name}={t.value:g}`: {_cell(t.meaning)}")
    parts = [
        _THRESHOLDS_HEAD,
        *(f"## {', '.join(codes)}\n\n" + "\n".join(rows) for codes, rows in sorted(by_rules.items())),
    ]
    return "\n\n".join(parts) + "\n"


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


def _section(page: Page) -> str:
    state = "" if page.detected else ", **planned**: no rule of this version raises it"
    state += f", by `ddpdebug {page.found_by}`" if page.found_by else ""
    impact = f" {_first_sentence(page.prose['impact'])}" if page.detected else ""
    return f"### {page.code}\n\n`{page.severity.label}`{state}: **{page.title}**.{impact}"


def _first_sentence(text: str) -> str:
    """Return the first statement that has a few words."""
    sentence = re.split(r"(?<=[.:]) (?=[A-Z`])", _line(text), maxsplit=1)[0]
    if start := re.match(r"(?:[^ ]+ ){5,}?[^ ]+[:;](?= )", sentence):
        sentence = start[0]
    sentence = sentence.rstrip(".:;")
    return f"{sentence[:1].upper()}{sentence[1:]}."


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
    sink = PrometheusSink(1, mode="rank0", clock=lambda: next(times))
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
