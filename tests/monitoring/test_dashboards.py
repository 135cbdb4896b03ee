"""The dashboards: fresh, linted, and full of data when a real Prometheus answers."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable, Iterator
from functools import partial, reduce
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
_COLORS = {"#009E73", "#F0E442", "#E69F00", "#B2182B", "#999999", "#0072B2", "#56B4E9", "#CC79A7"}
_VARIABLES = {"overview": ["run", "docs"], "fleet": ["docs"]}
_EXEMPLARS = {"color": "rgba(255,0,255,0.7)"}  # Grafana's default for heatmaps; there are no exemplars


def panels(board: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the panels that show something, also those of rows that are closed."""
    for panel in board["panels"]:
        yield from panel["panels"] if panel["type"] == "row" else (panel,)


def queries() -> Iterator[tuple[str, str, str, bool]]:
    """Yield dashboard, panel, expression, instant."""
    for name, board in DASHBOARDS.items():
        for panel in panels(board):
            for target in panel["targets"]:
                yield name, panel["title"], target["expr"], bool(target.get("instant"))
        for annotation in board.get("annotations", {}).get("list", []):
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
    assert list(variables) == ["datasource", *_VARIABLES.get(name, ["run", "rank"])]
    assert all(each["refresh"] == 2 for each in variables.values() if each["type"] == "query")
    everything = [*board["panels"], *(panel for row in board["panels"] for panel in row.get("panels", ()))]
    ids = [panel["id"] for panel in everything]
    titles = [panel["title"] for panel in everything]
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


def of_series(board: str, title: str, series: dict[str, str], expected: list[dict[str, float]]) -> dict[str, Any]:
    """Return a case for promtool: what the queries of a panel say after an hour of a run `r` with these series."""
    (panel,) = (panel for panel in panels(DASHBOARDS[board]) if panel["title"] == title)
    values = {"$__rate_interval": "4m", "$__range": "1h", "$run": "r", "$rank": ".+"}
    queries = [
        reduce(lambda text, pair: text.replace(*pair), values.items(), str(target["expr"]))
        for target in panel["targets"]
    ]
    found = [
        {
            "expr": f"round({query}, 0.001)",
            "eval_time": "60m",
            "exp_samples": [{"labels": labels, "value": value} for labels, value in samples.items()],
        }
        for query, samples in zip(queries, expected, strict=True)
    ]
    inputs = [{"series": name, "values": f"{line}x60"} for name, line in series.items()]
    return {"interval": "1m", "input_series": inputs, "promql_expr_test": found}


