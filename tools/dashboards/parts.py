"""The parts of a dashboard as JSON values of Grafana's: one look, one meaning for each colour, explicit ids.

Colours are those of Okabe and Ito, which colour-blind people can tell apart, and a red that is darker than all of them:
it means ill and nothing else. Every state also has a word.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

from tools.dashboards import promql as q

#: From good to ill; what is neither is blue, what is not known or over is grey.
GOOD, NOTE, WARN, WORSE, BAD = "#009E73", "#56B4E9", "#F0E442", "#E69F00", "#B2182B"
NEUTRAL, OVER, THIRD = "#0072B2", "#999999", "#CC79A7"
TAG = "ddpdebug"
_SOURCE = {"type": "prometheus", "uid": "$datasource"}
_WIDTH = 24
_USUAL = 12, 8
_NO_DATA = "no data in this time range"
#: Series that mean the same on every dashboard have the same colour.
_LINE_COLORS = {
    "highest rank": THIRD,
    "median rank": NEUTRAL,
    "lowest rank": NOTE,
    "data": THIRD,
    "forward": NOTE,
    "backward": NEUTRAL,
    "optimizer": WORSE,
    "other": OVER,
    "waiting": WARN,
    "critical": BAD,
    "error": WORSE,
    "warning": WARN,
    "info": NOTE,
}
#: A panel without title, place and id: JSON values.
Panel = dict[str, Any]
#: Value or bounds or the label's text, its word (a number stays one where that is empty), its colour.
Words = Sequence[tuple[float | tuple[float, float] | str, str, str]]
#: From which value on, which colour; None is from the beginning.
Steps = Sequence[tuple[float | None, str]]
#: Query, name of its series.
Queries = Sequence[tuple[str, str]]

MANY = 1e9  # a bound that is not there: Grafana reads one that is null as 0
#: What `ddpdebug_run_state` says.
RUN_STATES: Words = (
    (0, "finished", NEUTRAL),
    (1, "running", GOOD),
    (2, "ill", BAD),
    (3, "cancelled", OVER),
    (4, "failed", BAD),
    (5, "lost", BAD),
    (6, "gone", OVER),
)
#: What `promql.verdict` says of a run that has ended.
_ENDS: Words = (
    (-1, "run finished", OVER),
    (-4, "run cancelled", OVER),
    (-5, "run failed", BAD),
    (-6, "run lost", BAD),
    (-7, "run gone", OVER),
)
#: What `ddpdebug_hang_state` says.
WAITS: Words = (
    (0, "none", GOOD),
    (1, "at work", NOTE),
    (2, "overdue", WARN),
    (3, "stuck", BAD),
    (4, "silent", BAD),
    (5, "apart", BAD),
    (6, "left", BAD),
)
SEVERITIES: Words = tuple((name, name, _LINE_COLORS[name]) for name in ("info", "warning", "error", "critical"))
#: What `run:ddpdebug_findings_worst:max` says.
WORST: Words = ((0, "none", GOOD), *((i, str(name), color) for i, (name, _, color) in enumerate(SEVERITIES, 1)))
AGREE: Words = ((0, "agree", GOOD), ((1, MANY), "differ", BAD))
FINITE: Words = ((0, "finite", GOOD), ((1e-9, MANY), "NaN or Inf", BAD))


class Board:
    """A dashboard that is filled from left to right and from top to bottom."""

    def __init__(self, uid: str, title: str, description: str, *, variables: Sequence[str] = ("run", "rank")) -> None:
        self.uid = uid
        self._x = self._y = self._tallest = 0
        self._size = _USUAL
        self._panels: list[Panel] = []
        chosen = [_variable("datasource", "Data source", "datasource", query="prometheus")]
        chosen += [_RUN_VARIABLES[name] for name in variables]
        link = {"asDropdown": True, "includeVars": True, "keepTime": True, "type": "dashboards", "tags": [TAG]}
        self._made: dict[str, Any] = {
            "uid": uid,
            "title": f"ddpdebug / {title}",
            "description": description,
            "tags": [TAG],
            "editable": False,
            "timezone": "browser",
            "time": {"from": "now-1h", "to": "now"},
            "refresh": "10s",
            "fiscalYearStartMonth": 0,
            "graphTooltip": 1,  # the same moment on all panels
            "schemaVersion": 42,
            "links": [{**link, "title": "ddpdebug", "icon": "", "tooltip": "", "targetBlank": False}],
            "templating": {"list": chosen},
            "annotations": {"list": _ANNOTATIONS} if "run" in variables else {},
            "panels": self._panels,
        }

    def text(self) -> str:
        """Return the dashboard as the text of its file."""
        return json.dumps(self._made, sort_keys=True, indent=2) + "\n"

    def row(self, title: str, *, closed: bool = False) -> None:
        """Begin a new part, with panels of the usual size; those of a closed one ask for nothing until it is opened."""
        self._break()
        self._size = _USUAL
        self._panels = self._made["panels"]
        inner: list[Panel] = []
        self._place({"type": "row", "title": title, "collapsed": closed, "panels": inner}, f"row {title}", _WIDTH, 1)
        self._y += 1
        if closed:
            self._panels = inner

    def size(self, width: int, height: int) -> None:
        """Set the size of the next panels, in units of Grafana's grid: it has 24 columns."""
        self._size = width, height

    def add(self, panel: Panel, title: str, description: str, *, width: int = 0, height: int = 0) -> None:
        """Add a panel; its description says what it means and what to do."""
        width, height = width or self._size[0], height or self._size[1]
        if self._x + width > _WIDTH:
            self._break()
        about = {"title": title, "description": description, "datasource": _SOURCE, "interval": "15s"}
        self._place({**panel, **about, "repeatDirection": "h", "transparent": False}, title, width, height)
        self._x += width
        self._tallest = max(self._tallest, height)

    def _place(self, panel: Panel, name: str, width: int, height: int) -> None:
        # the id stays when other panels are added or moved, so that links to it hold
        number = zlib.crc32(f"{self.uid}/{name}".encode()) % 1_000_000 + 1
        self._panels.append({**panel, "id": number, "gridPos": {"x": self._x, "y": self._y, "w": width, "h": height}})

    def _break(self) -> None:
        self._x, self._y, self._tallest = 0, self._y + self._tallest, 0


