"""What the dashboards are made of: one look, one meaning for each colour, explicit ids. Needs grafana-foundation-sdk.

Colours are those of Okabe and Ito, which colour-blind people can tell apart; every state also has a word.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

from grafana_foundation_sdk.builders import (
    common,
    dashboard as dashboards,
    heatmap,
    prometheus,
    stat,
    statetimeline,
    table,
    timeseries,
)
from grafana_foundation_sdk.models import common as commons, dashboard as models
from grafana_foundation_sdk.models.heatmap import HeatmapColorMode

from tools.dashboards.promql import JOIN, RUN, chosen

GOOD, WARN, BAD, UNKNOWN, NEUTRAL, SECOND = "#009E73", "#E69F00", "#D55E00", "#999999", "#0072B2", "#56B4E9"
TAG = "ddpdebug"
_SOURCE = models.DataSourceRef(type_val="prometheus", uid="$datasource")
_WIDTH = 24
_USUAL = 12, 8
_NO_DATA = "no data in this time range"
#: Value, its word, its colour.
Words = Sequence[tuple[float, str, str]]
#: Query, name of its series.
Queries = Sequence[tuple[str, str]]


def number_of(uid: str, title: str) -> int:
    """Return the id of a panel: it stays when others are added or moved, so that links to it hold."""
    return zlib.crc32(f"{uid}/{title}".encode()) % 1_000_000 + 1


class Board:
    """A dashboard that is filled from left to right and from top to bottom."""

    def __init__(self, uid: str, title: str, description: str, *, run: bool = True) -> None:
        self.uid = uid
        self._x = self._y = self._tallest = 0
        self._size = _USUAL
        self._made = (
            dashboards.Dashboard(f"ddpdebug / {title}")
            .uid(uid)
            .description(description)
            .tags([TAG])
            .readonly()
            .timezone("browser")
            .time("now-1h", "now")
            .refresh("10s")
            .tooltip(models.DashboardCursorSync.CROSSHAIR)
            .link(
                dashboards.DashboardLink("ddpdebug")
                .type(models.DashboardLinkType.DASHBOARDS)
                .tags([TAG])
                .as_dropdown(True)
                .include_vars(True)
                .keep_time(True)
            )
            .with_variable(dashboards.DatasourceVariable("datasource").label("Data source").type("prometheus"))
        )
        if run:
            self._made.with_variable(_run_variable()).with_variable(_rank_variable())
            self._made.annotation(_incidents()).annotation(_pushed())

    def build(self) -> models.Dashboard:
        """Return the dashboard."""
        made = self._made.build()
        for entry in (*(made.links or ()), *(made.annotations.list_val or () if made.annotations else ())):
            entry.placement = None  # not into a menu, where nobody sees them
        return made

    def row(self, title: str) -> None:
        """Begin a new part, with panels of the usual size."""
        self._break()
        self._size = _USUAL
        row = dashboards.Row(title).id(number_of(self.uid, f"row {title}")).grid_pos(_at(0, self._y, _WIDTH, 1))
        self._made.with_row(row)
        self._y += 1

    def size(self, width: int, height: int) -> None:
        """Set the size of the next panels, in units of Grafana's grid: it has 24 columns."""
        self._size = width, height

    def add(self, panel: Any, title: str, description: str, *, width: int = 0, height: int = 0) -> None:
        """Add a panel; its description says what it means and what to do."""
        width, height = width or self._size[0], height or self._size[1]
        if self._x + width > _WIDTH:
            self._break()
        panel.title(title).description(description).datasource(_SOURCE).id(number_of(self.uid, title))
        self._made.with_panel(panel.grid_pos(_at(self._x, self._y, width, height)))
        self._x += width
        self._tallest = max(self._tallest, height)

    def _break(self) -> None:
        self._x, self._y, self._tallest = 0, self._y + self._tallest, 0


def _at(x: int, y: int, width: int, height: int) -> models.GridPos:
    return models.GridPos(x=x, y=y, w=width, h=height)


