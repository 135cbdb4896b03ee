"""Every setting, once: name, type, default, help. Command-line options are generated from here. Torch-free."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import Field, dataclass, field, fields
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from ddpdebug.config import parsing as kinds
from ddpdebug.config.parsing import Kind
from ddpdebug.detectors import ignored
from ddpdebug.detectors.thresholds import assignments
from ddpdebug.errors import UsageError, did_you_mean

ENVIRONMENT_PREFIX = "DDPDEBUG_"
#: Variables that ddpdebug passes to its own ranks, or its tests to themselves; not settings.
INTERNAL_VARIABLES = frozenset(
    ENVIRONMENT_PREFIX + name
    for name in (
        *("RUN_ID", "DEADLINE", "LAUNCHED"),
        *("REQUIRE_PROMETHEUS", "REQUIRE_SLURM", "REQUIRE_POSTGRES", "REQUIRE_TRITON", "REQUIRE_GPU"),
    )
)
#: Variables that hold tokens, which are no settings either: those are written down.
_TOKENS = frozenset({"DDPDEBUG_HUB_TOKEN", "DDPDEBUG_HUB_READ_TOKEN", "DDPDEBUG_HUB_READ_TOKEN_FILE"})
#: What Kubernetes sets in every container of a namespace that has a Service called `ddpdebug-hub`.
_SERVICE = re.compile(r"DDPDEBUG_HUB_(SERVICE|PORT)(_.*)?")


class Option(NamedTuple):
    """A setting as the commands see it: name, help, valid values, commands that take it."""

    name: str  # in Python, in pyproject.toml and, in capitals, in the environment
    help: str
    valid: str  # the values that are accepted, for messages and help
    commands: tuple[str, ...]
    switch: bool  # takes no value on the command line
    repeated: bool  # may be given several times

    @property
    def flag(self) -> str:
        """The option on the command line."""
        return "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        """The environment variable."""
        return ENVIRONMENT_PREFIX + self.name.upper()


def _option(default: Any, kind: Kind, text: str, *, commands: tuple[str, ...] = ("run", "check")) -> Any:
    return field(default=default, metadata={"kind": kind, "help": text, "commands": commands})


_THRESHOLD = Kind(assignments, "NAME=VALUE, several separated by commas")
_IGNORED = Kind(ignored.entries, "CODE or CODE:NAME with or without a reason after a #")


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """The settings of one run, all valid. Strongest first: argument, environment, pyproject.toml, default."""

    out: Path | None = _option(
        None,
        kinds.DIRECTORY,
        "Run directory, by default ddpdebug-runs/<UTC time>-<run id>; the preflight writes only where it is given.",
        commands=("run", "check", "preflight"),
    )
    file_mode: str = _option(
        "private",
        kinds.PERMISSIONS,
        "Who may read the files of the run directory: their owner, whom the umask lets, or whom the mode names.",
    )
    name: str | None = _option(
        None,
        kinds.text("a name"),
        "Name of the run for people, a label of all its metrics; the default is the script's.",
    )
    budget: float = _option(0.01, kinds.number(0, 1), "Share of the run's time that ddpdebug may take.")
    every_step: bool = _option(
        False,
        kinds.SWITCH,
        "Run every check in every step, whatever it costs. `check` does so where neither this nor a budget is given.",
    )
    metrics: str = _option(
        "per-rank",
        kinds.one_of("per-rank", "rank0", "off"),
        "Prometheus endpoints: one for each rank, only on rank 0, or none.",
    )
    metrics_host: str = _option(
        "127.0.0.1",
        kinds.text("an address to bind"),
        "Address of the metrics endpoint; 0.0.0.0 opens it to the network.",
    )
    metrics_port: int = _option(
        0,
        kinds.integer(0, 65535, valid="a port from 0 to 65535"),
        "Port of the metrics endpoint of local rank 0, the next ranks count up; 0 takes a free one.",
    )
    metrics_tls_cert: Path | None = _option(
        None, kinds.PEM_FILE, "Serve the metrics over TLS with this certificate chain."
    )
    metrics_tls_key: Path | None = _option(
        None, kinds.PEM_FILE, "Private key of the certificate, where it is in a file of its own."
    )
    metrics_client_ca: Path | None = _option(
        None, kinds.PEM_FILE, "Serve only clients with a certificate that this authority signed (needs TLS)."
    )
    metrics_password_file: Path | None = _option(
        None, kinds.EXISTING_FILE, "Serve only who gives the name:password on the first line of this file (basic auth)."
    )
    sd_dir: Path | None = _option(
        None, kinds.DIRECTORY, "Keep a file per rank here by which Prometheus finds it (file_sd_configs)."
    )
    linger: float = _option(
        60.0,
        kinds.number(0, 600),
        "With --sd-dir or a --metrics-port, a rank's final metrics are served after its end until they were scraped "
        "twice, or for so many seconds; 0 is not at all.",
    )
    push_outcome: str | None = _option(
        None,
        kinds.WEB_ADDRESS,
        "Also push each rank's final metrics to the Pushgateway at this address, where no process outlives a job.",
    )
    hub: str | None = _option(
        None,
        kinds.WEB_ADDRESS,
        "Show the run in the hub at this address (ddpdebug hub); the token is DDPDEBUG_HUB_TOKEN's.",
    )
    hub_token_file: Path | None = _option(
        None, kinds.EXISTING_FILE, "Read the hub's token from the first line of this file instead."
    )
    on_finding: str = _option(
        "report",
        kinds.one_of("report", "raise"),
        "What a finding at error or above does: report, or end the run on all ranks at the same step.",
    )
    on_hang: str = _option(
        "report",
        kinds.one_of("report", "stop"),
        "What a hang does, critical and not over after some seconds: only report, or end the run. Then each rank "
        "leaves with exit status 4, without its exit handlers.",
    )
    tolerance: float | None = _option(
        None, kinds.number(0), "Relative difference between ranks that is no finding; the default compares bit by bit."
    )
    threshold: Mapping[str, float] | None = _option(
        None,
        _THRESHOLD,
        "Adjust a threshold of the rules (docs/thresholds.md); may be repeated.",
    )
    ignore: tuple[str, ...] | None = _option(
        None,
        _IGNORED,
        "Suppress findings: CODE or CODE:NAME (a parameter, module, file or line; * and ? as in a shell), with a "
        "reason after a #. Suppressed findings are counted and kept in ignored.jsonl. May be repeated.",
    )
    validation_loss: str = _option(
        "modules",
        kinds.one_of("told", "modules", "functions"),
        "Where validation losses are read from: only observe(val_loss=...); also the return values of torch.nn loss "
        "modules and of the model in evaluation; or also those of torch.nn.functional, whose code is exchanged.",
    )
    guard: str = _option(
        "observe",
        kinds.one_of("off", "observe", "stop", "skip"),
        "What a NaN or Inf before the optimizer step does: it is not looked for, is reported, ends the run on all "
        "ranks, or makes all skip the step. With 'stop' and 'skip' the ranks wait for each other in every step.",
    )
    max_skips: int = _option(
        10,
        kinds.integer(0),
        "With the guard at 'skip': end the run when more steps than this, of the last 1000, would be skipped.",
    )
    probe_every: int = _option(
        0,
        kinds.integer(0),
        "Feed one batch to all ranks every so many steps and compare (agreement probe); 0 is never.",
    )
    status: bool = _option(True, kinds.SWITCH, "Show the current step in the title of the terminal's window.")
    replay: str = _option(
        "child",
        kinds.one_of("child", "off"),
        "Where a forward that has made a NaN or Inf runs once more, to name the operation and its line: in a copy of "
        "the process, or nowhere.",
    )
    bundle_limit: int = _option(
        2048, kinds.integer(0), "Largest replay bundle in MiB; what does not fit is left out, and 0 writes none."
    )
    keep_inputs: int = _option(
        8,
        kinds.integer(0),
        "MiB of inputs and output gradients that are held for a replay; beyond it a batch is there as long as the "
        "script has it.",
    )
    memory_history: str = _option(
        "off",
        kinds.one_of("off", "light", "full"),
        "Record CUDA's allocations for the snapshot at an out-of-memory error: living ones, or every event.",
    )
    memory_limit: int = _option(
        0,
        kinds.integer(0, valid="bytes from 0 up"),
        "Raise an out-of-memory error where CPU tensors exceed so many bytes, as a small device would; 0 is never.",
    )
    quiet: bool = _option(False, kinds.SWITCH, "Print nothing; the run directory and the metrics stay.")
    nproc_per_node: int | None = _option(
        None,
        kinds.integer(1),
        "Start so many ranks on this machine with torch's own launcher.",
        commands=("run", "check", "preflight"),
    )
    steps: int | None = _option(
        None,
        kinds.integer(1),
        "Stop the script after so many optimizer steps; the preflight takes 4 by default.",
        commands=("run", "check", "preflight"),
    )
    fail_on: str = _option(
        "error",
        kinds.one_of("warning", "error", "critical"),
        "Least severity that fails the check.",
        commands=("check", "verdict", "preflight"),
    )
    require_checks: bool = _option(
        False,
        kinds.SWITCH,
        "Exit with 1 where something was not checked, instead of only reporting it.",
        commands=("check", "verdict"),
    )
    junit: Path | None = _option(None, kinds.FILE, "Write the verdict as JUnit XML.", commands=("check", "verdict"))
    json: Path | None = _option(None, kinds.FILE, "Write the verdict as JSON.", commands=("check", "verdict"))
    markdown: Path | None = _option(
        None,
        kinds.FILE,
        "Write the verdict as Markdown; where $GITHUB_STEP_SUMMARY is set it is added to that file as well.",
        commands=("check", "verdict"),
    )
    codequality: Path | None = _option(
        None, kinds.FILE, "Write the verdict as a code quality report of GitLab.", commands=("check", "verdict")
    )
    timeout: float = _option(
        1800.0,
        kinds.number(0, above=True, valid="seconds above 0"),
        "A run that lasts longer counts as a hang and is ended.",
        commands=("check",),
    )
    golden: Path | None = _option(
        None,
        kinds.FILE,
        "Fail where facts of a good run (its directory, or a file of `ddpdebug facts`) do not hold any more, and name "
        "the first that differs.",
        commands=("check",),
    )

    #: Somebody has asked for metrics, so that their address is worth a line; no setting.
    shows_metrics: bool = False

    @classmethod
    def load(
        cls,
        explicit: Mapping[str, Any],
        environ: Mapping[str, str],
        cwd: Path,
        *,
        flags: bool = False,
        command: str | None = None,
    ) -> Config:
        """Merge all sources and check every name and value.

        Args:
            explicit: arguments of the command line or of a Python call, the strongest source.
            flags: name the explicit ones as on the command line (`--every-step`) in messages.
            command: whose defaults hold where nothing is said; `check` checks every step.

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
            if not variable.startswith(ENVIRONMENT_PREFIX) or variable in INTERNAL_VARIABLES | _TOKENS:
                continue
            if _SERVICE.fullmatch(variable):
                continue
            if environ[variable]:
                name = variable.removeprefix(ENVIRONMENT_PREFIX).lower()
                given = _parsed(name, environ[variable], variable, cwd, shown=variable)
                values[name] = _joined(values.get(name), given) if isinstance(given, tuple) else given
        for name, value in explicit.items():
            if value is None:
                continue  # as if not given
            flag = "--" + name.replace("_", "-")
            parsed = _parsed(name, value, flag if flags else name, cwd, shown=flag if flags else name)
            values[name] = _joined(values.get(name), parsed)
        if command == "check" and not {"every_step", "budget"} & values.keys():
            values["every_step"] = True
        alone = {"metrics_tls_key", "metrics_client_ca"} & values.keys()
        if alone and values.get("metrics_tls_cert") is None:
            raise UsageError(f"{min(alone)} needs a certificate; give metrics_tls_cert too")
        shows = any(name.startswith("metrics") or name == "sd_dir" for name in values)
        return cls(**values, shows_metrics=shows)


