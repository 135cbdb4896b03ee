"""Settings: one name everywhere, four sources in order, and errors that teach."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from ddpdebug.config.settings import Config, options, run_directory, settings, to_flags
from ddpdebug.errors import UsageError


def _pyproject(folder: Path, text: str) -> Path:
    file = folder / "pyproject.toml"
    file.write_text(text, encoding="utf-8")
    return file


def test_defaults(tmp_path: Path) -> None:
    """Nothing given anywhere is a valid configuration with the documented defaults."""
    _pyproject(tmp_path, "")
    config = Config.load({}, {}, tmp_path)
    assert config == Config()
    assert (config.budget, config.every_step, config.metrics, config.guard) == (0.01, False, "per-rank", "observe")
    assert (config.metrics_host, config.metrics_port, config.on_finding) == ("127.0.0.1", 0, "report")
    assert (config.out, config.tolerance, config.nproc_per_node, config.steps) == (None, None, None, None)


def test_order(tmp_path: Path) -> None:
    """Arguments beat the environment, which beats pyproject.toml, which beats the defaults."""
    _pyproject(tmp_path, "[tool.ddpdebug]\nbudget = 0.2\nevery-step = true\nmetrics_port = 1\nquiet = true\n")
    environ = {"DDPDEBUG_BUDGET": "0.3", "DDPDEBUG_METRICS_PORT": "2", "DDPDEBUG_GUARD": ""}
    config = Config.load({"budget": "0.4", "steps": None}, environ, tmp_path)
    assert (config.budget, config.metrics_port, config.every_step, config.quiet) == (0.4, 2, True, True)
    assert config.guard == "observe"


def test_nearest_pyproject(tmp_path: Path) -> None:
    """The nearest pyproject.toml upwards counts, and its relative paths start where it lies."""
    _pyproject(tmp_path, "[tool.ddpdebug]\nquiet = true\n")
    inner = tmp_path / "a" / "b"
    inner.mkdir(parents=True)
    assert Config.load({}, {}, inner).quiet
    _pyproject(tmp_path / "a", '[tool.ddpdebug]\nout = "runs"\n')
    config = Config.load({"junit": "j.xml"}, {}, inner)
    assert (config.quiet, config.out, config.junit) == (False, tmp_path / "a" / "runs", inner / "j.xml")


@pytest.mark.parametrize(
    "name, given, value",
    [
        ("every_step", "1", True),
        ("every_step", "off", False),
        ("every_step", True, True),
        ("budget", 0, 0.0),
        ("budget", "1e-3", 1e-3),
        ("metrics_port", "0", 0),
        ("tolerance", "1e-6", 1e-6),
        ("steps", "20", 20),
        ("timeout", "1.5", 1.5),
        ("fail_on", "warning", "warning"),
        ("out", "/x/y", Path("/x/y")),
        ("metrics", "off", "off"),
    ],
)
def test_values(name: str, given: Any, value: Any, tmp_path: Path) -> None:
    """Texts and Python values mean the same."""
    assert getattr(Config.load({name: given}, {}, tmp_path), name) == value


@pytest.mark.parametrize(
    "name, given, valid",
    [
        ("budget", "abc", "0 to 1"),
        ("budget", 2, "0 to 1"),
        ("budget", "nan", "0 to 1"),
        ("budget", True, "0 to 1"),
        ("every_step", "maybe", "true or false"),
        ("metrics", "rank1", "'per-rank', 'rank0' or 'off'"),
        ("metrics_port", 65536, "0 to 65535"),
        ("metrics_port", 1.5, "0 to 65535"),
        ("metrics_host", "", "an address"),
        ("on_finding", "resync", "'report' or 'raise'"),
        ("tolerance", -1, "0 up"),
        ("guard", "on", "'off', 'observe', 'stop' or 'skip'"),
        ("validation_loss", "codes", "'told', 'modules' or 'functions'"),
        ("probe_every", -1, "0 up"),
        ("bundle_limit", "2G", "0 up"),
        ("nproc_per_node", 0, "1 up"),
        ("nproc_per_node", "gpu", "1 up"),
        ("steps", "0", "1 up"),
        ("fail_on", "info", "'warning', 'error' or 'critical'"),
        ("timeout", 0, "above 0"),
        ("timeout", "inf", "above 0"),
        ("out", 5, "a directory"),
    ],
)
def test_wrong_values(name: str, given: Any, valid: str, tmp_path: Path) -> None:
    """A wrong value is refused with its source, itself, and what is valid."""
    with pytest.raises(UsageError) as error:
        Config.load({name: given}, {}, tmp_path, flags=True)
    assert f"--{name.replace('_', '-')}: {given!r}" in str(error.value)
    assert valid in str(error.value)


@pytest.mark.parametrize(
    "explicit, environ, toml, words",
    [
        ({"bugdet": 1}, {}, "", ["unknown option bugdet", "did you mean budget?"]),
        ({}, {"DDPDEBUG_EVRY_STEP": "1"}, "", ["DDPDEBUG_EVRY_STEP", "did you mean DDPDEBUG_EVERY_STEP?"]),
        ({}, {"DDPDEBUG_BUDGET": "x"}, "", ["DDPDEBUG_BUDGET: 'x'", "0 to 1"]),
        ({}, {}, "bugdet = 1", ["unknown option bugdet", "pyproject.toml", "did you mean budget?"]),
        ({}, {}, "budget = 'x'", ["budget in [tool.ddpdebug] of ", "pyproject.toml", "'x'"]),
        ({}, {}, "budget = [", ["cannot read", "pyproject.toml"]),
    ],
)
def test_errors_name_their_source(
    explicit: Mapping[str, Any], environ: Mapping[str, str], toml: str, words: list[str], tmp_path: Path
) -> None:
    """Each source is named the way its user writes it, with a near match."""
    _pyproject(tmp_path, f"[tool.ddpdebug]\n{toml}\n")
    with pytest.raises(UsageError) as error:
        Config.load(explicit, environ, tmp_path)
    for word in words:
        assert word in str(error.value)


def test_variables_that_are_no_settings(tmp_path: Path) -> None:
    """Tokens, and what Kubernetes sets in a namespace with a Service called ddpdebug-hub, stop no job."""
    port = "tcp://10.0.0.1:8765"
    environ = {
        "DDPDEBUG_HUB_SERVICE_HOST": "10.0.0.1", "DDPDEBUG_HUB_SERVICE_PORT": "8765",
        "DDPDEBUG_HUB_SERVICE_PORT_HTTP": "8765", "DDPDEBUG_HUB_PORT": port, "DDPDEBUG_HUB_PORT_8765_TCP": port,
        "DDPDEBUG_HUB_PORT_8765_TCP_PROTO": "tcp", "DDPDEBUG_HUB_PORT_8765_TCP_PORT": "8765",
        "DDPDEBUG_HUB_PORT_8765_TCP_ADDR": "10.0.0.1", "DDPDEBUG_HUB_TOKEN": "w", "DDPDEBUG_HUB_READ_TOKEN": "r",
        "DDPDEBUG_HUB_READ_TOKEN_FILE": "/nothing",
    }  # fmt: skip
    assert Config.load({}, environ, tmp_path) == Config()
    with pytest.raises(UsageError, match="DDPDEBUG_HUB_PRT"):
        Config.load({}, {"DDPDEBUG_HUB_PRT": port}, tmp_path)


def test_section_that_is_no_table(tmp_path: Path) -> None:
    """`ddpdebug = 3` under [tool] is refused."""
    _pyproject(tmp_path, "[tool]\nddpdebug = 3\n")
    with pytest.raises(UsageError, match="not a table"):
        Config.load({}, {}, tmp_path)


def test_own_variables_are_no_options(tmp_path: Path) -> None:
    """What ddpdebug passes to its ranks is not a setting."""
    assert Config.load({}, {"DDPDEBUG_RUN_ID": "abc"}, tmp_path) == Config()


def test_one_name_everywhere() -> None:
    """Flag and variable follow from the field's name; every field has help and valid values."""
    names = [option.name for option in options()]
    assert names == [field.name for field in settings()]
    by_name = {option.name: option for option in options()}
    assert (by_name["every_step"].flag, by_name["every_step"].variable) == ("--every-step", "DDPDEBUG_EVERY_STEP")
    assert all(option.help.endswith(".") and option.valid for option in options())
    assert {option.name for option in options("check")} - {option.name for option in options("run")} == {
        "fail_on",
        "require_checks",
        "junit",
        "json",
        "markdown",
        "codequality",
        "timeout",
        "golden",
    }