def _variable(name: str, label: str, kind: str, **more: Any) -> dict[str, Any]:
    return {
        "allowCustomValue": True,
        "skipUrlSync": False,
        "name": name,
        "label": label,
        "type": kind,
        "includeAll": False,
        "multi": False,
        **more,
    }


_RELOADED = {"datasource": _SOURCE, "refresh": 2}  # when the time range changes
# also runs that have ended in it; people know them by their names, queries by their ids
_NAMED = f'label_join(group by (run_id, run) ({q.last("run:ddpdebug_run_state:max")}), "both", ";", "run", "run_id")'
_RUN_VARIABLES = {
    "run": _variable(
        "run",
        "Run",
        "query",
        query=f'query_result(label_replace({_NAMED}, "both", "$1 ($2)", "both", "(.*);(.*)"))',
        regex='/both="(?<text>[^"]*)".*run_id="(?<value>[^"]*)"/',
        sort=1,  # by name
        **_RELOADED,
    ),
    # as the alerts have it: Prometheus serves docs/ where it is started with --web.user-assets=docs
    "docs": _variable("docs", "Documentation", "textbox", query="http://127.0.0.1:9090/user/"),
    "rank": _variable(
        "rank",
        "Rank",
        "query",
        query=f"label_values({q.chosen('ddpdebug_step')}, rank)",  # the names of series: reads no samples
        sort=3,  # by number
        multi=True,
        includeAll=True,
        allValue=".+",
        current={"selected": True, "text": "All", "value": "$__all"},
        **_RELOADED,
    ),
}
_TIMES = q.chosen("run_incident:ddpdebug_incident_timestamp_seconds:max")
_ANNOTATIONS = [
    {
        "name": "Findings",
        "datasource": _SOURCE,
        "enable": True,
        "expr": f"1000 * max by (incident, code, severity, subject, culprits, location) ({_TIMES})",
        "useValueForTime": True,
        "step": "30s",
        "titleFormat": "{{code}} {{severity}}",
        "textFormat": "{{subject}} · ranks {{culprits}} · {{location}} · ddpdebug explain {{code}}",
        "tagKeys": "code,severity",
        "builtIn": 0,
        "hide": False,
        "iconColor": BAD,
    },
]