def settings() -> list[Field[Any]]:
    """Return the fields of `Config` that are settings."""
    return [entry for entry in fields(Config) if "kind" in entry.metadata]


def run_directory(run_id: str, now: datetime) -> Path:
    """Return the default run directory of a run without `out`; `now` is in UTC."""
    return Path("ddpdebug-runs") / f"{now:%Y%m%dT%H%M%SZ}-{run_id}"


def options(command: str | None = None) -> list[Option]:
    """Return all settings, or those of one command, in the order of their fields."""
    result = []
    for entry in settings():
        about = entry.metadata
        if command is None or command in about["commands"]:
            kind = about["kind"]
            special = kind is kinds.SWITCH, kind in {_THRESHOLD, _IGNORED}
            result.append(Option(entry.name, about["help"], kind.valid, about["commands"], *special))
    return result


def to_flags(given: Mapping[str, Any], command: str) -> list[str]:
    """Return the command line that gives `command` the settings in `given`, leaving out those it does not take."""
    line = []
    for option in options(command):
        value = given.get(option.name)
        if value is None:
            continue
        if option.repeated:
            line += [f"{option.flag}={word}" for word in value]
        elif option.switch:
            line.append(option.flag if kinds.switch(value) else option.flag.replace("--", "--no-", 1))
        else:
            line.append(f"{option.flag}={value}")
    return line


