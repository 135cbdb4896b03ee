"""The dashboards in eight recorded situations: the words and colours that stand there, by a model of Grafana's panels.

No Grafana can be had where these tests run: Prometheus is real, and what Grafana makes of its answers is a model of it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from itertools import combinations, pairwise
from typing import Any

import pytest
from grafana_model import Shown, bands, config_of, display, empty, legend, rows, tiles

from ddpdebug.grafana.dashboards import NAMES, shipped

DASHBOARDS = shipped()
GREEN, LIGHT, YELLOW, ORANGE, RED, BLUE, GREY = (
    "#009E73", "#56B4E9", "#F0E442", "#E69F00", "#B2182B", "#0072B2", "#999999",
)  # fmt: skip
_PHASES = "run_phase:ddpdebug_phase_seconds:mean2m"
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
        assert not re.search(r"\$[a-z_]", expression)
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


#: Situation -> dashboard -> tile -> its word (a pattern) and its colours; several where the machine decides.
_PERCENT = r"-?\d+(\.\d+)?%"
_COST = rf"rank \d: {_PERCENT}"
_WELL = {
    "overview": {
        "Run state": ("running", GREEN),
        "Worst finding": ("none", GREEN),
        "Checked": ("all checked", GREEN),
        "Memory headroom": (_PERCENT, GREEN),
        "What stragglers cost": (_COST, GREEN),
        "Overhead": (_PERCENT, f"{GREEN} {LIGHT} {YELLOW}"),
        "Ranks missing": ("all up", GREEN),
        "Ranks agree": ("agree", GREEN),
        "Gradients": ("in sync", GREEN),
        "Numbers": ("finite", GREEN),
        "Waiting": ("none", GREEN),
        "Last step ago": (r"\d+ s", GREEN),
    },
    "memory": {
        "Headroom": (_PERCENT, GREEN),
        "Full in": (r"not growing|\d+ (hours|days)", f"{GREEN} {LIGHT}"),
    },
    "ranks": {
        "What stragglers cost": (_COST, GREEN),
        "Slowest rank above the median": (_PERCENT, GREEN),
        "Waiting for data": (_PERCENT, GREEN),
        "Steps apart": ("in step", GREEN),
    },
}


def _ill(**tiles_: tuple[str, str]) -> dict[str, dict[str, tuple[str, str]]]:
    changed = {"Run state": ("ill", RED), "Worst finding": ("critical", RED)}
    changed |= {title.replace("_", " "): shown for title, shown in tiles_.items()}
    return {**_WELL, "overview": {**_WELL["overview"], **changed}}


def _over(state: tuple[str, str], worst: tuple[str, str], word: tuple[str, str]) -> dict[str, Any]:
    made = {name: dict.fromkeys(shown, word) for name, shown in _WELL.items()}
    for tiles_ in made.values():
        if _COSTS in tiles_:
            tiles_[_COSTS] = f"the run: {word[0]}", word[1]
    made["overview"] |= {"Run state": state, "Worst finding": worst}
    return made


_COSTS = "What stragglers cost"
_SLOW = {_COSTS: (r"rank 2: [23]\d%", YELLOW)}
_LATE = (r"\d+ s|1 mins?", YELLOW)
_WAITS = {"Waiting": ("at work", LIGHT), "Last step ago": _LATE}

_TILES = {
    "healthy": _WELL,
    "hung": _ill(Waiting=("stuck", RED), Last_step_ago=_LATE),
    "waiting": {**_WELL, "overview": {**_WELL["overview"], **_WAITS}},
    "slow": {
        **_WELL,
        "overview": {**_WELL["overview"], **_SLOW},
        "ranks": {**_WELL["ranks"], **_SLOW, "Slowest rank above the median": (r"[23]\d%", YELLOW)},
    },
    "disagreeing": _ill(Ranks_agree=("1 differ", RED)),
    "nan": _ill(Numbers=(r"\d+ steps", RED)),
    "killed": _over(("lost", RED), ("critical", RED), ("run lost", RED)),
    "ended": _over(("finished", BLUE), ("critical", RED), ("run finished", GREY)),
}


@pytest.mark.smoke
@pytest.mark.parametrize("name", _TILES)
def test_every_tile_has_its_word_and_colour(look: Any, name: str) -> None:
    """Red only where something is ill, and nothing green about a run that is dead."""
    for board, expected in _TILES[name].items():
        stats = [panel["title"] for panel in panels(board) if panel["type"] == "stat"]
        assert sorted(stats) == sorted(expected), "each tile has an expectation"
        for title, (word, colors) in expected.items():
            shown = look(name).tile(board, title)
            assert re.fullmatch(word, shown.text), (board, title, shown)
            assert shown.color in colors.split(), (board, title, shown)


def test_the_tiles_of_the_fleet_count_what_is_ill_and_what_is_over(look: Any) -> None:
    """Six runs are alive, three of them are well; one is lost; what was found in one that is over is still counted."""
    shown = {
        panel["title"]: look().tile("fleet", panel["title"]) for panel in panels("fleet") if panel["type"] == "stat"
    }
    assert shown == {
        "Runs": ("6", BLUE),
        "Ill runs": ("3", RED),
        "Runs whose ranks disagree": ("1", RED),
        "Runs that failed or were lost": ("1", RED),
        "Runs with critical findings": ("5", RED),
        "Ranks": ("24", BLUE),
    }


def test_the_fleet_says_of_each_run_how_it_is_or_how_it_ended(look: Any, recorded: Any) -> None:
    """The worst finding first; names for people, ids to click on; no cell of a run is missing."""
    found = look().table("fleet", "All runs")
    columns = ("State", "Worst finding", "Agreement", "Numbers")
    assert {row["Name"].text: tuple(row[column] for column in columns) for row in found} == {
        "healthy": (("running", GREEN), ("none", GREEN), ("agree", GREEN), ("finite", GREEN)),
        "disagreeing": (("ill", RED), ("critical", RED), ("1 differ", RED), ("finite", GREEN)),
        "nan": (("ill", RED), ("critical", RED), ("agree", GREEN), ("NaN or Inf", RED)),
        "hung": (("ill", RED), ("critical", RED), ("agree", GREEN), ("finite", GREEN)),
        "waiting": (("running", GREEN), ("none", GREEN), ("agree", GREEN), ("finite", GREEN)),
        "slow": (("running", GREEN), ("none", GREEN), ("agree", GREEN), ("finite", GREEN)),
        "killed": (("lost", RED), ("critical", RED), ("agree", GREEN), ("finite", GREEN)),
        "ended": (("finished", BLUE), ("critical", RED), ("1 differ", RED), ("finite", GREEN)),
    }
    assert {row["Name"].text: row["Run"].text for row in found} == recorded.ids
    worst = [row["Worst finding"].text for row in found]
    assert worst == sorted(worst)  # critical before none
    assert {row["Ranks"].text for row in found} == {"4"}
    assert "-" not in {cell.text for row in found for title, cell in row.items() if title != "Job"}


@pytest.mark.parametrize(
    ("name", "codes"),
    [
        ("healthy", []),
        ("hung", ["HANG501"]),
        ("waiting", []),
        ("disagreeing", ["RANK101"]),
        ("nan", ["NUM302"]),
        ("ended", ["RANK101"]),
    ],
)
def test_findings_stay_in_the_table_when_the_run_has_ended(look: Any, name: str, codes: list[str]) -> None:
    """With their ranks, in words where there are none."""
    found = look(name).table("overview", "Newest findings")
    assert [row["Code"].text for row in found] == codes
    assert {row["Severity"] for row in found} <= {("critical", RED)}
    assert {row["Ranks"].text for row in found} <= {"1", "2"}
    assert empty(panel_of("overview", "Newest findings")) == "none"


def test_who_made_the_first_nan_is_said(look: Any) -> None:
    """Although afterwards every rank has it; the lines say NaN instead of nothing."""
    view = look("nan")
    (row,) = view.table("numerics", "Who made the first NaN")
    assert (row["Ranks"].text, row["What"].text, row["Severity"]) == ("1", "loss", ("critical", RED))
    assert set(view.lines("overview", "Loss").values()) == {("NaN", RED)}
    assert view.timeline("numerics", "What was not finite")["loss"][-1][2:] == ("NaN or Inf", RED)
    assert {row["Loss"].text for row in view.table("ranks", "Ranks")} == {"NaN"}
    assert look().table("numerics", "Who made the first NaN") == []


def test_gradient_norms_are_those_of_the_gradients(look: Any) -> None:
    """With a loss scale of thousands the norm is about one, and so are those of the layers."""
    lines = look().lines("numerics", "Gradient norm and clipping")
    assert float(lines["norm"].text) < 10
    assert look().lines("numerics", "Loss scale")["scale"].text.endswith("K")


def test_the_ranks_say_how_they_ended_and_where_they_were(look: Any) -> None:
    """Of a run that is over, too: the one that was killed stands out, and no column changes its name."""
    killed = {row["Rank"].text: row for row in look("killed").table("ranks", "Ranks")}
    assert {rank: row["State"] for rank, row in killed.items()} == {
        "0": ("cancelled", GREY), "1": ("cancelled", GREY), "2": ("lost", RED), "3": ("cancelled", GREY),
    }  # fmt: skip
    for name, state in (("healthy", ("running", GREEN)), ("disagreeing", ("ill", RED)), ("ended", ("finished", BLUE))):
        assert [row["State"] for row in look(name).table("ranks", "Ranks")] == [state] * 4
    for row in killed.values():
        assert {"Rank", "Node", "Local rank", "State", "Step", "Last step", "Loss"} == row.keys()
        assert row["Node"].text == "node"


def test_timelines_have_words_and_end_with_the_run(look: Any, recorded: Any) -> None:
    """No threshold in the place of a word, and a gap where there is no run."""
    agree = look("ended").timeline("agreement", "What agrees")
    assert [band[2:] for band in agree["parameters"]] == [("agree", GREEN), ("differ", RED)]
    assert [band[2:] for band in agree["buffers"]] == [("agree", GREEN)]
    assert max(band.end for row in agree.values() for band in row) < recorded.now - 400
    assert look("disagreeing").timeline("agreement", "Outvoted ranks").keys() == {"rank 2: parameters"}
    assert look().timeline("agreement", "Outvoted ranks") == {}
    states = look().timeline("fleet", "State by run")
    words = {name.partition(" ")[0]: [band[2:] for band in row] for name, row in states.items()}
    running, ill = ("running", GREEN), ("ill", RED)
    assert words["healthy"] == [running]
    assert words["ended"] == [running, ill, ("finished", BLUE)]
    assert words["killed"] == [running, ("lost", RED)]
    for name in NAMES:
        for panel in panels(name):
            if panel["type"] == "state-timeline":
                rows_ = bands(panel, look("ended").results(panel), View.step)
                assert {band.text for row in rows_.values() for band in row} <= {
                    "agree", "differ", "finite", "NaN or Inf", "outvoted", "running", "ill", "finished", "lost", "none",
                }  # fmt: skip


def test_the_missing_rank_and_its_line_stand_there(look: Any) -> None:
    """Red for a hang, blue for a rank at work, nothing where nobody waits; and how long the others have waited."""
    for name, word, phase in (("hung", ("stuck", RED), "script"), ("waiting", ("at work", LIGHT), "forward")):
        ((row, known),) = look(name).timeline("ranks", "Missing ranks").items()
        assert re.fullmatch(rf"rank 2: {phase} \S*situation\.py:\d+", row)
        assert [band[2:] for band in known] == [word]
        waits = look(name).lines("ranks", "Waiting for others")
        assert waits.keys() == {"longest", "rank 0", "rank 1", "rank 3"}
        assert all(re.fullmatch(r"\d+(\.\d+)? s|1 mins?|1\.\d+ mins", shown.text) for shown in waits.values()), waits
    assert look().timeline("ranks", "Missing ranks") == {}
    assert look().lines("ranks", "Waiting for others") == {}


def test_what_a_slow_rank_costs_is_told_from_what_noise_costs(look: Any) -> None:
    """Of a straggler nearly all that is lost is its own; the others wait, and it does not."""
    lines = look("slow").lines("ranks", "What slow ranks cost over time")
    shares = {name: float(shown.text.removesuffix("%")) for name, shown in lines.items()}
    assert shares["rank 2"] == max(shares[name] for name in shares if name != "all ranks")
    assert shares["rank 2"] > 0.9 * shares["all ranks"] > 20
    assert sum(shares[f"rank {rank}"] for rank in range(4)) == pytest.approx(shares["all ranks"], abs=4)
    own = look("slow").lines("ranks", "Own time per step")
    seconds = {name: float(shown.text.split()[0]) for name, shown in own.items()}
    assert seconds["highest rank"] - seconds["median rank"] == pytest.approx(100, abs=30)
    assert seconds["waiting"] > 60
    assert look("slow").lines("overview", "Step time, own and waiting").keys() == {
        "data", "forward", "backward", "optimizer", "other", "waiting",
    }  # fmt: skip


def test_layers_end_when_the_run_does(look: Any, recorded: Any) -> None:
    """And, as everything that is drawn about one, do not go on after it."""
    for board in ("overview", "numerics", "agreement", "memory", "ranks"):
        for panel in panels(board):
            if panel["type"] == "timeseries":
                for series in look("ended").results(panel):
                    assert all(points[-1][0] < recorded.now - 400 for _, points in series), panel["title"]


def test_firing_alerts_stand_there_with_their_severity(look: Any) -> None:
    """None for a run that is well; of one that ended before its ranks' disagreement could be told, the finding is."""

    def fired(name: str) -> dict[str, Shown]:
        return {row["Alert"].text: row["Severity"] for row in look(name).table("overview", "Firing alerts")}

    assert fired("healthy") == fired("waiting") == {}
    assert fired("ended") == {"DdpdebugFindingCritical": ("critical", RED)}
    assert fired("hung") == {"DdpdebugHang": ("critical", RED)}
    assert fired("disagreeing")["DdpdebugRanksDisagree"] == ("critical", RED)
    assert fired("nan")["DdpdebugNonfinite"] == ("critical", RED)
    assert fired("killed")["DdpdebugRunLost"] == ("critical", RED)
    assert look().table("fleet", "Firing alerts")[0]["Name"].text in _TILES


