"""Import direction: a module imports only from earlier layers, and the pure ones never torch."""

from __future__ import annotations

import ast
import functools
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

_PACKAGE = Path(__file__).parent.parent.parent / "ddpdebug"

#: From the first to the last: a room imports from earlier lines only, also for annotations.
_LAYERS = (
    ("_version", "clock", "signals", "source_lines"),
    ("disk", "printing", "redaction", "schema", "torch_internals"),
    ("errors", "fingerprint"),
    ("devices", "triton_kernels"),
    ("detectors", "device_fingerprint", "isolation"),
    ("config", "nested", "shard_digest", "sinks"),
    ("run_directory",),
    ("exchange", "grafana", "processes"),
    ("diagnosis", "facts", "probes", "progress"),
    ("companion",),
    ("checkpoints", "ci", "cures", "forensics", "reports"),
    ("instrument", "testing"),
    ("mcp", "monitor", "pytest_plugin"),
    ("hub", "preflight", "trainers"),
    ("commands",),
    ("__main__",),
)

_PURE = (
    "errors",
    "redaction",
    "disk",
    "isolation.background",
    "printing",
    "isolation.own_imports",
    "schema.row",
    "schema.finding",
    "schema.step",
    "schema.coverage",
    "monitor.covering",
    "schema.details",
    "schema.announcements",
    "schema.wire",
    "config.settings",
    "exchange.step_vote",
    "diagnosis.root_causes",
    "exchange.step_assembler",
    "monitor.sampling",
    "diagnosis.engine",
    "detectors",
    "sinks",
    "run_directory.reader",
    "run_directory.mirror",
    "processes.pusher",
    "hub",
    "mcp",
    "cures",
    "companion",
    "diagnosis.reporter",
    "diagnosis.rejudge",
    "facts",
    "ci.verdict",
    "ci.json_junit",
    "ci.github_gitlab",
    "ci.sarif",
    "processes.stacks",
    "processes.script",
    "processes.torch_import",
    "processes.supervisor",
    "grafana.dashboards",
    "reports",
    "reports.top",
    "grafana.client",
    "preflight.output.axes",
    "preflight.output.svg",
    "preflight.output.files",
    "preflight.output.page",
    "preflight.output.results",
    "preflight.checks.lr_sweep",
    "preflight.output.terminal_plot",
    "preflight.output.text",
    "pytest_plugin.stacks",
    "pytest_plugin.results",
    "pytest_plugin.rank_setup",
    "pytest_plugin.pool",
    "pytest_plugin.marked_test",
)
#: Modules that may name torch.distributed. The launcher starts processes, the plugin gives a test its group, the others
#: talk, hook or look; in a job only exchange communicates, over what torch_internals gives it, and where the user's
#: program asks for it preflight.in_step, in a sweep on all ranks, and checkpoints.live, for digests of sharded tensors.
_DISTRIBUTED = (
    "exchange.ticks",
    "torch_internals",
    "probes",
    "instrument",
    "monitor.monitor",
    "monitor.side_groups",
    "monitor.attach",
    "processes.torchrun",
    "pytest_plugin",
    "testing",
    "ci.equivalence",
    "preflight.sandbox.lockstep",
    "monitor.doctor",
    "checkpoints.live",
)
_HEAVY = {"torch", "numpy", "rich", "click", "prometheus_client", "sqlalchemy", "starlette", "uvicorn", "jinja2"}


@functools.cache
def _modules() -> dict[str, set[str]]:
    """Return what each module of ours imports."""
    found = {}
    for file in sorted(_PACKAGE.rglob("*.py")):
        parts = file.relative_to(_PACKAGE).with_suffix("").parts
        name = ".".join(parts).removesuffix(".__init__")
        found[name] = _imports(file.read_text(encoding="utf-8"))
    return found


def _imports(source: str) -> set[str]:
    """Return the modules that are imported anywhere in a file, for annotations too."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            names.add(node.module)
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    return names


def _within(name: str, entries: tuple[str, ...]) -> bool:
    return any(name == entry or name.startswith(f"{entry}.") for entry in entries)


def _layer(name: str) -> int | None:
    """Return the number of the room's layer."""
    room = name.split(".", maxsplit=1)[0]
    return next((number for number, rooms in enumerate(_LAYERS) if room in rooms), None)


_OWN = {"__init__"}


def targets(modules: dict[str, set[str]], name: str) -> set[str]:
    """Return the modules of ours that a module imports; of a name in a package, the module and not the package."""
    found = {i.removeprefix("ddpdebug.") for i in modules[name] if i.startswith("ddpdebug.")}
    found &= modules.keys() - {name}
    return {t for t in found if not any(other.startswith(f"{t}.") for other in found)}


def violations(modules: dict[str, set[str]]) -> list[str]:
    """Return every import of another room that is not in an earlier layer."""
    wrong = []
    for name in modules.keys() - _OWN:
        for target in targets(modules, name):
            if target.split(".")[0] == name.split(".")[0]:
                continue
            here, there = _layer(name), _layer(target)
            assert here is not None and there is not None, f"{name} or {target} has no layer in this test"  # noqa: PT018
            if there >= here:
                wrong.append(f"{name} imports {target}")
    return sorted(wrong)


