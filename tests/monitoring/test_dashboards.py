"""The dashboards: fresh, linted, and full of data when a real Prometheus answers."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from machine import until

from ddpdebug.grafana.dashboards import NAMES, shipped
from tools.dashboards import built
from tools.documentation import metric_names

ROOT = Path(__file__).parent.parent.parent
DASHBOARDS = shipped()
UIDS = {board["uid"] for board in DASHBOARDS.values()}
_TYPES = {"timeseries", "stat", "table", "heatmap", "state-timeline"}
_COLORS = {"#009E73", "#E69F00", "#D55E00", "#999999", "#0072B2", "#56B4E9", "#CC79A7"}
_EXEMPLARS = {"color": "rgba(255,0,255,0.7)"}  # Grafana's default for heatmaps; there are no exemplars
#: Counters that are read as they are: what was found so far is the number that people ask for.
_ABSOLUTE = {"Findings so far", "All runs", "Critical findings, last hour"}


def panels(board: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the panels that show something."""
    yield from (panel for panel in board["panels"] if panel["type"] != "row")


def queries() -> Iterator[tuple[str, str, str, bool]]:
    """Yield dashboard, panel, expression, instant."""
    for name, board in DASHBOARDS.items():
        for panel in panels(board):
            for target in panel["targets"]:
                yield name, panel["title"], target["expr"], bool(target.get("instant"))
        for annotation in board.get("annotations", {}).get("list", []):
            if "expr" in annotation:
                yield name, f"annotation {annotation['name']}", annotation["expr"], False


def test_the_committed_dashboards_are_those_of_the_code() -> None:
    """`make dashboards` would change nothing."""
    for name, text in built().items():
        assert (ROOT / "dashboards" / name).read_text(encoding="utf-8") == text, f"{name} is stale: run make dashboards"


@pytest.mark.parametrize("name", NAMES)
def test_a_dashboard_keeps_the_rules_of_the_house(name: str) -> None:
    """Those of Grafana's dashboard-linter, and ours: read-only, stable ids, chosen data source, reloading variables."""
    board = DASHBOARDS[name]
    assert board["uid"] == f"ddpdebug-{name}"
    assert board.get("id") is None
    assert board["editable"] is False
    assert board["tags"] == ["ddpdebug"]
    assert "__inputs" not in board
    variables = {variable["name"]: variable for variable in board["templating"]["list"]}
    assert variables["datasource"]["type"] == "datasource"
    # job and instance have no variables: a run is chosen instead, which both belong to
    assert list(variables) == ["datasource"] if name == "fleet" else ["datasource", "run", "rank"]
    assert all(each["refresh"] == 2 for each in variables.values() if each["type"] == "query")
    ids = [panel["id"] for panel in board["panels"]]
    titles = [panel["title"] for panel in board["panels"]]
    assert len(set(ids)) == len(ids)
    assert len(set(titles)) == len(titles)
    assert all(link["tags"] == ["ddpdebug"] and link["includeVars"] for link in board["links"])


@pytest.mark.parametrize("name", NAMES)
def test_every_panel_says_what_it_means_and_what_nothing_means(name: str) -> None:
    """Title, description, unit, data source, a text for no data; kinds of panels that every Grafana since 8.3 has."""
    for panel in panels(DASHBOARDS[name]):
        assert panel["type"] in _TYPES, panel["title"]
        assert len(panel["description"]) > 60, panel["title"]
        assert panel["description"].endswith("."), panel["title"]
        assert panel["fieldConfig"]["defaults"]["unit"]
        assert panel["fieldConfig"]["defaults"]["noValue"]
        assert panel["targets"], panel["title"]
        for holder in (panel, *panel["targets"]):
            assert holder["datasource"] == {"type": "prometheus", "uid": "$datasource"}
        refs = [target["refId"] for target in panel["targets"]]
        assert len(set(refs)) == len(refs)


@pytest.mark.parametrize("name", NAMES)
def test_panels_do_not_overlap(name: str) -> None:
    """Nor do they leave the grid."""
    places = [panel["gridPos"] for panel in DASHBOARDS[name]["panels"]]
    assert all(p["x"] >= 0 and p["x"] + p["w"] <= 24 for p in places)
    for one, two in combinations(places, 2):
        apart = one["x"] + one["w"] <= two["x"] or two["x"] + two["w"] <= one["x"]
        assert apart or one["y"] + one["h"] <= two["y"] or two["y"] + two["h"] <= one["y"], (one, two)


def test_a_colour_means_the_same_everywhere() -> None:
    """One palette that colour-blind people can tell apart, and the same word always in the same colour."""
    words: dict[str, set[str]] = {}

    def walk(value: Any) -> None:
        if isinstance(value, dict):
            if isinstance(value.get("color"), str):
                assert value["color"] in _COLORS or value == _EXEMPLARS
                if "text" in value and value["color"] != "#999999":  # the grey of what is not known
                    words.setdefault(value["text"], set()).add(value["color"])
            for each in value.values():
                walk(each)
        elif isinstance(value, list):
            for each in value:
                walk(each)

    for board in DASHBOARDS.values():
        walk(board["panels"])
    assert {word: colors for word, colors in words.items() if len(colors) > 1} == {}
    assert words["agree"] != words["differ"]


