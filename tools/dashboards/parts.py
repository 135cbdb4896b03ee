"""The parts of a dashboard as JSON values of Grafana's: one look, one meaning for each colour, explicit ids.

Colours are those of Okabe and Ito, which colour-blind people can tell apart; every state also has a word.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

from tools.dashboards.promql import JOIN, RUN, chosen

GOOD, WARN, BAD, UNKNOWN, NEUTRAL, SECOND = "#009E73", "#E69F00", "#D55E00", "#999999", "#0072B2", "#56B4E9"
TAG = "ddpdebug"
_SOURCE = {"type": "prometheus", "uid": "$datasource"}
_WIDTH = 24
_USUAL = 12, 8
_NO_DATA = "no data in this time range"
#: Series that mean the same on every dashboard have the same colour.
_LINE_COLORS = {
    "highest rank": BAD,
    "median rank": NEUTRAL,
    "lowest rank": SECOND,
    "data": "#CC79A7",
    "forward": SECOND,
    "backward": NEUTRAL,
    "optimizer": WARN,
}
#: A panel without title, place and id: JSON values.
Panel = dict[str, Any]
#: Value, its word, its colour.
Words = Sequence[tuple[float, str, str]]
#: From which value on, which colour; None is from the beginning.
Steps = Sequence[tuple[float | None, str]]
#: Query, name of its series.
Queries = Sequence[tuple[str, str]]


class Board:
    """A dashboard that is filled from left to right and from top to bottom."""

    def __init__(self, uid: str, title: str, description: str, *, run: bool = True) -> None:
        self.uid = uid
        self._x = self._y = self._tallest = 0
        self._size = _USUAL
        self._panels: list[Panel] = []
        variables = [_variable("datasource", "Data source", "datasource", query="prometheus")]
        link = {"asDropdown": True, "includeVars": True, "keepTime": True, "type": "dashboards", "tags": [TAG]}
        self._made = {
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
            "templating": {"list": [*variables, *_RUN_VARIABLES] if run else variables},
            "annotations": {"list": _ANNOTATIONS} if run else {},
            "panels": self._panels,
        }

    def text(self) -> str:
        """Return the dashboard as the text of its file."""
        return json.dumps(self._made, sort_keys=True, indent=2) + "\n"

    def row(self, title: str) -> None:
        """Begin a new part, with panels of the usual size."""
        self._break()
        self._size = _USUAL
        self._place({"type": "row", "title": title, "collapsed": False, "panels": []}, f"row {title}", _WIDTH, 1)
        self._y += 1

    def size(self, width: int, height: int) -> None:
        """Set the size of the next panels, in units of Grafana's grid: it has 24 columns."""
        self._size = width, height

    def add(self, panel: Panel, title: str, description: str, *, width: int = 0, height: int = 0) -> None:
        """Add a panel; its description says what it means and what to do."""
        width, height = width or self._size[0], height or self._size[1]
        if self._x + width > _WIDTH:
            self._break()
        about = {"title": title, "description": description, "datasource": _SOURCE}
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
    usual = {"allowCustomValue": True, "auto": False, "auto_count": 30, "auto_min": "10s", "skipUrlSync": False}
    return {**usual, "name": name, "label": label, "type": kind, "includeAll": False, "multi": False, **more}


