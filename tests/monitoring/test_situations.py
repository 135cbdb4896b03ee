"""The dashboards in five recorded situations: the words and colours that stand there, by a model of Grafana's panels.

No Grafana can be had where these tests run: Prometheus is real, and what Grafana makes of its answers is a model of it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
from grafana_model import Shown, bands, display, empty, legend, rows, tiles

from ddpdebug.grafana.dashboards import NAMES, shipped

DASHBOARDS = shipped()
GREEN, LIGHT, YELLOW, ORANGE, RED, BLUE, GREY = (
    "#009E73", "#56B4E9", "#F0E442", "#E69F00", "#B2182B", "#0072B2", "#999999",
)  # fmt: skip
_SCRAPE = 15  # seconds, as Grafana has it where nothing else is said
_HOUR = 3600


def panels(name: str) -> Iterator[dict[str, Any]]:
    """Yield the panels that show something, also those of rows that are closed."""
    for panel in DASHBOARDS[name]["panels"]:
        yield from panel["panels"] if panel["type"] == "row" else (panel,)


def panel_of(name: str, title: str) -> dict[str, Any]:
    """Return a panel by its title."""
    (found,) = (panel for panel in panels(name) if panel["title"] == title)
    return found


class View:
    """A dashboard of the last hour, with a run chosen."""

    step = 15

    def __init__(self, recorded: Any, run: str) -> None:
        self._recorded = recorded
        self._run = run

    def filled(self, expression: str) -> str:
        """Return the expression as Grafana sends it."""
        values = {"$__rate_interval": f"{4 * _SCRAPE}s", "$__range": f"{_HOUR}s", "$__interval": f"{self.step}s"}
        for name, value in {**values, "$run": self._run, "$rank": ".+"}.items():
            expression = expression.replace(name, value)
        assert "$" not in expression.replace('"$1', "")
        return expression

    def results(self, panel: dict[str, Any]) -> list[Any]:
        """Return what its queries bring."""
        made = []
        for target in panel["targets"]:
            query = self.filled(target["expr"])
            if target["instant"]:
                made.append(self._recorded.instant(query))
            else:
                made.append(self._recorded.range(query, self._recorded.now - _HOUR, self.step))
        return made

    def tile(self, name: str, title: str) -> Shown:
        """Return the one value of a tile."""
        panel = panel_of(name, title)
        (shown,) = tiles(panel, self.results(panel))
        return shown

    def table(self, name: str, title: str) -> list[dict[str, Shown]]:
        """Return the rows of a table."""
        panel = panel_of(name, title)
        return rows(panel, self.results(panel))

    def timeline(self, name: str, title: str) -> Any:
        """Return the rows of a state timeline."""
        panel = panel_of(name, title)
        return bands(panel, self.results(panel), self.step)

    def lines(self, name: str, title: str) -> dict[str, Shown]:
        """Return the legend of lines, by name."""
        panel = panel_of(name, title)
        return legend(panel, self.results(panel))


@pytest.fixture
def look(recorded: Any) -> Any:
    """Look at a situation; at no run in particular for the fleet."""
    return lambda name="healthy": View(recorded, recorded.ids[name])


def test_print(look):
    for name in ("healthy", "disagreeing", "nan", "killed", "ended"):
        view = look(name)
        for board in NAMES:
            if board == "fleet" and name != "healthy":
                continue
            for panel in panels(board):
                r = view.results(panel)
                kind = panel["type"]
                if kind == "stat":
                    out = tiles(panel, r)
                elif kind == "table":
                    out = [{k: v for k, v in row.items()} for row in rows(panel, r)] or empty(panel)
                elif kind == "state-timeline":
                    out = bands(panel, r, 15) or empty(panel)
                elif kind == "timeseries":
                    out = legend(panel, r) or empty(panel)
                else:
                    out = [len(x) for x in r]
                print(name, "|", board, "|", panel["title"], "|", out)
