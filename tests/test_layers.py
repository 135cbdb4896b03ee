"""Import direction: a module imports only from earlier layers, and the pure ones never torch."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

_PACKAGE = Path(__file__).parent.parent / "ddpdebug"

#: From the first layer to the last; a module may import from its own entry's left, and from its own folder.
_LAYERS = (
    ("errors", "observations", "findings", "redaction", "disk", "isolation.user_code"),
    ("parsing",),
    ("detectors.thresholds",),
    ("steps", "details", "config", "numeric_guard", "selftest"),
    ("detectors.base", "detectors.comparison", "detectors.examples"),
    ("detectors",),
    ("causes", "diagnosis", "assembly", "schedule"),
    ("coverage",),
    ("grafana",),
    ("sinks",),
    ("run_files",),
    ("golden",),
    ("report", "top", "verdict", "runner", "supervisor", "stacks"),
    ("junit",),
    ("verdict_files", "launcher"),
    ("verdict_annotations",),
    ("torch_internals", "exchange"),
    ("isolation",),
    ("fingerprint",),
    ("probes", "forensics"),
    ("reporting", "covering"),
    ("rejudge",),
    ("monitor",),
    ("attach", "faults", "seeding"),
    ("trajectory",),
    ("wrapper",),
    ("equivalence",),
    ("preflight",),
    ("dashboards",),
    ("doctor",),
    ("commands",),
    ("testing",),
    ("documentation",),
    ("pytest_plugin",),
    ("__main__",),
)
#: Facts about a run that its readers and its writer share.
_ALLOWED = {("sinks.run_directory", "run_files"), ("run_files", "sinks.segments")}

_PURE = (
    "errors",
    "redaction",
    "disk",
    "observations",
    "findings",
    "steps",
    "coverage",
    "covering",
    "details",
    "config",
    "numeric_guard",
    "causes",
    "assembly",
    "schedule",
    "diagnosis",
    "detectors",
    "sinks",
    "run_files",
    "reporting",
    "rejudge",
    "verdict",
    "verdict_files",
    "verdict_annotations",
    "stacks",
    "selftest",
    "golden",
    "runner",
    "supervisor",
    "dashboards",
    "report",
    "top",
    "grafana",
    "junit",
    "preflight.axes",
    "preflight.drawing",
    "preflight.figures",
    "preflight.files",
    "preflight.overfit_shapes",
    "preflight.page",
    "preflight.png",
    "preflight.results",
    "preflight.styled",
    "preflight.sweep",
    "preflight.sweep_verdict",
    "preflight.terminal_plot",
    "preflight.text",
    "pytest_plugin.causes",
    "pytest_plugin.stacks",
    "pytest_plugin.results",
    "pytest_plugin.rank_setup",
    "pytest_plugin.following",
    "pytest_plugin.pool",
    "pytest_plugin.protocol",
)
#: Modules that may name torch.distributed. The launcher starts processes, the plugin gives a test its group, the others
#: talk, hook or look; in a job only exchange communicates, over what torch_internals gives it, and preflight.in_step
#: where the user's program asks for a sweep on all ranks.
_DISTRIBUTED = (
    "exchange",
    "torch_internals",
    "probes",
    "monitor",
    "attach",
    "wrapper",
    "launcher",
    "pytest_plugin",
    "testing",
    "equivalence",
    "preflight.in_step",
    "doctor",
)
_HEAVY = {"torch", "numpy", "rich", "click", "prometheus_client"}


def _modules() -> dict[str, ast.Module]:
    found = {}
    for file in sorted(_PACKAGE.rglob("*.py")):
        parts = file.relative_to(_PACKAGE).with_suffix("").parts
        name = ".".join(parts).removesuffix(".__init__")
        found[name] = ast.parse(file.read_text(encoding="utf-8"))
    return found


def _imports(tree: ast.Module) -> set[str]:
    """Return the modules that are imported anywhere in a file, annotations' imports left out."""
    names: set[str] = set()
    skipped = {
        inner
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if node in skipped:
            continue
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            names.add(node.module)
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    return names


def _within(name: str, entries: tuple[str, ...]) -> bool:
    return any(name == entry or name.startswith(f"{entry}.") for entry in entries)


def _layer(name: str) -> int | None:
    """Return the number of the layer that describes `name` most closely."""
    found = [
        (len(entry), number) for number, entries in enumerate(_LAYERS) for entry in entries if _within(name, (entry,))
    ]
    return max(found)[1] if found else None


MODULES = _modules()
_OWN = {"__init__"}


def violations(modules: dict[str, ast.Module]) -> list[str]:
    """Return every import that goes to a later layer."""
    wrong = []
    for name, tree in modules.items():
        if name in _OWN:
            continue
        for imported in _imports(tree):
            target = imported.removeprefix("ddpdebug.")
            if target == imported or target not in modules or (name, target) in _ALLOWED:
                continue
            if target.split(".")[0] == name.split(".")[0]:
                continue
            here, there = _layer(name), _layer(target)
            assert here is not None and there is not None, f"{name} or {target} has no layer in this test"  # noqa: PT018
            if there > here:
                wrong.append(f"{name} imports {target}")
    return wrong


def test_direction() -> None:
    """No module imports from a later layer."""
    assert violations(MODULES) == []


def test_every_module_has_a_layer() -> None:
    """A new module is placed in the layout, here."""
    assert [name for name in MODULES if name not in _OWN and _layer(name) is None] == []


def test_violations_are_seen() -> None:
    """The check itself works: a pure module that imports the monitor is caught."""
    modules = {**MODULES, "findings": ast.parse("def f():\n    from ddpdebug import monitor")}
    assert violations(modules) == ["findings imports monitor"]


@pytest.mark.parametrize("name", [name for name in MODULES if _within(name, _PURE)])
def test_pure_modules_have_no_torch(name: str) -> None:
    """A pure module imports no torch, not even inside a function."""
    assert not [imported for imported in _imports(MODULES[name]) if imported.split(".")[0] == "torch"]


def test_one_module_communicates() -> None:
    """`torch.distributed` is named only where a reader expects it."""
    named = {name for name, tree in MODULES.items() if any(i.startswith("torch.distributed") for i in _imports(tree))}
    assert [name for name in sorted(named) if not _within(name, _DISTRIBUTED)] == []


def _loaded_after(statement: str) -> tuple[set[str], str]:
    report = "sys.stderr.write(f'{threading.active_count()} ' + ' '.join(sys.modules))"
    code = f"import sys, threading\n{statement}\n{report}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    threads, *modules = done.stderr.split()
    assert threads == "1"
    return set(modules), done.stdout


@pytest.mark.parametrize("module", ["ddpdebug", "ddpdebug.config", "ddpdebug.runner", "ddpdebug.diagnosis"])
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
    assert modules & {"torch", "rich", "numpy"} == set()


def test_heavy_imports_are_seen() -> None:
    """The fresh interpreter's test itself works."""
    modules, _ = _loaded_after("import rich")
    assert "rich" in modules