def test_links_lead_to_dashboards_that_exist() -> None:
    """With the run, and with labels that the panel's query keeps."""
    seen = 0
    for board in DASHBOARDS.values():
        for panel in panels(board):
            for url in re.findall(r"/d/[^\"]+", str(panel)):
                seen += 1
                assert re.match(r"/d/([a-z-]+)\?", url)[1] in UIDS  # type: ignore[index]
                for label in re.findall(r"__field\.labels\.(\w+)", url):
                    assert all(re.search(rf"by \([^)]*\b{label}\b", t["expr"]) for t in panel["targets"])
    assert seen >= 6


def test_only_metrics_that_exist_are_drawn() -> None:
    """By the names that the exporter serves; and nearly all that it serves are drawn."""
    known = metric_names()
    drawn = {name for _, _, query, _ in queries() for name in re.findall(r"\bddpdebug_\w+", query)}
    assert drawn - known == set()
    assert {"ddpdebug_loss", "ddpdebug_rank_outvoted", "ddpdebug_nonfinite_steps_total"} <= drawn


@pytest.mark.parametrize(("name", "title", "query", "instant"), [*queries()], ids=lambda value: str(value)[:40])
def test_queries_follow_the_conventions(name: str, title: str, query: str, instant: bool) -> None:
    """Counters as rates over an interval that fits the scrapes, a chosen run, and one series for each thing."""
    assert set(re.findall(r"\brate\([^\[]*\[([^\]]+)\]", query)) <= {"$__rate_interval"}
    assert set(re.findall(r"\bincrease\([^\[]*\[([^\]]+)\]", query)) <= {"$__rate_interval", "5m", "1h"}
    if title not in _ABSOLUTE:
        plain = re.sub(r"\b(?:rate|increase)\([^\[]*\[[^\]]+\]\)", "", query)
        assert not re.search(r"ddpdebug_\w+_(?:total|bucket|sum|count)\b", plain)
    if name != "fleet":
        assert 'ddpdebug_run_info{run_id="$run"}' in query
    assert re.search(r"\b(max|min|sum|avg|count|quantile|topk)\b", query)
    assert not re.search(r"\b(job|instance)=", query)


@pytest.fixture(scope="module")
def fill() -> Any:
    """Put values in the place of Grafana's variables."""
    values = {"$__rate_interval": "10s", "$__range": "1m", "$__interval": "5s", "$run": "r1", "$rank": ".+"}

    def filled(query: str) -> str:
        for name, value in values.items():
            query = query.replace(name, value)
        assert "$" not in query
        return query

    return filled


def test_every_query_of_every_dashboard_returns_data(scraped: Any, fill: Any) -> None:
    """From a real Prometheus that scrapes the project's own exporter; what no row of this version can tell is left."""

    def empty() -> list[tuple[str, ...]]:
        left = []
        for name, title, query, instant in queries():
            found = scraped.query(fill(query)) if instant else scraped.range(fill(query), 30)
            if not found:
                left.append((name, title, query))
        return left

    until(lambda: not empty(), pause=1)  # a scrape may have come too late
    assert empty() == []


def test_every_variable_lists_what_there_is(scraped: Any, fill: Any) -> None:
    """The runs, and the ranks of the chosen run."""
    runs = scraped.get("/api/v1/label/run_id/values", **{"match[]": "ddpdebug_run_info"})["data"]
    assert runs == ["r1"]
    for name in set(NAMES) - {"fleet"}:
        variable = next(v for v in DASHBOARDS[name]["templating"]["list"] if v["name"] == "rank")
        inner = re.fullmatch(r"query_result\((.*)\)", variable["query"])
        assert inner
        ranks = partial(scraped.query, fill(inner[1]))
        assert until(lambda: {series["metric"]["rank"] for series in ranks()} == {"0", "1", "2", "3"})  # noqa: B023


def test_the_verdicts_are_right(scraped: Any, fill: Any) -> None:
    """Rank 2 is ill: it is outvoted, not finite, slow; nobody is missing."""
    tiles = {panel["title"]: panel["targets"][0]["expr"] for panel in panels(DASHBOARDS["overview"])}

    def value(title: str) -> float:
        series = scraped.query(fill(tiles[title]))
        return float(series[0]["value"][1]) if len(series) == 1 else float("nan")

    # a scrape may have come too late: each is waited for
    assert until(lambda: value("Ranks missing") == 0)
    assert until(lambda: value("Ranks agree") == 1)
    assert until(lambda: value("Gradients") >= 1)
    assert until(lambda: value("Numbers") >= 1)
    assert until(lambda: value("Slowest rank") == pytest.approx(0.05 / 0.06, rel=0.1))
    assert until(lambda: value("Overhead") == pytest.approx(0.012))
    assert until(lambda: value("Last step ago") < 10)
    minority = next(panel for panel in panels(DASHBOARDS["agreement"]) if panel["title"] == "Minority ranks")
    found = until(lambda: scraped.range(fill(minority["targets"][0]["expr"]), 10))
    assert [series["metric"] for series in found] == [{"rank": "2"}]


def test_gpu_metrics_of_another_exporter_join_by_the_name_of_the_gpu(scraped: Any) -> None:
    """As docs/monitoring.md says."""
    text = (ROOT / "docs" / "monitoring.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"```promql\n(.*?)```", text, re.DOTALL)
    device = 'label_replace(vector(87), "UUID", "GPU-2", "", "")'
    found = until(lambda: scraped.query(block.replace("DCGM_FI_DEV_GPU_UTIL", device)))
    assert [(series["metric"], series["value"][1]) for series in found] == [
        ({"UUID": "GPU-2", "rank": "2", "run": "r1", "run_id": "r1"}, "87")
    ]