def _parsed(name: str, value: Any, source: str, base: Path, *, shown: str) -> Any:
    entry = Config.__dataclass_fields__.get(name)
    if entry is None or "kind" not in entry.metadata:
        where = source if source != shown else ""
        place = f" ({where})" if where else ""
        raise UsageError(f"unknown option {shown}{place}; {_near(shown)}")
    kind: Kind = entry.metadata["kind"]
    try:
        parsed = kind.parse(value)
    except UsageError as error:
        raise UsageError(f"{source}: {error}") from None
    except (TypeError, ValueError):
        raise UsageError(f"{source}: {value!r} is not valid; give {kind.valid}") from None
    # a script may change its directory: fix relative paths now, those of a pyproject.toml from where it lies
    parsed = base / parsed if isinstance(parsed, Path) else parsed
    if kind.must_exist and not parsed.is_file():
        raise UsageError(f"{source}: there is no file {str(parsed)!r}; give {kind.valid}")
    return parsed


def _joined(known: Any, given: Any) -> Any:
    """Return what a stronger source makes of a setting: of several values it adds to them."""
    if known and isinstance(given, dict):
        return {**known, **given}
    if known and isinstance(given, tuple):
        return tuple(dict.fromkeys((*known, *given)))
    return given


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
        tools = tomllib.loads(file.read_text(encoding="utf-8")).get("tool", {})
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"cannot read {file}: {error}") from None
    if not isinstance(tools, dict):
        raise UsageError(f"[tool] of {file} is not a table: {str(tools)[:80]!r}")
    table = tools.get("ddpdebug", {})
    if not isinstance(table, dict):
        raise UsageError(f"[tool.ddpdebug] of {file} is not a table: {table!r}")
    return file, table