def test_to_flags() -> None:
    """Given settings become a command line that means the same; others are left to the receiver's own sources."""
    given = {"budget": "0.5", "every_step": True, "quiet": False, "junit": "x.xml"}
    assert to_flags(given, "run") == ["--budget=0.5", "--every-step", "--no-quiet"]


def test_config_is_frozen_and_keyword_only() -> None:
    """Data between layers does not change."""
    with pytest.raises(dataclasses.FrozenInstanceError):
        Config().budget = 1  # type: ignore[misc]
    with pytest.raises(TypeError):
        Config("out")  # type: ignore[misc]


def test_run_directory() -> None:
    """The default name sorts by time and carries the run's identity."""
    from datetime import UTC, datetime

    now = datetime(2026, 11, 21, 2, 9, tzinfo=UTC)
    assert run_directory("abc", now) == Path("ddpdebug-runs/20261121T020900Z-abc")


CHECKED = (
    ({}, {}, "", True),
    ({"budget": "0.05"}, {}, "", False),
    ({}, {"DDPDEBUG_BUDGET": "0.05"}, "", False),
    ({}, {}, "budget = 0.05", False),
    ({"every_step": False}, {}, "", False),
    ({}, {"DDPDEBUG_EVERY_STEP": "0"}, "", False),
    ({}, {}, "every_step = false", False),
    ({"budget": "0.05"}, {}, "every_step = true", True),
    ({"every_step": False}, {"DDPDEBUG_EVERY_STEP": "1"}, "", False),
)