def _run_variable() -> dashboards.QueryVariable:
    return (
        dashboards.QueryVariable("run")
        .label("Run")
        .query("label_values(ddpdebug_run_info, run_id)")
        .datasource(_SOURCE)
        .refresh(models.VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(models.VariableSort.DISABLED)
    )


def _rank_variable() -> dashboards.QueryVariable:
    seen = f"last_over_time(ddpdebug_step[$__range]) {JOIN} last_over_time({RUN}[$__range])"
    query = f"query_result(max by (rank) ({seen}))"
    return (
        dashboards.QueryVariable("rank")
        .label("Rank")
        .query(query)
        .regex('/rank="([^"]+)"/')
        .datasource(_SOURCE)
        .refresh(models.VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(models.VariableSort.NUMERICAL_ASC)
        .multi(True)
        .include_all(True)
        .all_value(".+")
        .current(models.VariableOption(selected=True, text="All", value="$__all"))
    )


def _incidents() -> dashboards.AnnotationQuery:
    labels = "incident, code, severity, subject, culprits"
    times = chosen("ddpdebug_incident_timestamp_seconds")
    return (
        dashboards.AnnotationQuery()
        .name("Findings")
        .datasource(_SOURCE)
        .enable(True)
        .icon_color(BAD)
        .expr(f"1000 * max by ({labels}) ({times})")
        .use_value_for_time(True)
        .step("10s")
        .title_format("{{code}} {{severity}}")
        .text_format("{{subject}} · ranks {{culprits}} · ddpdebug explain {{code}}")
        .tag_keys("code,severity")
    )


def _pushed() -> dashboards.AnnotationQuery:
    """Show the annotations that ddpdebug sends to Grafana itself."""
    target = dashboards.AnnotationTarget().limit(100).match_any(False).type("tags").tags([TAG, "run:$run"])
    return (
        dashboards.AnnotationQuery()
        .name("Findings sent to Grafana")
        .datasource(models.DataSourceRef(type_val="datasource", uid="-- Grafana --"))
        .enable(False)
        .icon_color(BAD)
        .type("tags")
        .target(target)  # type: ignore[arg-type]  # its schema has no type for this one yet
    )


# --- queries ----------------------------------------------------------------------------------------------------------


def _target(expression: str, name: str, number: int, *, instant: bool = False) -> prometheus.Dataquery:
    query = prometheus.Dataquery().expr(expression).legend_format(name).ref_id(chr(ord("A") + number))
    query.datasource(_SOURCE)
    return query.instant().format(_format("table")) if instant else query.range()


def _format(name: str) -> Any:
    from grafana_foundation_sdk.models.prometheus import PromQueryFormat  # noqa: PLC0415 - one name of many

    return PromQueryFormat(name)


def _words(words: Words, missing: str) -> list[Any]:
    options = {
        f"{value:g}": models.ValueMappingResult(text=text, color=color, index=i)
        for i, (value, text, color) in enumerate(words)
    }
    nothing = models.DashboardSpecialValueMapOptions(
        match=models.SpecialValueMatch.NULL_AND_NAN,
        result=models.ValueMappingResult(text=missing, color=UNKNOWN, index=len(words)),
    )
    return [models.ValueMap(options=options), models.SpecialValueMap(options=nothing)]


def _steps(*steps: tuple[float | None, str]) -> dashboards.ThresholdsConfig:
    made = [models.Threshold(value=value, color=color) for value, color in steps]
    return dashboards.ThresholdsConfig().mode(models.ThresholdsMode.ABSOLUTE).steps(made)


# --- panels -----------------------------------------------------------------------------------------------------------


def tile(
    expression: str,
    *,
    words: Words = (),
    steps: Sequence[tuple[float | None, str]] = ((None, NEUTRAL),),
    unit: str = "short",
    missing: str = "no data",
    decimals: int = 0,
) -> stat.Panel:
    """Return a verdict: a word or a number on a coloured ground, read from afar."""
    return (
        stat.Panel()
        .with_target(_target(expression, "", 0))
        .reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]))
        .color_mode(commons.BigValueColorMode.BACKGROUND)
        .graph_mode(commons.BigValueGraphMode.NONE)
        .mappings(_words(words, missing))
        .thresholds(_steps(*steps))
        .color_scheme(dashboards.FieldColor().mode(models.FieldColorModeId.THRESHOLDS))
        .unit(unit)
        .decimals(decimals)
        .no_value(missing)
    )


def lines(
    queries: Queries, *, unit: str = "short", missing: str = _NO_DATA, stacked: bool = False, zero: bool = True
) -> timeseries.Panel:
    """Return lines over time; the legend shows the last and the largest value."""
    panel = (
        timeseries.Panel()
        .unit(unit)
        .no_value(missing)
        .line_width(1)
        .fill_opacity(25 if stacked else 0)
        .span_nulls(False)
        .show_points(commons.VisibilityMode.AUTO)
        .color_scheme(dashboards.FieldColor().mode(models.FieldColorModeId.PALETTE_CLASSIC))
        .legend(
            common.VizLegendOptions()
            .display_mode(commons.LegendDisplayMode.TABLE)
            .placement(commons.LegendPlacement.BOTTOM)
            .show_legend(True)
            .calcs(["lastNotNull", "max"])
        )
        .tooltip(common.VizTooltipOptions().mode(commons.TooltipDisplayMode.MULTI).sort(commons.SortOrder.DESCENDING))
    )
    for i, (expression, name) in enumerate(queries):
        panel.with_target(_target(expression, name, i))
        if name in _LINE_COLORS:
            fixed = {"mode": "fixed", "fixedColor": _LINE_COLORS[name]}
            panel.override_by_name(name, [models.DynamicConfigValue(id_val="color", value=fixed)])
    if stacked:
        panel.stacking(common.StackingConfig().mode(commons.StackingMode.NORMAL))
    if zero:
        panel.min(0)
    return panel