_SEEN = f"last_over_time(ddpdebug_step[$__range]) {JOIN} last_over_time({RUN}[$__range])"
_RELOADED = {"datasource": _SOURCE, "refresh": 2}  # when the time range changes
_RUN_VARIABLES = (
    _variable("run", "Run", "query", query="label_values(ddpdebug_run_info, run_id)", sort=0, **_RELOADED),
    _variable(
        "rank",
        "Rank",
        "query",
        query=f"query_result(max by (rank) ({_SEEN}))",
        regex='/rank="([^"]+)"/',
        sort=3,  # by number
        multi=True,
        includeAll=True,
        allValue=".+",
        current={"selected": True, "text": "All", "value": "$__all"},
        **_RELOADED,
    ),
)
_TIMES = chosen("ddpdebug_incident_timestamp_seconds")
_ANNOTATIONS = [
    {
        "name": "Findings",
        "datasource": _SOURCE,
        "enable": True,
        "expr": f"1000 * max by (incident, code, severity, subject, culprits) ({_TIMES})",
        "useValueForTime": True,
        "step": "10s",
        "titleFormat": "{{code}} {{severity}}",
        "textFormat": "{{subject}} · ranks {{culprits}} · ddpdebug explain {{code}}",
        "tagKeys": "code,severity",
        "builtIn": 0,
        "hide": False,
        "iconColor": BAD,
    },
    {
        "name": "Findings sent to Grafana",
        "datasource": {"type": "datasource", "uid": "-- Grafana --"},
        "enable": False,
        "type": "tags",
        "target": {"type": "tags", "tags": [TAG, "run:$run"], "limit": 100, "matchAny": False},
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


def _words(words: Words, missing: str) -> list[Any]:
    options = {f"{value:g}": {"text": text, "color": color, "index": i} for i, (value, text, color) in enumerate(words)}
    nothing = {"match": "null+nan", "result": {"text": missing, "color": UNKNOWN, "index": len(words)}}
    return [{"type": "value", "options": options}, {"type": "special", "options": nothing}]


def _coloured(steps: Steps) -> dict[str, Any]:
    """Return the colour of a field by its value."""
    made = [{"value": value, "color": color} for value, color in steps]
    return {"color": {"mode": "thresholds"}, "thresholds": {"mode": "absolute", "steps": made}}


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
    """Return a verdict: a word or a number on a coloured ground, read from afar."""
    defaults = {"unit": unit, "decimals": decimals, "noValue": missing, "mappings": _words(words, missing)}
    options = {
        "reduceOptions": {"calcs": ["lastNotNull"]},
        "colorMode": "background",
        "graphMode": "none",
        "justifyMode": "auto",
        "orientation": "auto",
        "percentChangeColorMode": "standard",
        "showPercentChange": False,
        "textMode": "auto",
        "wideLayout": True,
    }
    return _panel("stat", [_target(expression, "", 0)], {**defaults, **_coloured(steps)}, options)


def lines(
    queries: Queries, *, unit: str = "short", missing: str = _NO_DATA, stacked: bool = False, zero: bool = True
) -> Panel:
    """Return lines over time; the legend shows the last and the largest value."""
    look: dict[str, Any] = {"lineWidth": 1, "fillOpacity": 0, "spanNulls": False, "showPoints": "auto"}
    if stacked:
        look |= {"fillOpacity": 25, "stacking": {"mode": "normal"}}
    defaults = {"unit": unit, "noValue": missing, "color": {"mode": "palette-classic"}, "custom": look}
    options = {
        "legend": {"displayMode": "table", "placement": "bottom", "showLegend": True, "calcs": ["lastNotNull", "max"]},
        "tooltip": {"mode": "multi", "sort": "desc"},
    }
    targets = [_target(expression, name, i) for i, (expression, name) in enumerate(queries)]
    panel = _panel("timeseries", targets, {**defaults, **({"min": 0} if zero else {})}, options)
    for _, name in queries:
        if name in _LINE_COLORS:
            _override(panel, name, {"color": {"mode": "fixed", "fixedColor": _LINE_COLORS[name]}})
    return panel


def states(queries: Queries, *, words: Words, missing: str) -> Panel:
    """Return states over time, a row for each series."""
    steps: Steps = [(None if i == 0 else value, color) for i, (value, _, color) in enumerate(words)]
    defaults = {"unit": "none", "noValue": missing, "mappings": _words(words, "unknown")}
    options = {
        "mergeValues": True,
        "showValue": "auto",
        "rowHeight": 0.9,
        "alignValue": "left",
        "perPage": 20,
        "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True, "calcs": []},
        "tooltip": {"mode": "single", "sort": "asc"},
    }
    targets = [_target(expression, name, i) for i, (expression, name) in enumerate(queries)]
    look = {"fillOpacity": 80, "lineWidth": 0}
    return _panel("state-timeline", targets, {**defaults, **_coloured(steps), "custom": look}, options)


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
    units: Mapping[str, str] | None = None,
    missing: str = "nothing to list",
) -> Panel:
    """Return a table of instant values, one row for each set of labels.

    Args:
        names: field or label -> title of its column, in the order of the columns.
        sort: title of the column by which it is sorted, largest first.
        units: title of a column -> unit.
    """
    look = {"align": "auto", "filterable": True, "inspect": False}
    options: dict[str, Any] = {
        "showHeader": True,
        "showTypeIcons": False,
        "cellHeight": "sm",
        "footer": {"countRows": False, "reducer": [], "show": False},
        "frameIndex": 0,
    }
    if sort is not None:
        options["sortBy"] = [{"displayName": sort, "desc": True}]
    targets = [_target(expression, "", i, instant=True) for i, expression in enumerate(queries)]
    panel = _panel("table", targets, {"unit": "short", "noValue": missing, "custom": look}, options)
    order = {name: i for i, name in enumerate(names)}
    organized = {"excludeByName": {"Time": True}, "indexByName": order, "renameByName": names}
    panel["transformations"] = [{"id": "merge", "options": {}}, {"id": "organize", "options": organized}]
    for title, unit in (units or {}).items():
        _override(panel, title, {"unit": unit})
    return panel


def linked(panel: Panel, title: str, uid: str, label: str | None = None) -> Panel:
    """Let a click lead to another dashboard, about the same run and, with `label`, that rank."""
    rank = "${__field.labels." + label + "}" if label else "$rank"
    url = f"/d/{uid}?var-datasource=${{datasource}}&var-run=${{run}}&var-rank={rank}&${{__url_time_range}}"
    usual = {"asDropdown": False, "icon": "", "includeVars": False, "keepTime": False, "placement": "inControlsMenu"}
    link = {**usual, "tags": [], "targetBlank": False, "tooltip": "", "type": "link", "title": title, "url": url}
    panel["fieldConfig"]["defaults"]["links"] = [link]
    return panel


def worded(panel: Panel, column: str, words: Words) -> Panel:
    """Show a column of a table as words on coloured ground."""
    values = {
        "mappings": _words(words, "unknown"),
        "custom.cellOptions": {"type": "color-background"},
        "color": {"mode": "thresholds"},
        "custom.displayMode": "color-background",  # Grafana before 10
    }
    _override(panel, column, values)
    return panel


def opens(panel: Panel, column: str, uid: str) -> Panel:
    """Let the values of a column lead to the dashboard of that run."""
    url = f"/d/{uid}?var-datasource=${{datasource}}&var-run=${{__value.raw}}&${{__url_time_range}}"
    _override(panel, column, {"links": [{"title": "open this run", "url": url}]})
    return panel