def circles(modules: dict[str, set[str]]) -> list[set[str]]:
    """Return the groups of modules that import one another, directly or over others."""
    edges = {name: targets(modules, name) for name in modules}
    reached: dict[str, set[str]] = {}
    for name in modules:
        seen: set[str] = set()
        waiting = [name]
        while waiting:
            for target in edges[waiting.pop()] - seen:
                seen.add(target)
                waiting.append(target)
        reached[name] = seen
    groups = {frozenset(t for t in reached[name] if name in reached[t]) for name in modules if name in reached[name]}
    return sorted(map(set, groups), key=len)


def test_direction() -> None:
    """No module imports from its own layer's other rooms, or from a later layer."""
    assert violations(_modules()) == []


def test_no_circles() -> None:
    """No module imports itself over others, not even for annotations."""
    assert circles(_modules()) == []


def test_facts_are_read_beside_the_job() -> None:
    """Nothing that runs in a rank loads what folds facts, not even inside a function."""
    modules, seen = _modules(), {"monitor.monitor"}
    waiting = ["monitor.monitor", "commands._rank", "commands._own_verdict"]
    while waiting:
        found = targets(modules, waiting.pop()) - seen
        seen |= found
        waiting += found
    assert "monitor.first_steps" in seen
    assert [name for name in seen if name.split(".")[0] == "facts"] == []


def test_every_module_has_a_layer() -> None:
    """A new module is placed in the layout, here."""
    assert [name for name in _modules() if name not in _OWN and _layer(name) is None] == []


def test_violations_are_seen() -> None:
    """The check itself works: a pure module that imports the monitor is caught."""
    modules = {**_modules(), "schema.finding": _imports("def f():\n    from ddpdebug import monitor")}
    assert violations(modules) == ["schema.finding imports monitor"]
    modules["schema.finding"] = _imports("if TYPE_CHECKING:\n    from ddpdebug.schema.row import x")
    modules["schema.row"] = _imports("from ddpdebug.schema import finding")
    assert {"schema.finding", "schema.row"} in circles(modules)


def test_pure_modules_have_no_torch() -> None:
    """A pure module imports no torch, not even inside a function."""
    pure = {name: imported for name, imported in _modules().items() if _within(name, _PURE)}
    assert len(pure) > 100
    assert [name for name, imported in pure.items() if any(i.split(".")[0] == "torch" for i in imported)] == []


def test_one_module_communicates() -> None:
    """`torch.distributed` is named only where a reader expects it."""
    named = {name for name, found in _modules().items() if any(i.startswith("torch.distributed") for i in found)}
    assert [name for name in sorted(named) if not _within(name, _DISTRIBUTED)] == []


def _loaded_after(statement: str) -> tuple[set[str], str]:
    report = "sys.stderr.write(f'{threading.active_count()} ' + ' '.join(sys.modules))"
    code = f"import sys, threading\n{statement}\n{report}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    threads, *modules = done.stderr.split()
    assert threads == "1"
    return set(modules), done.stdout


@pytest.mark.parametrize(
    "module",
    ["ddpdebug", *(f"ddpdebug.{name}" for name in ("config.settings", "processes.script", "diagnosis.engine"))],
)
def test_import_is_quiet(module: str) -> None:
    """Importing loads nothing heavy, starts no thread and prints nothing."""
    modules, printed = _loaded_after(f"import {module}")
    assert modules & _HEAVY == set()
    assert printed == ""


_WRONG_LINE = """
import contextlib, io
from ddpdebug.commands import main
with contextlib.redirect_stderr(io.StringIO()):
    assert main(['run', 'no_such_script.py', '--x']) == 2
"""


def test_command_line_is_light() -> None:
    """The command line is known to be right or wrong before torch or rich are loaded."""
    modules, _ = _loaded_after(_WRONG_LINE)
    assert modules & {"torch", "rich", "numpy", "sqlalchemy", "starlette", "uvicorn"} == set()


def test_heavy_imports_are_seen() -> None:
    """The fresh interpreter's test itself works."""
    modules, _ = _loaded_after("import rich")
    assert "rich" in modules


@pytest.mark.parametrize("folder", ["benchmarks", "demo", "tools"])
def test_scripts_import_what_is_there(folder: str) -> None:
    """Nothing else runs a benchmark when a name moves."""
    for path in sorted((_PACKAGE.parent / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "ddpdebug":
                module = importlib.import_module(str(node.module))
                for name in (alias.name for alias in node.names):
                    there = hasattr(module, name) or importlib.util.find_spec(f"{node.module}.{name}") is not None
                    assert there, f"{path}: {node.module}.{name}"


def test_a_rank_loads_no_rule_and_nothing_that_serves() -> None:
    """They are in the companion: what is imported with a monitor are none of them, nor what runs them."""
    script = """
import sys
import ddpdebug.monitor.monitor
serving = {"prometheus_client", "http.server", "ddpdebug.sinks.prometheus.exporter", "ddpdebug.processes.pusher"}
assert not sys.modules.keys() & {*serving, "ddpdebug.detectors.base", "ddpdebug.detectors.examples"}
rules = [name for name in sys.modules if name.startswith("ddpdebug.detectors.") and name.count(".") == 3]
print([name for name in rules if name.rpartition(".")[2][-1:].isdigit()], "ddpdebug.diagnosis.engine" in sys.modules)
print(len(rules))
"""
    told = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.split("\n")
    assert told[0] == "[] False"
    assert int(told[1]) < 6, "the texts of errors, and the few thresholds that a rank reads"