# --- what panels are made of ------------------------------------------------------------------------------------------


def _target(expression: str, name: str, number: int, *, instant: bool = False) -> dict[str, Any]:
    made = {"expr": expression, "legendFormat": name, "refId": chr(ord("A") + number), "datasource": _SOURCE}
    return {**made, "instant": instant, "range": not instant, **({"format": "table"} if instant else {})}


def _panel(kind: str, targets: Sequence[Any], defaults: Mapping[str, Any], options: Mapping[str, Any]) -> Panel:
    fields = {"defaults": defaults, "overrides": []}
    return {"type": kind, "targets": targets, "fieldConfig": fields, "options": options}


def _override(panel: Panel, column: str, values: Mapping[str, Any]) -> None:
    """Show a series or a column in another way: name of a property -> its value."""
    properties = [{"id": name, "value": value} for name, value in values.items()]
    matcher = {"id": "byName", "options": column}
    panel["fieldConfig"]["overrides"].append({"matcher": matcher, "properties": properties})


def _words(words: Words) -> list[Any]:
    """Return Grafana's mappings; a word that is empty leaves the number as it is and gives it a colour."""
    options: dict[str, Any] = {}
    ranges = []
    for i, (value, text, color) in enumerate(words):
        result = {**({"text": text} if text else {}), "color": color, "index": i}
        if isinstance(value, tuple):
            ranges.append({"type": "range", "options": {"from": value[0], "to": value[1], "result": result}})
        else:
            options[value if isinstance(value, str) else f"{value:g}"] = result
    return [*([{"type": "value", "options": options}] if options else []), *ranges]


def _unknown(text: str, words: Words = ()) -> dict[str, Any]:
    return {
        "type": "special",
        "options": {"match": "null+nan", "result": {"text": text, "color": OVER, "index": len(words)}},
    }


def _coloured(steps: Steps) -> dict[str, Any]:
    """Return the colour of a field by its value."""
    made = [{"value": value, "color": color} for value, color in steps]
    return {"color": {"mode": "thresholds"}, "thresholds": {"mode": "absolute", "steps": made}}


def _fixed(color: str) -> dict[str, Any]:
    return {"color": {"mode": "fixed", "fixedColor": color}}


# --- panels -----------------------------------------------------------------------------------------------------------


def tile(
    expression: str,
    *,
    words: Words = (),
    steps: Steps = ((None, NEUTRAL),),
    unit: str = "short",
    missing: str = "no data",
    decimals: int = 0,
) -> Panel:
    """Return a verdict: a word or a number on a coloured ground, read from afar, as it is at the end of the range.

    What has no value now has none: a run that has ended is told apart by the query (`promql.verdict`).
    """
    known = [*words, *_ENDS, (-2, missing, OVER), (-3, missing, OVER)]
    mappings = [*_words(known), _unknown("not seen", known)]
    defaults = {"unit": unit, "decimals": decimals, "noValue": "not seen", "mappings": mappings}
    options = {
        "reduceOptions": {"calcs": ["lastNotNull"]},
        "colorMode": "background",
        "graphMode": "none",
        "justifyMode": "auto",
        "orientation": "auto",
        "percentChangeColorMode": "standard",
        "showPercentChange": False,
        "textMode": "value",
        "wideLayout": True,
    }
    target = {**_target(expression, "", 0, instant=True), "format": "time_series"}
    return _panel("stat", [target], {**defaults, **_coloured(steps)}, options)


def named(panel: Panel, name: str, instead: str) -> Panel:
    """Let a tile say whose value it shows, by a name with labels in it; where it has none, what a query says instead.

    Args:
        instead: a query of what has no labels, such as how a run ended.
    """
    (target,) = panel["targets"]
    target["legendFormat"] = name
    query = f"({instead}) unless on () ({target['expr']})"
    panel["targets"].append({**_target(query, "the run", 1, instant=True), "format": "time_series"})
    panel["options"]["textMode"] = "value_and_name"
    return panel