def test_what_queries_say_of_steps_that_are_not_timed(need: Callable[[str], str], tmp_path: Path) -> None:
    """A run that has stopped after its first step is red; of very many ranks rank 0 knows how long each step took."""
    since, mean, state = (
        f"run:ddpdebug_{name}{{run_id='r'}}"
        for name in ("seconds_since_step:min", "step_seconds:mean", "run_state:max")
    )
    stepping, late, stalled = ({"{}": 60.0}, {}, {}, {}), ({}, {"{}": 60.0}, {}, {}), ({}, {}, {"{}": 2000.0}, {})
    cases = [
        of_series(
            "overview", "Last step ago", {since: f"{seconds}+0", mean: f"{usual}+0", state: "1+0"}, list(expected)
        )
        for seconds, usual, expected in (
            (60, "NaN", stepping),
            (60, "200", stepping),
            (60, "1", late),
            (2000, "NaN", stalled),
            (2000, "1", stalled),
        )
    ]
    # rank 37 costs a fifth of each step; the rows of all ranks are there of one of 60
    grown = {("step_seconds_sum", 0): 12, ("step_seconds_sum", 37): 0.2, ("straggler_cost_seconds_total", 37): 2.4}
    series = {f"ddpdebug_{name}{{run_id='r', rank='{rank}'}}": f"0+{each}" for (name, rank), each in grown.items()}
    cases.append(of_series("ranks", "What slow ranks cost over time", series, [{'{rank="37"}': 0.2}, {}]))
    file = tmp_path / "cases.json"  # which is YAML
    file.write_text(json.dumps({"evaluation_interval": "1m", "tests": cases}))
    done = subprocess.run([need("promtool"), "test", "rules", file], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


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
    """By the names that the exporter serves, or that a rule records."""
    recorded = re.findall(r"record: (\S+)", (ROOT / "deploy" / "prometheus" / "rules" / "ddpdebug.yml").read_text())
    known = metric_names() | set(recorded)
    drawn = {name for _, _, query, _ in queries() for name in re.findall(r"(?:\w+:)?\bddpdebug_[\w:]+", query)}
    assert drawn - known == set()
    assert {"ddpdebug_loss", "run_rank_what:ddpdebug_rank_outvoted:max", "ddpdebug_nonfinite_steps_total"} <= drawn


@pytest.mark.parametrize(("name", "title", "query", "instant"), [*queries()], ids=lambda value: str(value)[:40])
def test_queries_follow_the_conventions(name: str, title: str, query: str, instant: bool) -> None:
    """Counters as rates over an interval that fits the scrapes, and the series of the chosen run, without a join."""
    assert set(re.findall(r"\b(?:rate|increase)\([^\[]*\[([^\]]+)\]", query)) <= {"$__rate_interval"}
    plain = re.sub(r"\b(?:rate|increase)\([^\[]*\[[^\]]+\]\)", "", query)
    assert not re.search(r"\bddpdebug_\w+_(?:total|bucket|sum|count)\b", plain)
    series = re.findall(r"(?:\b\w+:ddpdebug_|\bddpdebug_|\bALERTS)[\w:]*(\{[^}]*\})?", query)
    assert series
    assert all('run_id=~"$run"' in each for each in series) != (name == "fleet")
    assert re.search(r"\b(max|min|sum|avg|count|quantile|topk)\b", query)
    assert not re.search(r"\b(job|instance)\b|group_left|:\$__interval", query)


@pytest.fixture(scope="module")
def fill() -> Any:
    """Put values in the place of Grafana's variables."""
    values = {"$__rate_interval": "10s", "$__range": "1m", "$__interval": "5s", "$run": "r1", "$rank": ".+"}

    def filled(query: str) -> str:
        for name, value in values.items():
            query = query.replace(name, value)
        assert not re.search(r"\$[a-z_]", query)
        return query

    return filled


#: These list what there may be none of.
_MAY_BE_EMPTY = {"Firing alerts", "Who made the first NaN", "Missing ranks", "Waiting for others"}


@pytest.mark.smoke
def test_every_panel_of_every_dashboard_has_data(scraped: Any, fill: Any) -> None:
    """From a real Prometheus that scrapes the project's own exporter, with the rules; some queries may be empty."""

    def empty() -> list[tuple[str, str]]:
        found: dict[tuple[str, str], bool] = {}
        for name, title, query, instant in queries():
            any_ = scraped.query(fill(query)) if instant else scraped.range(fill(query), 30)
            found[name, title] = found.get((name, title), False) or bool(any_)
        return [panel for panel, full in found.items() if not full and panel[1] not in _MAY_BE_EMPTY]

    until(lambda: not empty(), pause=1)  # a scrape may have come too late
    assert empty() == []


@pytest.mark.smoke
def test_every_variable_lists_what_there_is(scraped: Any, fill: Any) -> None:
    """The runs by name and id, and the ranks of the chosen run."""
    for name in set(NAMES) - {"fleet"}:
        variables = {variable["name"]: variable for variable in DASHBOARDS[name]["templating"]["list"]}
        inner = re.fullmatch(r"query_result\((.*)\)", variables["run"]["query"])
        assert inner
        (series,) = until(partial(scraped.query, fill(inner[1])))
        # as Grafana writes a series, and as it reads the text and the value of a choice from it
        written = "{" + ", ".join(f'{label}="{value}"' for label, value in sorted(series["metric"].items())) + "} 1 2"
        pattern = variables["run"]["regex"].strip("/").replace("(?<", "(?P<")
        assert re.search(pattern, written).groupdict() == {"text": "r1 (r1)", "value": "r1"}  # type: ignore[union-attr]
        if "rank" in variables:
            inner = re.fullmatch(r"label_values\((.*), rank\)", variables["rank"]["query"])
            assert inner
            found = scraped.get("/api/v1/series", **{"match[]": fill(inner[1])})["data"]
            assert {labels["rank"] for labels in found} == {"0", "1", "2", "3"}


@pytest.mark.smoke
def test_the_verdicts_are_right(scraped: Any, fill: Any) -> None:
    """Rank 2 is ill: it is outvoted, slow, and its NaN are skipped; nobody is missing."""
    tiles = {panel["title"]: panel["targets"][0]["expr"] for panel in panels(DASHBOARDS["overview"])}

    def value(title: str) -> float:
        series = scraped.query(fill(tiles[title]))
        return float(series[0]["value"][1]) if len(series) == 1 else float("nan")

    # a scrape may have come too late: each is waited for
    assert until(lambda: value("Run state") == 2)
    assert until(lambda: value("Ranks missing") == 0)
    assert until(lambda: value("Ranks agree") == 1)
    assert until(lambda: value("Gradients") >= 1)
    assert until(lambda: value("Numbers") == 0)
    assert until(lambda: value("What stragglers cost") == pytest.approx(0.05 / 0.2, rel=0.3))
    assert until(lambda: value("Overhead") == pytest.approx(0.012))
    assert until(lambda: value("Last step ago") < 10)
    (costs,) = scraped.query(fill(tiles["What stragglers cost"]))
    assert costs["metric"] == {"rank": "2"}
    outvoted = next(panel for panel in panels(DASHBOARDS["agreement"]) if panel["title"] == "Outvoted ranks")
    found = until(lambda: scraped.range(fill(outvoted["targets"][0]["expr"]), 10))
    assert {series["metric"]["rank"] for series in found} == {"2"}


@pytest.mark.smoke
def test_gpu_metrics_of_another_exporter_join_by_the_name_of_the_gpu(scraped: Any) -> None:
    """As docs/monitoring.md says."""
    text = (ROOT / "docs" / "monitoring.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"```promql\n(.*?)```", text, re.DOTALL)
    device = 'label_replace(vector(87), "UUID", "GPU-2", "", "")'
    found = until(lambda: scraped.query(block.replace("DCGM_FI_DEV_GPU_UTIL", device)))
    assert [(series["metric"], series["value"][1]) for series in found] == [
        ({"UUID": "GPU-2", "rank": "2", "run": "r1", "run_id": "r1"}, "87")
    ]
