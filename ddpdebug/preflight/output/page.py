"""The results of a preflight as an HTML page: everything is escaped, nothing is loaded or executed. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from html import escape
from itertools import groupby

from ddpdebug.preflight.output.results import Check, Status, Table
from ddpdebug.preflight.output.svg import svg
from ddpdebug.preflight.output.text import WORDS, cell, needs_a_look
from ddpdebug.reports.html import page_head, text
from ddpdebug.sinks.text import evidence_lines

_MAX_ROWS = 200
#: A table with more rows is folded; the text above it says what matters.
_OPEN_ROWS = 12
_LIMIT = 2000
#: Shapes beside colours: the status is readable in black and white.
_SIGNS = {Status.PASS: "✓", Status.WARN: "!", Status.FAIL: "✗", Status.INFO: "i", Status.SKIPPED: "-"}

_STYLE = """\
:root { color-scheme: light dark; --line: #8884; --soft: #8881; --page: #fff; }
@media (prefers-color-scheme: dark) { :root { --page: #151515; } }
* { box-sizing: border-box; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 64rem; margin: 2rem auto; padding: 0 1rem; \
background: var(--page); }
h1 { font-size: 1.5rem; margin-bottom: .6rem; } h2 { font-size: 1.15rem; margin: 2.2rem 0 .5rem; \
border-bottom: 1px solid var(--line); text-transform: capitalize; }
h3 { font-size: 1rem; margin: 0; } a { color: inherit; }
.counts { display: flex; flex-wrap: wrap; gap: .5rem; margin: .6rem 0 1rem; padding: 0; list-style: none; }
.counts li { flex: 1 1 8rem; border-radius: .4rem; padding: .4rem .8rem; background: var(--soft); \
border-left: .4rem solid var(--tone); }
.counts b { display: block; font-size: 1.35rem; }
.strip { display: flex; flex-wrap: wrap; gap: .3rem 1.1rem; margin: 0 0 1.5rem; font-size: .85rem; }
.strip div { display: flex; align-items: center; gap: .2rem; } .strip span { margin-right: .2rem; }
.looks { list-style: none; padding: 0; margin: 0 0 1rem; } .looks li { display: flex; gap: .5rem; margin: .2rem 0; }
.sign { display: inline-block; width: 1.35em; height: 1.35em; line-height: 1.35em; text-align: center; \
border-radius: .25em; background: var(--tone); color: #fff; font-weight: 700; text-decoration: none; flex: none; }
.pass { --tone: #00785a; } .warn { --tone: #9a6700; } .fail { --tone: #c04a00; } .info { --tone: #0072B2; }
.skipped { --tone: #6b6b6b; }
article { border: 1px solid var(--line); border-left: .4rem solid var(--tone); border-radius: .4rem; \
padding: .6rem 1rem; margin: .6rem 0; overflow-wrap: anywhere; }
article.pass, article.info, article.skipped { border-left-width: .2rem; }
article p { margin: .2rem 0 0; } .code { font-weight: 400; opacity: .75; margin-left: .5em; }
dl { display: grid; grid-template-columns: 6rem 1fr; gap: .1rem 0; margin: .5rem 0 0; } dt { opacity: .7; }
dd { margin: 0; } dd ol, dd ul { margin: 0; padding-left: 1.2rem; }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 27rem), 1fr)); gap: 1rem; }
figure { margin: .8rem 0 0; max-width: 44rem; } figcaption { font-size: .85rem; font-weight: 600; }
svg { width: 100%; height: auto; font: 12px system-ui, sans-serif; fill: currentColor; }
.grid { stroke: var(--line); } .mark { stroke: currentColor; stroke-width: 1; stroke-dasharray: 3 3; opacity: .7; }
.marked { font-size: 11px; } .legend { font-size: .85rem; } .legend span { margin-right: 1.2rem; }
.key { width: 28px; height: 8px; margin-right: .4rem; vertical-align: middle; }
.none { opacity: .7; font-style: italic; }
.scroll { overflow-x: auto; margin-top: .6rem; }
table { border-collapse: collapse; font-size: .88rem; font-variant-numeric: tabular-nums; }
td, th { text-align: left; padding: .15rem 1.1rem .15rem 0; vertical-align: top; overflow-wrap: break-word; \
max-width: 36rem; border-bottom: 1px solid var(--line); }
td.number { text-align: right; }
footer { margin-top: 3rem; font-size: .85rem; opacity: .75; }
@media print { body { margin: 0; max-width: none; } article, figure, tr { break-inside: avoid; } \
h2 { break-after: avoid; } .sign, .counts li { print-color-adjust: exact; } .scroll { overflow: visible; } }
"""


def page(checks: Sequence[Check], title: str) -> str:
    """Return the page as HTML."""
    numbered = list(enumerate(checks))
    parts = [page_head(text(title), _STYLE), f"<h1>{text(title)}</h1>", _counts(checks), _strip(numbered)]
    parts.append(_looks(numbered))
    for group, members in groupby(numbered, lambda pair: pair[1].group):
        parts.append(f"<section><h2>{text(group)}</h2>")
        parts += [_check(check, number) for number, check in members]
        parts.append("</section>")
    parts.append(
        "<footer>ddpdebug preflight. Everything here was measured on copies: the model, the optimizer and the "
    )
    parts.append("random state of the script are as they were. <code>ddpdebug explain CODE</code> says more about a ")
    parts.append("code.</footer></body></html>\n")
    return "\n".join(parts)


def _counts(checks: Sequence[Check]) -> str:
    counts = Counter(check.status for check in checks)
    items = (f'<li class="{status.value}"><b>{counts[status]}</b>{word}</li>' for status, word in WORDS.items())
    return f'<ul class="counts">{"".join(items)}</ul>'


def _strip(numbered: Iterable[tuple[int, Check]]) -> str:
    """Return a sign for each check, by group; each leads to its check."""
    parts = []
    for group, members in groupby(numbered, lambda pair: pair[1].group):
        signs = (
            f'<a class="sign {check.status.value}" href="#check-{number}" '
            f'title="{text(check.status.value)}: {text(check.name)}">{_SIGNS[check.status]}</a>'
            for number, check in members
        )
        parts.append(f"<div><span>{text(group)}</span>{''.join(signs)}</div>")
    return f'<div class="strip">{"".join(parts)}</div>'


def _looks(numbered: Sequence[tuple[int, Check]]) -> str:
    """Return a list of what is wrong and what looks wrong, in this order, each with its sentence."""
    items = []
    for status in (Status.FAIL, Status.WARN):
        for number, check in numbered:
            if check.status is status:
                sign = f'<a class="sign {status.value}" href="#check-{number}">{_SIGNS[status]}</a>'
                name = f'<a href="#check-{number}">{text(check.group)}: {text(check.name)}</a>'
                items.append(f"<li>{sign}<span>{name} - {text(check.summary, 200)}</span></li>")
    return f'<ul class="looks">{"".join(items)}</ul>' if items else ""


def _check(check: Check, number: int) -> str:
    sign = f'<span class="sign {check.status.value}">{_SIGNS[check.status]}</span>'
    code = f'<span class="code">{text(check.code, 20)}</span>' if check.code else ""
    word = f'<span class="code">{text(check.status.value)}</span>'
    parts = [
        f'<article id="check-{number}" class="{check.status.value}">',
        f"<h3>{sign} {text(check.name)}{code}{word}</h3><p>{text(check.summary, _LIMIT)}</p>",
        _facts(check),
    ]
    if check.plots:
        parts.append(f'<div class="plots">{"".join(map(svg, check.plots))}</div>')
    parts += map(_table, check.tables)
    return "".join([*parts, "</article>"])


def _facts(check: Check) -> str:
    shown = needs_a_look(check)
    rows = [("evidence", "<br>".join(map(escape, evidence_lines(check.evidence))) if shown else "")]
    for label, tag, texts in (("perhaps", "ol", check.hypotheses), ("next", "ul", check.actions)):
        items = "".join(f"<li>{text(words, _LIMIT)}</li>" for words in texts)
        rows.append((label, f"<{tag}>{items}</{tag}>" if items else ""))
    facts = "".join(f"<dt>{label}</dt><dd>{content}</dd>" for label, content in rows if content)
    return f"<dl>{facts}</dl>" if facts else ""


def _table(table: Table) -> str:
    head = "".join(f"<th>{text(name, 80)}</th>" for name in table.head)
    rows = []
    for row in table.rows[:_MAX_ROWS]:
        cells = (
            f"<td{' class=number' if isinstance(value, int | float) else ''}>{escape(cell(value))}</td>"
            for value in row
        )
        rows.append(f"<tr>{''.join(cells)}</tr>")
    more = len(table.rows) - _MAX_ROWS
    note = f"<p>and {more} more in preflight.json</p>" if more > 0 else ""
    body = (
        f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{"".join(rows)}</tbody></table></div>{note}'
    )
    return body if len(rows) <= _OPEN_ROWS else f"<details><summary>{len(table.rows)} rows</summary>{body}</details>"