def graded(queries: Sequence[tuple[str, str, str]], *, unit: str, missing: str, words: Words = ()) -> Panel:
    """Return a tile of the one query that has a value now, in that query's colour.

    Args:
        queries: query, name, colour; the last one is asked for how the run ended.
    """
    panel = tile("", unit=unit, missing=missing, words=words)
    panel["targets"] = [
        {**_target(expression, name, i, instant=True), "format": "time_series"}
        for i, (expression, name, _) in enumerate(queries)
    ]
    for _, name, color in queries:
        _override(panel, name, _fixed(color))
    return panel


def stragglers_cost() -> Panel:
    """Return the tile of what the rank that costs most costs, by its name."""
    panel = tile(
        q.worst_rank("run_rank:ddpdebug_straggler_cost:worst5m"),
        unit="percentunit",
        steps=((None, GOOD), (0.1, WARN)),
        missing="not known yet",
    )
    return named(panel, "rank {{rank}}", q.END)


def lines(
    queries: Queries,
    *,
    unit: str = "short",
    missing: str = _NO_DATA,
    stacked: bool = False,
    zero: bool = True,
    share: bool = False,
    count: bool = False,
) -> Panel:
    """Return lines over time; the legend shows the last and the largest value.

    Args:
        share: the lines are shares of a whole, drawn from 0 to 1 whatever they are.
        count: the lines are whole numbers, for which an axis ends at 1 where all are 0.
    """
    look: dict[str, Any] = {"lineWidth": 1, "fillOpacity": 0, "spanNulls": False, "showPoints": "auto"}
    if stacked:
        look |= {"fillOpacity": 25, "stacking": {"mode": "normal"}}
    if count:
        look["axisSoftMax"] = 1
    nan = {"type": "special", "options": {"match": "nan", "result": {"text": "NaN", "color": BAD, "index": 0}}}
    defaults: dict[str, Any] = {"unit": unit, "noValue": missing, "color": {"mode": "palette-classic"}, "custom": look}
    defaults |= {"mappings": [nan], **({"min": 0} if zero else {}), **({"max": 1} if share else {})}
    # a list needs a line for all where a table needs one for each, and hides those that have no room
    options = {
        "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True, "calcs": ["last", "max"]},
        "tooltip": {"mode": "multi", "sort": "desc"},
    }
    targets = [_target(expression, name, i) for i, (expression, name) in enumerate(queries)]
    panel = _panel("timeseries", targets, defaults, options)
    named = [name for _, name in queries]
    if "{{phase}}" in named:
        named += ["data", "forward", "optimizer", "other"]
    elif "{{severity}}" in named:
        named = [str(name) for name, _, _ in SEVERITIES]
    for name in named:
        if name in _LINE_COLORS:
            _override(panel, name, _fixed(_LINE_COLORS[name]))
    return panel


def states(queries: Queries, *, words: Words, missing: str) -> Panel:
    """Return states over time, a row for each series; where there is no value, as after the end of a run, is a gap.

    Colours come from the words: with thresholds and merged values, Grafana writes thresholds instead of words.
    """
    defaults = {"unit": "none", "noValue": missing, "mappings": _words(words), **_fixed(OVER)}
    options = {
        "mergeValues": True,
        "showValue": "auto",
        "rowHeight": 0.9,
        "alignValue": "left",
        "perPage": 20,
        "legend": {"displayMode": "list", "placement": "bottom", "showLegend": False, "calcs": []},
        "tooltip": {"mode": "single", "sort": "asc"},
    }
    targets = [_target(expression, name, i) for i, (expression, name) in enumerate(queries)]
    look = {"fillOpacity": 80, "lineWidth": 0}
    return _panel("state-timeline", targets, {**defaults, "custom": look}, options)


def density(expression: str) -> Panel:
    """Return how many ranks' steps took how long: as legible for 512 ranks as for 8."""
    colors = {"mode": "scheme", "scheme": "Viridis", "steps": 64, "exponent": 0, "fill": "", "reverse": False}
    options = {
        "calculate": False,
        "yAxis": {"unit": "s"},
        "color": colors,
        "cellGap": 1,
        "exemplars": {"color": "rgba(255,0,255,0.7)"},
        "filterValues": {"le": 1e-09},
        "legend": {"show": True},
        "selectionMode": "x",
        "showValue": "auto",
        "tooltip": {"mode": "single"},
    }
    target = {**_target(expression, "{{le}}", 0), "format": "heatmap"}
    return _panel("heatmap", [target], {"unit": "short", "noValue": _NO_DATA, "custom": {}}, options)