def test_device_panels_say_that_there_is_no_device(look: Any) -> None:
    """And stand in a row of their own that is closed, so that a run on the CPU does not see them."""
    (row,) = (panel for panel in DASHBOARDS["memory"]["panels"] if panel["type"] == "row" and panel["panels"])
    assert row["collapsed"]
    for panel in row["panels"]:
        assert legend(panel, look().results(panel)) == {}
        assert "CPU" in empty(panel)
    assert look().lines("memory", "Share of the limit").keys() == {"host"}
    ranks = look().table("memory", "Fullest ranks")
    assert [row["Host"].text[-3:] for row in ranks] == ["MiB"] * 4
    assert "Device" not in ranks[0]


def test_the_histogram_tells_steps_apart_that_differ_by_a_fifth(look: Any) -> None:
    """About the run's usual step."""
    panel = panel_of("ranks", "Step time of all ranks")
    (series,) = look().results(panel)
    bounds = sorted(float(labels["le"]) for labels, _ in series)
    assert min(later / earlier for earlier, later in pairwise(bounds[:-1])) < 1.21


@pytest.mark.smoke
def test_what_is_drawn_of_a_large_world_is_true_of_all_its_ranks(record: Callable[[], Any]) -> None:
    """Where rank 0 speaks for many it shows the slowest of them: the median among these is not that of all."""
    recorded = record()
    (labels, _), *_ = recorded.instant('ddpdebug_run_info{run="healthy"}')
    run = {name: labels[name] for name in ("run", "run_id")}

    def told(name: str, value: float, **more: str) -> tuple[dict[str, str], list[tuple[float, float]]]:
        return {"__name__": f"ddpdebug_all_ranks_{name}", **run, **more}, [(recorded.now, value)]

    step = recorded.instant('run:ddpdebug_step_seconds:mean{run="healthy"}')[0][1][0][1]
    recorded.write(
        [
            told("loss", 0.5, stat="p50"),
            told("mean_straggler_cost_seconds", 2 * step, stat="max"),
            told("mean_phase_seconds", 7.0, stat="mean", phase="forward"),
        ]
    )
    values = {
        name: {(series["run"], series.get("phase", "")): points[-1][1] for series, points in recorded.evaluated(name)}
        for name in ("run:ddpdebug_loss:median", "run:ddpdebug_loss:max", "run:ddpdebug_straggler:ratio", _PHASES)
    }
    assert values["run:ddpdebug_loss:median"]["healthy", ""] == 0.5
    assert values["run:ddpdebug_straggler:ratio"]["healthy", ""] == pytest.approx(2)
    assert values[_PHASES]["healthy", "forward"] == 7
    assert values[_PHASES]["healthy", "backward"] < 1
    assert values["run:ddpdebug_loss:median"]["nan", ""] != 0.5
    assert values["run:ddpdebug_loss:max"]["healthy", ""] < 0.5  # of the ranks themselves, where nothing is told of all


