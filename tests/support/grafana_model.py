"""A small model of Grafana's panels: what a panel's JSON makes of the result of its queries, as words and colours.

It follows what Grafana's own code does (displayProcessor, valueMappings, fieldDisplay, the merge and organize
transformations, the state timeline's utilities), for the options that the dashboards use; what it does not know it
refuses, so that a new option is looked up before it is relied on. Times are seconds.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

#: Labels and (time, value) of one series.
Series = tuple[Mapping[str, str], Sequence[tuple[float, float]]]
Json = Mapping[str, Any]


class Shown(NamedTuple):
    """What stands there, and its colour."""

    text: str
    color: str


class Band(NamedTuple):
    """A part of a row of a state timeline."""

    begin: float
    end: float
    text: str
    color: str


def config_of(panel: Json, name: str) -> dict[str, Any]:
    """Return the configuration of a field by its displayed name: the defaults, and overrides in their order."""
    made = dict(panel["fieldConfig"]["defaults"])
    for override in panel["fieldConfig"]["overrides"]:
        assert override["matcher"]["id"] == "byName"
        if override["matcher"]["options"] == name:
            made.update({each["id"]: each["value"] for each in override["properties"]})
    return made


def display(config: Json, value: float | str | None) -> Shown:
    """Return the text and colour of a value."""
    text: str | None = None
    color: str | None = None
    if (mapped := _mapped(config.get("mappings", ()), value)) is not None:
        text, color = mapped.get("text"), mapped.get("color")
    number = _number(value, config.get("unit", "none"))
    if not math.isnan(number):
        text = text if text is not None else _formatted(number, config.get("unit", "none"), config.get("decimals"))
        color = color or _scale(config, number)
    if text is None:
        text = "NaN" if isinstance(value, float) else value or config.get("noValue") or ""
    return Shown(text, color or _scale(config, -math.inf))


def _number(value: float | str | None, unit: str) -> float:
    if value in (None, "") or unit == "string":
        return math.nan
    try:
        return float(value)  # type: ignore[arg-type]
    except ValueError:
        return math.nan


def _mapped(mappings: Iterable[Json], value: float | str | None) -> Json | None:
    for mapping in mappings:
        options = mapping["options"]
        match mapping["type"]:
            case "value" if value is not None:
                key = value if isinstance(value, str) else f"{value:.15g}"
                if key in options:
                    return options[key]  # type: ignore[no-any-return]
            case "range" if value is not None:
                number = _number(value, "none")
                # a bound that is null is 0 to Grafana's code, one that is not there is none
                bounds = [math.nan if bound is None else bound for bound in (options["from"], options["to"])]
                assert not any(map(math.isnan, bounds)), "give both bounds: a null one is read as 0"
                if bounds[0] <= number <= bounds[1]:
                    return options["result"]  # type: ignore[no-any-return]
            case "special":
                missing = value is None
                nan = missing or (isinstance(value, float) and math.isnan(value))
                if {"null": missing, "nan": nan and not missing, "null+nan": nan}[options["match"]]:
                    return options["result"]  # type: ignore[no-any-return]
    return None


def _scale(config: Json, number: float) -> str:
    """Return the colour of a number without a mapping: green up to 80 where nothing is said, as Grafana has it."""
    color = config.get("color", {"mode": "thresholds"})
    if color["mode"] == "fixed":
        return str(color["fixedColor"])
    if color["mode"] != "thresholds":
        return str(color["mode"])
    thresholds = config.get("thresholds", {"mode": "absolute", "steps": [_step(None, "green"), _step(80, "red")]})
    assert thresholds["mode"] == "absolute"
    reached = [step["color"] for step in thresholds["steps"] if step["value"] is None or number >= step["value"]]
    return str(reached[-1])


def _step(value: float | None, color: str) -> Json:
    return {"value": value, "color": color}


def _formatted(number: float, unit: str, decimals: int | None) -> str:
    def text(value: float, suffix: str = "") -> str:
        return (f"{value:.3g}" if decimals is None else f"{value:.{decimals}f}") + suffix

    kind, _, rest = unit.partition(":")
    made = {
        "none": lambda: f"{number:.10g}" if decimals is None else text(number),
        "suffix": lambda: text(number, f" {rest}"),
        "percentunit": lambda: text(100 * number, "%"),
        "s": lambda: text(*_scaled(number, _SECONDS)),
        "short": lambda: text(*_scaled(number, _THOUSANDS)),
        "ops": lambda: text(*_scaled(number, _THOUSANDS)) + " ops/s",
        "bytes": lambda: text(*_scaled(number, _BYTES)),
        "dateTimeFromNow": lambda: f"at {number / 1000:.0f}",  # Grafana counts from its own clock
    }
    return made[kind]()  # another unit is not known to this model yet


_SECONDS = ((86400, " days"), (3600, " hours"), (60, " mins"), (1, " s"), (1e-3, " ms"), (1e-6, " µs"))
_THOUSANDS = ((1e9, " Bil"), (1e6, " Mil"), (1e3, " K"), (1, ""))
_BYTES = tuple((1024.0**i, f" {name}") for i, name in reversed([*enumerate(("B", "KiB", "MiB", "GiB", "TiB"))]))


def _scaled(number: float, names: Sequence[tuple[float, str]]) -> tuple[float, str]:
    for least, name in names:
        if abs(number) >= least:
            return number / least, name
    return number, next((name for least, name in names if least == 1), "")


# --- panels -----------------------------------------------------------------------------------------------------------


def name_of(target: Json, labels: Mapping[str, str]) -> str:
    """Return the name of a series: its legend, with its labels put in."""
    name = str(target["legendFormat"])
    for label, value in labels.items():
        name = name.replace(f"{{{{{label}}}}}", value)
    return name or "{" + ", ".join(f'{label}="{value}"' for label, value in labels.items()) + "}"


def tiles(panel: Json, results: Sequence[Sequence[Series]]) -> list[Shown]:
    """Return the values of a stat panel; where nothing comes back, the one that says so."""
    assert panel["type"] == "stat"
    assert panel["options"]["reduceOptions"] == {"calcs": ["lastNotNull"]}
    found = []
    for target, series in zip(panel["targets"], results, strict=True):
        for labels, points in series:
            known = [value for _, value in points if not math.isnan(value)]
            shown = display(config_of(panel, name_of(target, labels)), known[-1] if known else None)
            name = {"value": "", "value_and_name": f"{name_of(target, labels)}: "}[panel["options"]["textMode"]]
            found.append(Shown(name + shown.text, shown.color))
    return found or [display(panel["fieldConfig"]["defaults"], None)]


def rows(panel: Json, results: Sequence[Sequence[Series]]) -> list[dict[str, Shown]]:
    """Return the rows of a table: column -> cell; none where nothing comes back, and Grafana shows the text for it."""
    assert [each["id"] for each in panel["transformations"]] == ["merge", "organize"]
    known = [(target["refId"], series) for target, series in zip(panel["targets"], results, strict=True) if series]
    frames = []
    for ref, series in known:
        value = f"Value #{ref}" if len(known) > 1 else "Value"  # the trap: the name depends on what came back
        frames.append([{"Time": points[-1][0], **labels, value: points[-1][1]} for labels, points in series])
    merged = _merged(frames)
    organize = panel["transformations"][1]["options"]
    present = {name for row in merged for name in row} - {
        name for name, out in organize["excludeByName"].items() if out
    }
    order = sorted(present, key=lambda name: (organize["indexByName"].get(name, math.inf), name))
    shown = []
    for row in _sorted(panel, organize["renameByName"], merged):
        titles = {name: organize["renameByName"].get(name, name) for name in order}
        shown.append({title: _cell(config_of(panel, title), row.get(name)) for name, title in titles.items()})
    return shown


def _cell(config: Json, value: Any) -> Shown:
    shown = display(config, value)
    return shown if config.get("custom.cellOptions", {}).get("type") == "color-background" else Shown(shown.text, "")


def _merged(frames: Sequence[Sequence[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Merge rows that have the same values in the columns that all frames have, unless they contradict each other."""
    if len(frames) < 2:
        return [row for frame in frames for row in frame]
    keys = set.intersection(*({name for row in frame for name in row} for frame in frames))
    made: list[dict[str, Any]] = []
    for frame in frames:
        for row in frame:
            for other in made:
                if all(other.get(k) == row.get(k) for k in keys) and all(k not in other for k in row.keys() - keys):
                    other.update(row)
                    break
            else:
                made.append(dict(row))
    return made