@pytest.mark.parametrize(("explicit", "environ", "table", "every_step"), CHECKED)
def test_check_checks_every_step_unless_told_otherwise(
    explicit: dict[str, object], environ: dict[str, str], table: str, every_step: bool, tmp_path: Path
) -> None:
    """By a budget or by the option itself, wherever it is given; `run` samples unless told otherwise."""
    (tmp_path / "pyproject.toml").write_text(f"[tool.ddpdebug]\n{table}\n")
    assert Config.load(explicit, environ, tmp_path, command="check").every_step is every_step
    told = "every_step" in explicit or "EVERY_STEP" in str(environ) or "every_step" in table
    assert Config.load(explicit, environ, tmp_path, command="run").every_step is (every_step and told)


def test_entries_of_all_sources_are_ignored(tmp_path: Path) -> None:
    """A stronger source adds to what a weaker one has; what is no entry is said with its source."""
    _pyproject(tmp_path, '[tool.ddpdebug]\nignore = ["RCP805 # evaluation"]\n')
    config = Config.load({"ignore": ("RANK104:lr",)}, {"DDPDEBUG_IGNORE": "rcp806; RANK104:lr"}, tmp_path)
    assert config.ignore == ("RCP805 # evaluation", "RCP806", "RANK104:lr")
    with pytest.raises(UsageError, match="DDPDEBUG_IGNORE: there is no finding 'RCP899'"):
        Config.load({}, {"DDPDEBUG_IGNORE": "RCP899"}, tmp_path)
