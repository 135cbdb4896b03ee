"""Every setting, once: name, type, default, help. Command-line options are generated from here. Torch-free."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from ddpdebug.errors import UsageError, did_you_mean

ENVIRONMENT_PREFIX = "DDPDEBUG_"
#: Variables that ddpdebug passes to its own ranks, or its tests to themselves; not settings.
INTERNAL_VARIABLES = frozenset({"DDPDEBUG_RUN_ID", "DDPDEBUG_REQUIRE_PROMETHEUS"})

_TRUE, _FALSE = frozenset({"1", "true", "yes", "on"}), frozenset({"0", "false", "no", "off"})
_Parse = Callable[[Any], Any]


class Option(NamedTuple):
    """What a command needs to know about a setting."""

    name: str  # in Python, in pyproject.toml and, in capitals, in the environment
    help: str
    valid: str  # the values that are accepted, for messages and help
    commands: tuple[str, ...]
    switch: bool  # takes no value on the command line

    @property
    def flag(self) -> str:
        """The option on the command line."""
        return "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        """The environment variable."""
        return ENVIRONMENT_PREFIX + self.name.upper()


def _option(
    default: Any,
    parse: _Parse,
    valid: str,
    text: str,
    *,
    commands: tuple[str, ...] = ("run", "check"),
) -> Any:
    metadata = {"parse": parse, "valid": valid, "help": text, "commands": commands}
    return field(default=default, metadata=metadata)


def _switch(value: Any) -> bool:
    text = str(value).lower()
    if text in _TRUE:
        return True
    if text in _FALSE:
        return False
    raise ValueError


def _number(low: float, high: float = float("inf"), *, above: bool = False) -> _Parse:
    def parse(value: Any) -> float:
        if isinstance(value, bool):
            raise ValueError  # noqa: TRY004 - one kind of refusal for all sources
        number = float(value)
        if not low <= number <= high or (above and number == low) or number == float("inf"):
            raise ValueError
        return number

    return parse


def _integer(low: int, high: int | None = None) -> _Parse:
    def parse(value: Any) -> int:
        if isinstance(value, bool | float):
            raise ValueError  # noqa: TRY004 - one kind of refusal for all sources
        number = int(value)
        if number < low or (high is not None and number > high):
            raise ValueError
        return number

    return parse


def _one_of(*valid: str) -> _Parse:
    def parse(value: Any) -> str:
        if value not in valid:
            raise ValueError
        return str(value)

    return parse


def _text(value: Any) -> str:
    if not isinstance(value, str) or not value.strip():
        raise ValueError
    return value


def _path(value: Any) -> Path:
    if not isinstance(value, str | Path) or not str(value).strip():
        raise ValueError
    return Path(value).expanduser()


def _file(value: Any) -> Path:
    return _path(value)


def _guard(value: Any) -> str:
    if value in {"stop", "skip"}:
        raise UsageError(f"{value!r} is not there yet; give 'off' or 'observe'")
    return str(_one_of("off", "observe")(value))


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """The settings of one run, all valid. Strongest first: argument, environment, pyproject.toml, default."""

    out: Path | None = _option(
        None,
        _path,
        "a directory",
        "Run directory; the default is ddpdebug-runs/<UTC time>-<run id>.",
    )
    budget: float = _option(
        0.01,
        _number(0, 1),
        "a number from 0 to 1",
        "Share of the run's time that the sampled checks may cost.",
    )
    every_step: bool = _option(
        False,
        _switch,
        "true or false",
        "Run every check in every step, whatever it costs.",
    )
    metrics: str = _option(
        "per-rank",
        _one_of("per-rank", "rank0", "off"),
        "'per-rank', 'rank0' or 'off'",
        "Prometheus endpoints: one for each rank, only on rank 0, or none.",
    )
    metrics_host: str = _option(
        "127.0.0.1",
        _text,
        "an address to bind",
        "Address of the metrics endpoint; 0.0.0.0 opens it to the network.",
    )
    metrics_port: int = _option(
        9400,
        _integer(0, 65535),
        "a port from 0 to 65535",
        "Port of the metrics endpoint of local rank 0, the next ranks count up; 0 takes any free port.",
    )
    metrics_tls_cert: Path | None = _option(
        None, _file, "a PEM file", "Serve the metrics over TLS with this certificate chain."
    )
    metrics_tls_key: Path | None = _option(
        None, _file, "a PEM file", "Private key of the certificate, where it is in a file of its own."
    )
    metrics_client_ca: Path | None = _option(
        None, _file, "a PEM file", "Serve only clients with a certificate that this authority signed (needs TLS)."
    )
    metrics_password_file: Path | None = _option(
        None, _file, "a file", "Serve only who gives the name:password on the first line of this file (basic auth)."
    )
    sd_dir: Path | None = _option(
        None, _path, "a directory", "Keep a file per rank here by which Prometheus finds it (file_sd_configs)."
    )
    grafana_url: str | None = _option(
        None, _text, "an address", "Send each finding to this Grafana as an annotation; the token is GRAFANA_TOKEN's."
    )
    grafana_token_file: Path | None = _option(None, _file, "a file", "Read Grafana's token from this file instead.")
    on_finding: str = _option(
        "report",
        _one_of("report", "raise"),
        "'report' or 'raise'",
        "What a finding at error or above does: only report, or end the run on all ranks at the same step.",
    )
    tolerance: float | None = _option(
        None,
        _number(0),
        "a number from 0 up",
        "Relative difference between ranks that is no finding; the default compares bit by bit.",
    )
    guard: str = _option(
        "observe",
        _guard,
        "'off' or 'observe'",
        "Numeric checks before the optimizer step: none, or watch without waiting.",
    )
    probe_every: int = _option(
        0,
        _integer(0),
        "an integer from 0 up",
        "Feed one batch to all ranks every so many steps and compare (agreement probe); 0 is never.",
    )
    status: bool = _option(
        True,
        _switch,
        "true or false",
        "Show the current step in the title of the terminal's window.",
    )
    quiet: bool = _option(
        False,
        _switch,
        "true or false",
        "Print nothing; the run directory and the metrics stay.",
    )
    nproc_per_node: int | None = _option(
        None,
        _integer(1),
        "an integer from 1 up",
        "Start so many ranks on this machine with torch's own launcher.",
    )
    steps: int | None = _option(
        None,
        _integer(1),
        "an integer from 1 up",
        "Stop the script after so many optimizer steps.",
    )
    fail_on: str = _option(
        "error",
        _one_of("warning", "error", "critical"),
        "'warning', 'error' or 'critical'",
        "Least severity that fails the check.",
        commands=("check",),
    )
    junit: Path | None = _option(
        None,
        _path,
        "a file",
        "Write the verdict as JUnit XML.",
        commands=("check",),
    )
    json: Path | None = _option(
        None,
        _path,
        "a file",
        "Write the verdict as JSON.",
        commands=("check",),
    )
    timeout: float = _option(
        1800.0,
        _number(0, above=True),
        "seconds above 0",
        "A run that lasts longer counts as a hang and is ended.",
        commands=("check",),
    )

    @classmethod
    def load(
        cls,
        explicit: Mapping[str, Any],
        environ: Mapping[str, str],
        cwd: Path,
        *,
        flags: bool = False,
    ) -> Config:
        """Merge all sources and check every name and value.

        Args:
            explicit: arguments of the command line or of a Python call, the strongest source.
            flags: name the explicit ones as on the command line (`--every-step`) in messages.

        Raises:
            UsageError: a name or a value is wrong; the message says in which source and what is valid.
        """
        values: dict[str, Any] = {}
        file, table = _pyproject(cwd)
        for key, value in table.items():
            name = key.replace("-", "_")
            source = f"{key} in [tool.ddpdebug] of {file}"
            values[name] = _parsed(name, value, source, file.parent, shown=key)
        for variable in sorted(environ.keys()):
            if variable.startswith(ENVIRONMENT_PREFIX) and variable not in INTERNAL_VARIABLES and environ[variable]:
                name = variable.removeprefix(ENVIRONMENT_PREFIX).lower()
                values[name] = _parsed(name, environ[variable], variable, cwd, shown=variable)
        for name, value in explicit.items():
            if value is None:
                continue  # as if not given
            flag = "--" + name.replace("_", "-")
            values[name] = _parsed(name, value, flag if flags else name, cwd, shown=flag if flags else name)
        alone = {"metrics_tls_key", "metrics_client_ca"} & values.keys()
        if alone and values.get("metrics_tls_cert") is None:
            raise UsageError(f"{min(alone)} needs a certificate; give metrics_tls_cert too")
        return cls(**values)

    def as_dict(self) -> dict[str, Any]:
        """Return the settings as JSON values."""
        return {name: str(value) if isinstance(value, Path) else value for name, value in asdict(self).items()}


def run_directory(run_id: str, now: datetime) -> Path:
    """Return the run directory of a run that did not name one; `now` is in UTC."""
    return Path("ddpdebug-runs") / f"{now:%Y%m%dT%H%M%SZ}-{run_id}"


def options(command: str | None = None) -> list[Option]:
    """Return all settings, or those of one command, in the order of their fields."""
    result = []
    for entry in fields(Config):
        about = entry.metadata
        if command is None or command in about["commands"]:
            switch = about["parse"] is _switch
            result.append(Option(entry.name, about["help"], about["valid"], about["commands"], switch))
    return result


def to_flags(given: Mapping[str, Any], command: str) -> list[str]:
    """Return the command line that gives `command` the settings in `given`, leaving out those it does not take."""
    line = []
    for option in options(command):
        value = given.get(option.name)
        if value is None:
            continue
        if option.switch:
            line.append(option.flag if _switch(value) else option.flag.replace("--", "--no-", 1))
        else:
            line.append(f"{option.flag}={value}")
    return line


def _parsed(name: str, value: Any, source: str, base: Path, *, shown: str) -> Any:
    entry = Config.__dataclass_fields__.get(name)
    if entry is None:
        where = source if source != shown else ""
        place = f" ({where})" if where else ""
        raise UsageError(f"unknown option {shown}{place}; {_near(shown)}")
    try:
        parsed = entry.metadata["parse"](value)
    except UsageError as error:
        raise UsageError(f"{source}: {error}") from None
    except (TypeError, ValueError):
        raise UsageError(f"{source}: {value!r} is not valid; give {entry.metadata['valid']}") from None
    # a script may change its directory: fix relative paths now, those of a pyproject.toml from where it lies
    parsed = base / parsed if isinstance(parsed, Path) else parsed
    if entry.metadata["parse"] is _file and not parsed.is_file():
        raise UsageError(f"{source}: there is no file {str(parsed)!r}; give {entry.metadata['valid']}")
    return parsed


def _near(shown: str) -> str:
    if shown.startswith("--"):
        return did_you_mean(shown.removeprefix("--"), [option.flag[2:] for option in options()], prefix="--")
    if shown.startswith(ENVIRONMENT_PREFIX):
        return did_you_mean(shown, [option.variable for option in options()])
    return did_you_mean(shown, [option.name for option in options()])


def _pyproject(cwd: Path) -> tuple[Path, Mapping[str, Any]]:
    for directory in (cwd, *cwd.parents):
        file = directory / "pyproject.toml"
        if file.is_file():
            break
    else:
        return Path(), {}
    try:
        table = tomllib.loads(file.read_text(encoding="utf-8")).get("tool", {}).get("ddpdebug", {})
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot read {file}: {error}") from None
    if not isinstance(table, dict):
        raise UsageError(f"[tool.ddpdebug] of {file} is not a table: {table!r}")
    return file, table