def _sorted(panel: Json, titles: Mapping[str, str], found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    for by in panel["options"].get("sortBy", ()):
        name = next(name for name, title in titles.items() if title == by["displayName"])
        found = sorted(found, key=lambda row: row.get(name, -math.inf), reverse=by["desc"])
    return found


def bands(panel: Json, results: Sequence[Sequence[Series]], step: float) -> dict[str, list[Band]]:
    """Return the rows of a state timeline, each with the parts that have a value; a gap is in none of them."""
    assert panel["type"] == "state-timeline"
    made: dict[str, list[Band]] = {}
    for target, series in zip(panel["targets"], results, strict=True):
        for labels, points in series:
            name = name_of(target, labels)
            config = config_of(panel, name)
            words = _by_threshold if _merges(panel, config) else display
            row = made.setdefault(name, [])
            last: float | None = None
            for time, value in points:
                shown = words(config, value)
                same = bool(row) and (value == last or (words is _by_threshold and row[-1].text == shown.text))
                if same and time - row[-1].end <= 1.5 * step:
                    row[-1] = row[-1]._replace(end=time)
                else:
                    row.append(Band(time, time, *shown))
                last = value
    return made


def _merges(panel: Json, config: Json) -> bool:
    return bool(panel["options"]["mergeValues"]) and config.get("color", {"mode": "thresholds"})["mode"] == "thresholds"


def _by_threshold(config: Json, value: float | str | None) -> Shown:
    """Return what a state timeline writes where it merges values by thresholds: no word of any mapping."""
    steps = config["thresholds"]["steps"]
    reached = [i for i, step in enumerate(steps) if step["value"] is None or float(value or 0) >= step["value"]][-1]
    step = steps[reached]
    text = f"< {steps[reached + 1]['value']}" if step["value"] is None and len(steps) > 1 else f"{step['value']}+"
    return Shown(text, step["color"])


def legend(panel: Json, results: Sequence[Sequence[Series]]) -> dict[str, Shown]:
    """Return the lines of a time series panel with their last values; none where Grafana shows the text for it."""
    assert panel["type"] == "timeseries"
    assert panel["options"]["legend"]["calcs"][0] == "last"
    made = {}
    for target, series in zip(panel["targets"], results, strict=True):
        for labels, points in series:
            name = name_of(target, labels)
            made[name] = display(config_of(panel, name), points[-1][1])
    return made


def empty(panel: Json) -> str:
    """Return what stands in a panel without any data."""
    return str(panel["fieldConfig"]["defaults"]["noValue"])