@pytest.mark.slow
def test_a_small_run_beside_a_large_one_costs_what_it_costs_alone(record: Callable[[], Any]) -> None:
    """All queries of the overview over an hour of 4 ranks touch fewer than 20,000 samples, with 1,024 beside them.

    Both runs are the healthy one under other ids: a value each 15 s, for an hour of the small one.
    """
    recorded = record()  # one of its own: others count the runs
    known = [
        (labels, points[-1][1])
        for matcher in ('{run="healthy"}', 'up{instance=~"healthy.*"}')
        for labels, points in recorded.instant(matcher)
    ]
    hour = [recorded.now - 15 * i for i in range(_HOUR // 15, -1, -1)]
    recorded.write(({**labels, "run_id": "small", "run": "small"}, [(t, v) for t in hour]) for labels, v in known)
    one = [(labels, value) for labels, value in known if labels.get("rank") == "0"]
    for rank in range(1024):
        own = {"run_id": "large", "run": "large", "rank": str(rank), "instance": f"large:{rank}"}
        recorded.write(({**labels, **own}, [(t, value) for t in hour[-2:]]) for labels, value in one)
    whole = [(labels, value) for labels, value in known if ":" in labels["__name__"] and "rank" not in labels]
    recorded.write(({**labels, "run_id": "large", "run": "large"}, [(t, v) for t in hour]) for labels, v in whole)
    assert len(recorded.instant('ddpdebug_step{run_id="large"}')) == 1024
    cost: dict[str, int] = {}
    for run in ("small", "large"):
        view = View(recorded, run)
        cost[run] = recorded.touched(view.filled(_RUN_QUERY))
        for panel in panels("overview"):
            for target in panel["targets"]:
                begin = None if target["instant"] else recorded.now - _HOUR
                cost[run] += recorded.touched(view.filled(target["expr"]), begin)
        (annotation,) = DASHBOARDS["overview"]["annotations"]["list"]
        cost[run] += recorded.touched(view.filled(annotation["expr"]), recorded.now - _HOUR, 30)
    print("samples touched by the overview:", cost)
    assert 2_000 < cost["small"] < 20_000
    assert cost["large"] < 20_000


_RUN_QUERY = re.fullmatch(
    r"query_result\((.*)\)",
    next(each for each in DASHBOARDS["overview"]["templating"]["list"] if each["name"] == "run")["query"],
)[1]  # type: ignore[index]


# --- values that no recording has ---------------------------------------------------------------------------------


def _value(panel: dict[str, Any], *values: float | None) -> Shown:
    results = [[] if value is None else [({}, [(0.0, value)])] for value in values]
    (shown,) = tiles(panel, results)
    return shown


def test_any_number_of_ranks_that_differ_is_red() -> None:
    """In the fleet's table as on the tile: not only one."""
    cell = config_of(panel_of("fleet", "All runs"), "Agreement")
    tile = panel_of("overview", "Ranks agree")
    for count in (1, 2, 4, 79, 1024):
        assert display(cell, count).color == _value(tile, count).color == RED
        assert display(cell, count).text.endswith(" differ")
    assert display(cell, 0) == ("agree", GREEN)


def test_each_end_has_a_word_in_every_verdict() -> None:
    """A tile without a value says how the run ended; one without a run says so."""
    ends = {0: "run finished", 3: "run cancelled", 4: "run failed", 5: "run lost", 6: "run gone"}
    for panel in panels("overview"):
        if panel["type"] == "stat" and len(panel["targets"]) == 1 and panel["title"] != "Run state":
            for state, word in ends.items():
                assert _value(panel, -1 - state) == (word, RED if state in {4, 5} else GREY), panel["title"]
            assert _value(panel, None) == ("not seen", GREY)
            assert _value(panel, -2).color == GREY  # it runs, and this is not known


def test_the_last_step_is_judged_by_the_length_of_a_step() -> None:
    """Two minutes are long for a run of short steps and nothing for one of long steps: the query chooses the colour."""
    panel = panel_of("overview", "Last step ago")
    assert _value(panel, 120, None, None, None) == ("2 mins", GREEN)
    assert _value(panel, None, 120, None, None) == ("2 mins", YELLOW)
    assert _value(panel, None, None, 400, None).color == RED


def test_memory_that_will_be_full_says_when() -> None:
    """In minutes and in red, in hours in orange."""
    panel = panel_of("memory", "Full in")
    assert _value(panel, 1080, None, None, None, None) == ("18 mins", RED)
    assert _value(panel, None, 7200, None, None, None) == ("2 hours", ORANGE)
    assert _value(panel, None, None, None, -10, None) == ("not growing", GREEN)


def test_the_model_knows_the_traps_that_were_met() -> None:
    """What once was wrong is wrong in the model too: so these tests can fail."""
    mapped = [
        {"type": "value", "options": {"0": {"text": "agree", "color": GREEN}, "1": {"text": "differ", "color": RED}}}
    ]
    assert display({"mappings": mapped, "color": {"mode": "thresholds"}}, 4) == ("4", "green")
    timeline = {
        "type": "state-timeline",
        "targets": [{"legendFormat": "x"}],
        "options": {"mergeValues": True},
        "fieldConfig": {
            "defaults": {
                "mappings": mapped,
                "color": {"mode": "thresholds"},
                "thresholds": {"steps": [{"value": None, "color": GREEN}, {"value": 1, "color": RED}]},
            },
            "overrides": [],
        },
    }
    (band,) = bands(timeline, [[({}, [(0.0, 0.0), (15.0, 0.0)])]], 15)["x"]
    assert band == (0, 15, "< 1", GREEN)
    table = panel_of("memory", "Fullest ranks")
    (row,) = rows(table, [[({"rank": "1"}, [(0.0, 5.0)])], [], [], [], []])
    assert "Host" not in row  # the column's name depends on how many queries bring something


def test_colours_of_severity_can_be_told_apart_by_colour_blind_people() -> None:
    """As people see them who lack one kind of cone: by Machado's matrices, and the distance in Lab."""
    kinds = {
        "protan": ((0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216), (-0.003882, -0.048116, 1.051998)),
        "deutan": ((0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413), (-0.011820, 0.042940, 0.968881)),
        "tritan": ((1.255528, -0.076749, -0.178779), (-0.078411, 0.930809, 0.147602), (0.004733, 0.691367, 0.303900)),
    }
    for kind, matrix in kinds.items():
        seen = {color: _lab(matrix, color) for color in (GREEN, LIGHT, YELLOW, ORANGE, RED, GREY)}
        for one, two in combinations(seen, 2):
            assert math.dist(seen[one], seen[two]) > 11, (kind, one, two, math.dist(seen[one], seen[two]))


def _lab(matrix: Any, color: str) -> tuple[float, float, float]:
    parts = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    r, g, b = (min(1, max(0, sum(m * part for m, part in zip(row, linear, strict=True)))) for row in matrix)
    x = (0.4124 * r + 0.3576 * g + 0.1805 * b) / 0.9505
    y = 0.2126 * r + 0.7152 * g + 0.0722 * b
    z = (0.0193 * r + 0.1192 * g + 0.9505 * b) / 1.089
    fx, fy, fz = (t ** (1 / 3) if t > 0.008856 else 7.787 * t + 16 / 116 for t in (x, y, z))
    return 116 * fy - 16, 500 * (fx - fy), 200 * (fy - fz)
