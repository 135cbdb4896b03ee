"""The HTML page about a run: readable offline, texts of the job escaped, nothing loaded or executed. Torch-free."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from html import escape
from pathlib import Path
from typing import Any

from ddpdebug.detectors.hlth.shapes import classify
from ddpdebug.progress.boxes import read_ranks
from ddpdebug.redaction import redact
from ddpdebug.reports.html import SWATCHES, Points, duration, heat_map, lines, page_head, parting, text, timeline
from ddpdebug.reports.reading import FOLLOWED, PARTS, History, read_history
from ddpdebug.schema.coverage import Coverage, Weight
from ddpdebug.schema.ended import parse_end
from ddpdebug.schema.finding import UNDECIDED, Finding, Severity
from ddpdebug.schema.hangs import is_hang, stands
from ddpdebug.schema.likeliest import fitting
from ddpdebug.sinks.text import evidence_lines, subjects, where
from ddpdebug.sinks.words import clean, counted, percent, ranks_text

_MAX_FINDINGS = 200
_MAX_MARKS = 20
_STACKS, _MAX_STACKS, _MAX_FRAMES = "stacks", 32, 40
_MAX_RANKS, _MAX_NOTES = 512, 8
_COSTLY, _LITTLE = 8, 0.005
_BACKTICKS = re.compile(r"`([^`]+)`")
#: Ranks that have a line of their own in the picture.
_MAX_DRAWN = 64

_STYLE = """\
:root { color-scheme: light dark; --line: #8884; --soft: #8882; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; overflow-wrap: anywhere; } h2 { font-size: 1.15rem; margin: 2.2rem 0 .4rem; }
h3 { font-size: 1rem; margin: 0; }
svg { width: 100%; height: auto; font: 11px system-ui, sans-serif; fill: currentColor; }
.grid { stroke: var(--line); } .mark { stroke: #C62828; stroke-width: 1.5; stroke-dasharray: 4 3; }
.legend span { margin-right: 1.2rem; } .legend i { display: inline-block; width: 1rem; height: .6rem; \
margin-right: .35rem; }
.even { fill: var(--soft); } td.n, th.n { text-align: right; } .pace { margin: .8rem 0; }
.legend { margin: 0; font-size: .85rem; } .none { opacity: .7; font-style: italic; }
.tiles { display: flex; flex-wrap: wrap; gap: .6rem; margin: 1rem 0; }
.tile { flex: 1 1 7rem; border-radius: .4rem; padding: .5rem .8rem; background: var(--soft); \
border-left: .4rem solid #999; }
.tile b { display: block; font-size: 1.15rem; overflow-wrap: anywhere; }
.good { border-color: #009E73; } .bad { border-color: #C62828; } .warn { border-color: #E69F00; }
article { border: 1px solid var(--line); border-left: .4rem solid #999; border-radius: .4rem; padding: .8rem 1rem; \
margin: .8rem 0; overflow-wrap: anywhere; }
article.critical, article.error { border-left-color: #C62828; } article.warning { border-left-color: #E69F00; }
dl { display: grid; grid-template-columns: 7rem 1fr; margin: .5rem 0 0; } dt { opacity: .7; } dd { margin: 0; }
table { border-collapse: collapse; } td, th { text-align: left; padding: .15rem 1.2rem .15rem 0; \
overflow-wrap: anywhere; vertical-align: top; }
td:first-child, th { overflow-wrap: normal; } code { font-size: .92em; } pre { overflow-x: auto; font-size: .85em; }
@media (max-width: 44rem) { .wide { overflow-x: auto; } .wide svg { min-width: 34rem; font-size: 13px; } }
@media print { article { break-inside: avoid; } }
"""


def report(directory: Path, *, name: str = "") -> str:
    """Return the page about a run as HTML, also of a run that was killed or still goes on.

    Args:
        name: by which the directory is known to who reads it, where that is not its path.

    Raises:
        ValueError: this is not a run directory, or another version's.
    """
    history = read_history(directory)
    run_id = text(history.run.get("run"), 60)
    steps = (history.first, max(history.last, history.first + 1))
    marks = _marked(history.findings)
    series = history.series

    def chart(names: Mapping[str, str], unit: str = "") -> str:
        return lines({shown: series[name] for shown, name in names.items()}, steps, marks, unit)

    told = {"validation": "validation loss"} if any(math.isfinite(v) for _, v in series["validation loss"]) else {}
    ranks = {f"{each} rank": f"loss {each} rank" for each in ("highest", "median", "lowest")} | told
    norms = {"highest rank": "norm highest rank", "lowest rank": "norm lowest rank"}
    memory = {name: name for name in ("host", "device reserved", "device allocated") if any(_values(series[name]))}
    parts = [
        page_head(f"ddpdebug: run {run_id}", _STYLE + SWATCHES),
        f"<h1>{text(history.run.get('name') or 'Run', 60)} {run_id}</h1>",
        _tiles(history),
        _picture(history, steps),
        "<h2>Findings</h2>",
        *map(finding_article, worst_first(history.findings)[:_MAX_FINDINGS]),
        _rest(history),
        _last_words(history),
        "<h2>What was checked</h2>",
        _coverage(history),
        "<h2>Do the ranks agree?</h2>",
        timeline(history.agreement, steps, marks),
        "<p>Low and green: compared and equal. High and red: the ranks differed. Nothing: not compared then.</p>",
        "<h2>Loss</h2>",
        chart(ranks),
        _shape(series[FOLLOWED], series["validation loss"], history.run.get("config")),
        "<h2>Gradient norm, after the reduction</h2>",
        chart(norms),
        "<h2>Step time: own time by phase and waiting for others, mean over the ranks</h2>",
        chart({part: part for part in PARTS}, "s"),
        "<h2>Which rank is slow?</h2>",
        _slowness(history, steps, marks),
        "<h2>Memory of the fullest rank</h2>",
        chart(memory, "bytes"),
        "<h2>Ranks</h2>",
        _ranks(history),
        "<h2>What ran</h2>",
        _facts(history, name),
        "</body></html>\n",
    ]
    return "\n".join(parts)


def worst_first(findings: Iterable[Finding]) -> list[Finding]:
    """Return findings in reading order: by severity, and within it the first ones first."""
    return sorted(findings, key=lambda finding: -finding.severity)


def _picture(history: History, steps: tuple[int, int]) -> str:
    """Return the picture of the worst finding: the ranks over the steps, when it came up, and who parted from whom."""
    world = int(history.run.get("world") or 0)
    worst = next(iter(worst_first(history.findings)), None)
    if worst is None or worst.step is None or not 1 < world <= _MAX_DRAWN or worst.severity < Severity.WARNING:
        return ""
    sides = worst.evidence.get(UNDECIDED)
    sides = sides if isinstance(sides, list) else []
    known = [{rank for rank in side if isinstance(rank, int)} for side in sides if isinstance(side, list)]
    groups = known or [set(range(world)) - set(worst.ranks), set(worst.ranks)]
    groups = [group for group in groups if group]
    labels = [ranks_text(group) for group in groups]
    words = f"{clean(worst.code, 20)}: {clean(worst.title, 200)}, step {worst.step}"
    how = " against ".join(labels) if len(groups) > 1 else f"on {labels[0]}" if labels else ""
    drawn = parting(world, [sorted(group) for group in groups], steps, worst.step, words, undecided=bool(known))
    return f"<h2>What happened</h2><p>{text(words, 300)}: {text(how, 300)}.</p>{drawn}"


def _shape(points: Points, validation: Points, config: object) -> str:
    """Return in words what the loss curve looks like."""
    known = [(step, value) for step, value in points if math.isfinite(value)]
    settings = config if isinstance(config, dict) else {}
    shape = classify([step for step, _ in known], [value for _, value in known], settings, list(validation))
    if shape is None:
        return ""
    return f"<p>Shape of the curve: <b>{shape.kind}</b>, steps {shape.since} to {shape.until}.</p>"


def _slowness(history: History, steps: tuple[int, int], marks: Mapping[int, str]) -> str:
    """Return whose own time is above the others', when and in which phase, and what that costs."""
    pace = history.pace
    if not pace.steps:
        return '<p class="none">nothing was recorded</p>'
    known = [
        ("for data", pace.data, "on the median rank"),
        ("for other ranks, with the reduction,", pace.waiting if pace.ranks > 1 else math.nan, "on average"),
    ]
    waits = ", ".join(f"waiting {what} was {percent(share)} of it {who}" for what, share, who in known if share >= 0)
    head = f"<p>A step took {duration(pace.step_seconds)} on average, of {counted(pace.steps, 'step')} that are kept"
    head += f"; {waits}.</p>" if waits else ".</p>"
    totals = pace.totals()
    if len(totals) < 2:
        return head
    rows = [
        f'<tr><td class="n">{one.rank}</td><td class="n">{duration(one.cost)}</td>'
        f'<td class="n">{percent(one.share)}</td>'
        f'<td class="n">{percent(one.last)} of the steps</td><td class="n">{duration(one.own)}</td>'
        f'<td class="n">{_above(one.excess)}</td><td>{one.phase if one.excess >= _LITTLE else ""}</td></tr>'
        for one in totals[:_COSTLY]
    ]
    cost, share = sum(one.cost for one in totals), sum(one.share for one in totals)
    rows.append(
        f'<tr><th class="n">all</th><th class="n">{duration(cost)}</th><th class="n">{percent(share)}</th></tr>'
    )
    first = "".join(
        f'<th class="n">{name}</th>'
        for name in ("rank", "costs", "of the time", "is last in", "own time of a step", "above the median rank")
    )
    table = f"<table class='pace'><tr>{first}<th>most of that in</th></tr>{''.join(rows)}</table>"
    note = (
        "<p>A rank costs what the steps in which it was last would have been shorter without it. Somebody is last in"
        " every step: ranks that cost about the same are noise, or batches of uneven length; one that costs much more"
        " than the others is slow.</p>"
    )
    if pace.whole < pace.steps:
        note += (
            f"<p>Ranks are compared in {counted(pace.whole, 'step')}, of which all rows are kept; what they cost,"
            " and in what share of the steps they are last, is of all.</p>"
        )
    drawn = heat_map(pace, steps, marks) if pace.whole else ""
    return f"{head}{drawn}{table}{note}"


def _above(excess: float) -> str:
    if math.isnan(excess):
        return ""
    return f"{percent(excess)} of a step" if excess >= _LITTLE else "not"


def _values(points: Points) -> Iterable[float]:
    return (value for _, value in points if value > 0)


def _marked(findings: Iterable[Finding]) -> dict[int, str]:
    marks: dict[int, str] = {}
    for finding in findings:
        if finding.step is not None and len(marks) < _MAX_MARKS:
            marks.setdefault(finding.step, f"{clean(finding.code, 20)}: {clean(finding.title, 120)}")
    return marks


def _tiles(history: History) -> str:
    world = history.run.get("world")
    outcome = history.run.get("outcome")
    reason = outcome.get("reason") if isinstance(outcome, dict) else None
    compared = [value for points in history.agreement.values() for _, value in points if not math.isnan(value)]
    severe = [finding for finding in history.findings if finding.severity >= Severity.ERROR]
    agree = ("differ", "bad") if any(compared) else ("agree", "good") if compared else ("not compared", "")
    kind = "bad" if severe or history.damage else "warn" if history.findings else "good"
    outcome_kind = "warn" if reason != "finished" else "" if severe or any(compared) else "good"
    tiles = [
        ("Ranks agree", *agree),
        ("Findings", f"{_counts(history.findings)}{', damaged' if history.damage else ''}", kind),
        ("Ranks", world, ""),
        ("Steps recorded", history.steps, ""),
        ("Checked", *checked(history.run)),
        ("Outcome", reason or "still running, or killed", outcome_kind),
    ]
    shown = (f'<div class="tile {kind}">{name}<b>{text(value, 80)}</b></div>' for name, value, kind in tiles)
    return f'<div class="tiles">{"".join(shown)}</div>'


def _counts(findings: Iterable[Finding]) -> str:
    """Return `1 critical, 2 warnings`, the gravest first, or `none`."""
    found = Counter(finding.severity for finding in findings)
    words = {Severity.ERROR: "error", Severity.WARNING: "warning"}
    shown = [
        counted(count, words[severity]) if severity in words else f"{count} {severity.label}"
        for severity, count in sorted(found.items(), reverse=True)
    ]
    return ", ".join(shown) or "none"


def checked(run: Mapping[str, Any]) -> tuple[str, str]:
    """Return text and colour of the tile about coverage, from `run.json`: green only if everything was checked."""
    known = Coverage.from_json(run.get("coverage"))
    if known is None or known.complete is None:
        return "not known", ""
    if known.complete and known.sharding:  # parts of parameters that no other rank has are compared with nothing
        return "all but sharded parts", ""
    if known.complete:
        return "everything", "good"
    essential = any(gap.weight is Weight.ESSENTIAL for gap in known.gaps)
    return ("nothing compared", "bad") if essential and known.until is None else ("not in all", "warn")


def _coverage(history: History) -> str:
    known = Coverage.from_json(history.run.get("coverage"))
    if known is None:
        return '<p class="none">no rank recorded what it checked: the run may have ended too early</p>'
    rows = "".join(
        f"<tr><td>{gap.part}</td><td>{text(gap.text, 400)}</td><td>{text(gap.action)}</td></tr>" for gap in known.gaps
    )
    line = f"<p>{text(known.line(), 600)}</p>"
    head = "<tr><th>about</th><th>not checked</th><th>what to do</th></tr>"
    return f"{line}<table>{head}{rows}</table>" if rows else line


def finding_article(finding: Finding, more: str = "") -> str:
    """Return a finding with its evidence as HTML, with `more` at its end."""
    severity = finding.severity.label
    causes, actions = fitting(finding)
    rows = [
        ("where", [where(finding)]),
        ("what", subjects(finding)),
        ("evidence", evidence_lines({key: value for key, value in finding.evidence.items() if key != _STACKS})),
        ("seen", [f"{counted(finding.count, 'time')}, last in step {finding.last_step}"]),
        ("perhaps", [f"{i}. {clean(cause, 600)}" for i, cause in enumerate(causes[:6], 1)]),
        ("next", [f"- {clean(action, 600)}" for action in actions[:6]]),
    ]
    items = "".join(f"<dt>{label}</dt><dd>{'<br>'.join(map(_code, texts))}</dd>" for label, texts in rows if any(texts))
    head = f"{text(finding.code, 20)} · {severity} · {text(finding.title, 300)}"
    return f'<article class="{severity}"><h3>{head}</h3><dl>{items}</dl>{_stacks(finding)}{more}</article>'


def _code(words: str) -> str:
    """Return a text as HTML, what stands in backticks as code."""
    return _BACKTICKS.sub(r"<code>\1</code>", escape(words))


def _stacks(finding: Finding) -> str:
    """Return the frames of a hang, by the ranks that were in the same place."""
    known = finding.evidence.get(_STACKS)
    if not isinstance(known, Mapping) or not is_hang(finding):
        return ""
    blocks = []
    for ranks, stack in list(known.items())[:_MAX_STACKS]:
        frames = list(stack)[:_MAX_FRAMES] if isinstance(stack, list) else []
        blocks.append("\n".join([f"rank {text(ranks, 60)}", *(f"    {text(frame, 400)}" for frame in frames)]))
    shown = "\n".join(blocks)
    return f"<details><summary>where the ranks were</summary><pre>{shown}</pre></details>"


def _last_words(history: History) -> str:
    """Return what each rank did last, by its black box, of a run that did not end well."""
    outcome = history.run.get("outcome")
    reason = outcome.get("reason") if isinstance(outcome, dict) else None
    if parse_end(str(reason)).is_in_order and not any(map(stands, history.findings)):
        return ""
    ranks = read_ranks(history.directory, int(history.run.get("world") or 0), notes=_MAX_NOTES)
    if not ranks:
        return ""
    rows = []
    for rank, one in list(ranks.items())[:_MAX_RANKS]:
        known = one.progress
        cells = ["" if known is None else known.step, "" if known is None else known.phase, one.words]
        notes = "<br>".join(text(note, 200) for note in one.notes)
        shown = "".join(f"<td>{text(cell, 600)}</td>" for cell in cells)
        rows.append(f"<tr><td>{rank}</td><td>{one.state}</td>{shown}<td>{notes}</td></tr>")
    head = "<tr><th>rank</th><th>process</th><th>step</th><th>phase</th><th>what it did</th><th>last calls</th></tr>"
    return f"<h2>What the ranks did last</h2><table>{head}{''.join(rows)}</table>"


def _rest(history: History) -> str:
    if history.damage:
        return f'<p class="none">damaged: {escape("; ".join(clean(words) for words in history.damage))}</p>'
    if not history.findings:
        return '<p class="none">no findings: nothing wrong was seen in what was checked</p>'
    more = len(history.findings) - _MAX_FINDINGS
    return f"<p>and {more} more in findings.jsonl</p>" if more > 0 else ""


def _ranks(history: History) -> str:
    rows = []
    for rank in sorted({*history.outcomes, *history.culprits}):
        outcome = history.outcomes.get(rank, {})
        ended = outcome.get("reason") or "no outcome: killed, or still running"
        outvoted = history.culprits.get(rank, 0)
        rows.append(f"<tr><td>{rank}</td><td>{text(ended, 200)}</td><td>{counted(outvoted, 'step')}</td></tr>")
    silent = [r for r in range(min(4096, int(history.run.get("world") or 0))) if r not in history.outcomes]
    note = f"<p>Without an outcome (killed, or still running): {escape(ranks_text(silent))}.</p>" if silent else ""
    if history.undecided:
        note += f"<p>In {counted(history.undecided, 'step')} nobody could tell which of the ranks were right.</p>"
    head = "<tr><th>rank</th><th>ended</th><th>outvoted in</th></tr>"
    return f"<table>{head}{''.join(rows[:512])}</table>{note}"


def _facts(history: History, name: str) -> str:
    versions = history.run.get("versions")
    shown = versions if isinstance(versions, dict) else {}
    command = history.run.get("command")
    words = " ".join(redact(list(map(str, command)))) if isinstance(command, list) else ""
    rows = {
        "directory": name or history.directory,
        "started": history.run.get("time"),
        "node": history.run.get("node"),
        "command": words,
        "versions": ", ".join(f"{name} {version}" for name, version in shown.items()),
    }
    cells = (f"<tr><th>{name}</th><td><code>{text(value, 2000)}</code></td></tr>" for name, value in rows.items())
    return f"<table>{''.join(cells)}</table>"