#: Series that mean the same on every dashboard have the same colour.
_LINE_COLORS = {
    "highest rank": BAD,
    "median rank": NEUTRAL,
    "lowest rank": SECOND,
    "data": "#CC79A7",
    "forward": SECOND,
    "backward": NEUTRAL,
    "optimizer": WARN,
    "rest": UNKNOWN,
    "limit": BAD,
}


def states(queries: Queries, *, words: Words, missing: str) -> statetimeline.Panel:
    """Return states over time, a row for each series."""
    steps = [(None if i == 0 else value, color) for i, (value, _, color) in enumerate(words)]
    panel = (
        statetimeline.Panel()
        .mappings(_words(words, "unknown"))
        .thresholds(_steps(*steps))
        .color_scheme(dashboards.FieldColor().mode(models.FieldColorModeId.THRESHOLDS))
        .merge_values(True)
        .show_value(commons.VisibilityMode.AUTO)
        .row_height(0.9)
        .line_width(0)
        .fill_opacity(80)
        .unit("none")
        .no_value(missing)
        .legend(
            common.VizLegendOptions()
            .show_legend(True)
            .display_mode(commons.LegendDisplayMode.LIST)
            .placement(commons.LegendPlacement.BOTTOM)
        )
    )
    for i, (expression, name) in enumerate(queries):
        panel.with_target(_target(expression, name, i))
    return panel


def density(expression: str) -> heatmap.Panel:
    """Return how many ranks' steps took how long: as legible for 512 ranks as for 8."""
    query = _target(expression, "{{le}}", 0).format(_format("heatmap"))
    return (
        heatmap.Panel()
        .with_target(query)
        .calculate(False)
        .y_axis(heatmap.YAxisConfig().unit("s"))
        .color(heatmap.HeatmapColorOptions().mode(HeatmapColorMode.SCHEME).scheme("Viridis").steps(64))
        .unit("short")
        .no_value(_NO_DATA)
    )


def listing(
    queries: Sequence[str],
    *,
    names: dict[str, str],
    sort: str | None = None,
    units: dict[str, str] | None = None,
    missing: str = "nothing to list",
) -> table.Panel:
    """Return a table of instant values, one row for each set of labels.

    Args:
        names: field or label -> title of its column, in the order of the columns.
        sort: title of the column by which it is sorted, largest first.
        units: title of a column -> unit.
    """
    panel = table.Panel().no_value(missing).unit("short").show_header(True).filterable(True)
    for i, expression in enumerate(queries):
        panel.with_target(_target(expression, "", i, instant=True))
    if len(queries) > 1:
        panel.with_transformation(models.DataTransformerConfig(id_val="merge", options={}))
    organized = {
        "excludeByName": {"Time": True},
        "indexByName": {name: i for i, name in enumerate(names)},
        "renameByName": names,
    }
    panel.with_transformation(models.DataTransformerConfig(id_val="organize", options=organized))
    for title, unit in (units or {}).items():
        panel.override_by_name(title, [models.DynamicConfigValue(id_val="unit", value=unit)])
    if sort is not None:
        panel.sort_by([common.TableSortByFieldState().display_name(sort).desc(True)])
    return panel


def linked(panel: Any, title: str, uid: str, label: str | None = None) -> Any:
    """Let a click lead to another dashboard, about the same run and, with `label`, that rank."""
    rank = "${__field.labels." + label + "}" if label else "$rank"
    url = f"/d/{uid}?var-datasource=${{datasource}}&var-run=${{run}}&var-rank={rank}&${{__url_time_range}}"
    return panel.data_links([dashboards.DashboardLink(title).url(url)])


def worded(panel: Any, column: str, words: Words) -> Any:
    """Show a column of a table as words on coloured ground."""
    mappings = [mapping.to_json() for mapping in _words(words, "unknown")]
    values: dict[str, Any] = {
        "mappings": mappings,
        "custom.cellOptions": {"type": "color-background"},
        "color": {"mode": "thresholds"},
    }
    values["custom.displayMode"] = "color-background"  # Grafana before 10
    made = [models.DynamicConfigValue(id_val=name, value=value) for name, value in values.items()]
    return panel.override_by_name(column, made)


def opens(panel: Any, column: str, uid: str) -> Any:
    """Let the values of a column lead to the dashboard of that run."""
    url = f"/d/{uid}?var-datasource=${{datasource}}&var-run=${{__value.raw}}&${{__url_time_range}}"
    link = {"title": "open this run", "url": url}
    return panel.override_by_name(column, [models.DynamicConfigValue(id_val="links", value=[link])])