def listing(
    queries: Sequence[str],
    *,
    names: dict[str, str],
    sort: str | None = None,
    rising: bool = False,
    hidden: Sequence[str] = (),
    units: Mapping[str, str] | None = None,
    missing: str = "nothing to list",
) -> Panel:
    """Return a table of instant values, one row for each set of labels.

    Args:
        names: field or label -> title of its column, in the order of the columns.
        sort: title of the column by which it is sorted, largest first.
        rising: smallest first.
        hidden: labels that tell rows apart and are not shown.
        units: title of a column -> unit.
    """
    look = {"align": "auto", "filterable": True, "inspect": False}
    options: dict[str, Any] = {
        "showHeader": True,
        "showTypeIcons": False,
        "cellHeight": "sm",
        "frameIndex": 0,
    }
    if sort is not None:
        options["sortBy"] = [{"displayName": sort, "desc": not rising}]
    targets = [_target(expression, "", i, instant=True) for i, expression in enumerate(queries)]
    panel = _panel("table", targets, {"unit": "short", "noValue": missing, "custom": look}, options)
    order = {name: i for i, name in enumerate(names)}
    fields = ("Time", "Value", *(f"Value #{target['refId']}" for target in targets), *hidden)
    organized = {
        "excludeByName": {name: True for name in fields if name not in names},
        "indexByName": order,
        "renameByName": names,
    }
    panel["transformations"] = [{"id": "merge", "options": {}}, {"id": "organize", "options": organized}]
    for name, title in names.items():
        # the text of an empty panel is none for an empty cell; a run's id is text, also where it has digits only
        unit = (units or {}).get(title, "short" if name.startswith("Value") else "string")
        _override(panel, title, {"noValue": "-", "unit": unit})
    return panel


def linked(panel: Panel, title: str, uid: str, label: str | None = None) -> Panel:
    """Let a click lead to another dashboard, about the same run and, with `label`, that rank."""
    rank = "${__field.labels." + label + "}" if label else "$rank"
    url = f"/d/{uid}?var-datasource=${{datasource}}&var-run=${{run}}&var-rank={rank}&${{__url_time_range}}"
    usual = {"asDropdown": False, "icon": "", "includeVars": False, "keepTime": False, "placement": "inControlsMenu"}
    link = {**usual, "tags": [], "targetBlank": False, "tooltip": "", "type": "link", "title": title, "url": url}
    panel["fieldConfig"]["defaults"]["links"] = [link]
    return panel


def worded(panel: Panel, column: str, words: Words, missing: str = "-") -> Panel:
    """Show a column of a table as words on coloured ground."""
    values = {
        "mappings": [*_words(words), _unknown(missing, words)],
        "custom.cellOptions": {"type": "color-background"},
        **_fixed(OVER),
        "custom.displayMode": "color-background",  # Grafana before 10
    }
    _override(panel, column, values)
    return panel


def opens(panel: Panel, column: str, title: str, url: str) -> Panel:
    """Let the values of a column lead somewhere."""
    _override(panel, column, {"links": [{"title": title, "url": url}]})
    return panel


def board_url(uid: str) -> str:
    """Return the address of another dashboard about the run whose id is the value that is clicked."""
    return f"/d/{uid}?var-datasource=${{datasource}}&var-run=${{__value.raw}}&${{__url_time_range}}"


def alerts(selector: str, *, run: bool = False) -> Panel:
    """Return a table of the alerts that fire, each of which leads to its runbook.

    Args:
        run: the alerts are of several runs, which are named.
    """
    columns = {"alertname": "Alert", "severity": "Severity"}
    columns |= {"run": "Name", "run_id": "Run"} if run else {}
    columns |= {"what": "What", "code": "Code", "rank": "Rank"}
    panel = listing([f"max by ({', '.join(columns)}) ({selector})"], names=columns, sort="Severity", missing="none")
    return opens(
        worded(panel, "Severity", SEVERITIES), "Alert", "open the runbook", "${docs}runbooks/${__value.raw}.md"
    )
