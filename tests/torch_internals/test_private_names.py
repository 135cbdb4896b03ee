"""Private names of torch: all of them stand in one table, and a job ends alike whichever of them is missing."""

from __future__ import annotations

import ast
import functools
import json
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ddpdebug.forensics.loss import source_reading
from ddpdebug.probes.training_loop import loss_graph as losses
from ddpdebug.torch_internals import lookup, names, nodes

_ROOT = Path(__file__).parent.parent.parent
_PACKAGE = _ROOT / "ddpdebug"
_TABLE = "torch_internals/names.py"

_PRIVATE = re.compile(r"_[A-Za-z]\w*")
_NODE = re.compile(r"[A-Z]\w*Backward\d*")
_DOTTED = re.compile(r"torch\.(\w+\.)*_[a-z]")

#: Underscores that are not torch's, wherever they stand.
_NOT_TORCH = {
    **dict.fromkeys(("_replace", "_fields", "_make", "_field_defaults"), "of named tuples, and documented"),
    **dict.fromkeys(("_getframe", "_current_frames", "_exit", "_is_gil_enabled"), "of `sys` and `os`, and documented"),
    **dict.fromkeys(
        ("_get_module_details", "_get_main_module_details", "_run_module_as_main"), "of runpy: what `python -m` runs"
    ),
}
#: Strings and attributes with an underscore in front that are not torch's, by file.
_ALLOWED = {
    ("probes/coverage.py", "_start_method"): "of multiprocessing: how a process starts",
    ("probes/coverage.py", "_target"): "of multiprocessing: what a process runs",
    ("probes/coverage.py", "torch._inductor"): "begins the names of classes whose processes are no ranks",
    ("probes/threads.py", "_DummyThread"): "of threading",
    ("pytest_plugin/pool.py", "_tmp_path_factory"): "of pytest",
    ("pytest_plugin/marked_test.py", "_setupstate"): "of pytest",
    ("pytest_plugin/stacks.py", "_pytest"): "of pytest",
    ("monitor/sinks.py", "_PORT"): "ends the name of a variable",
    ("printing.py", "_instances"): "of tqdm: the bars that are open",
    ("checkpoints/names.py", "_orig_mod"): "stands in the names of a checkpoint's entries",
    ("checkpoints/names.py", "_checkpoint_wrapped_module"): "stands in the names of a checkpoint's entries",
    ("checkpoints/names.py", "_fsdp_wrapped_module"): "stands in the names of a checkpoint's entries",
    ("checkpoints/sharded.py", "_StorageInfo"): "names a class in a checkpoint's metadata, which stands in for it",
    ("checkpoints/sharded.py", "_get_layout"): "names a function in a checkpoint's metadata, which stands in for it",
    ("checkpoints/sharded.py", "torch.distributed._shard.sharded_tensor.metadata"): "names a module there",
}


@functools.cache
def _files() -> dict[str, ast.Module]:
    found = {file.relative_to(_PACKAGE).as_posix(): file for file in sorted(_PACKAGE.rglob("*.py"))}
    return {name: ast.parse(file.read_text(encoding="utf-8")) for name, file in found.items()}


@functools.cache
def _own() -> set[str]:
    """Return the names with an underscore that ddpdebug gives to things of its own."""
    own: set[str] = set()
    for tree in _files().values():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                own.add(node.name)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                own.add(node.attr)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                own.add(node.id)
    return own


def private_uses(tree: ast.Module, own: set[str]) -> Iterator[str]:
    """Yield what a module takes of somebody else's by a name with an underscore in front."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            ours = node.attr in own or (isinstance(node.value, ast.Name) and node.value.id in {"self", "cls"})
            if _PRIVATE.fullmatch(node.attr) and not ours:
                yield node.attr
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "torch":
            words = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
            yield from (word for word in words if _PRIVATE.fullmatch(word))
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if _DOTTED.match(alias.name))
        elif isinstance(node, ast.Constant):
            text = str(node.value)
            if (_PRIVATE.fullmatch(text) and text not in own) or _DOTTED.match(text):
                yield text


def _left(files: dict[str, ast.Module]) -> set[tuple[str, str]]:
    own = _own() - {name.path.rpartition(".")[2] for name in names.TABLE}
    return {(file, found) for file, tree in files.items() for found in private_uses(tree, own)}


@pytest.mark.smoke
def test_every_private_name_stands_in_the_table() -> None:
    """No module but the table's names anything of torch's that has an underscore in front."""
    files = _files()
    found = _left({name: tree for name, tree in files.items() if name != _TABLE})
    nodes_recipes = {("torch_internals/nodes.py", "_reshape_alias")}  # makes the node that it is to show
    assert {(file, name) for file, name in found if name not in _NOT_TORCH} - {*_ALLOWED} == nodes_recipes
    assert set(_ALLOWED) <= found  # no exception outlives what it was for


def test_the_tables_own_uses_are_registered() -> None:
    """In the table itself there are only the names that it registers."""
    paths = ".".join(name.path for name in names.TABLE).split(".")
    left = {name for _, name in _left({_TABLE: _files()[_TABLE]}) if not name.startswith("torch.")}
    assert left - {*paths, "_dynamo_has"} <= {"_saved_dim", "_raw_saved_result"}  # which the probes look for


@pytest.mark.parametrize(
    "line",
    [
        "torch._C._new_thing()",
        "tensor._version",
        "getattr(module, '_parameters')",
        "module.__dict__['_new_table']",
        "from torch._dynamo import eval_frame",
        "import torch._dynamo.eval_frame",
        "sys.modules.get('torch._dynamo.eval_frame')",
        "from torch.utils._python_dispatch import TorchDispatchMode",
    ],
)
def test_private_uses_are_seen(line: str) -> None:
    """The check itself works."""
    assert [pair for pair in _left({"probes/new.py": ast.parse(line)}) if pair not in _ALLOWED]


def test_every_name_of_the_table_is_used() -> None:
    """What nobody needs any more is not probed."""
    table = ast.parse((_PACKAGE / _TABLE).read_text(encoding="utf-8"))
    assigned = {
        target.id
        for node in table.body
        if isinstance(node, ast.Assign | ast.AnnAssign)
        for name in ast.walk(node.targets[0] if isinstance(node, ast.Assign) else node.target)
        if isinstance(target := name, ast.Name)
    }
    words = Counter(word for file in _PACKAGE.rglob("*.py") for word in re.findall(r"\w+", file.read_text("utf-8")))
    unused = {name for name in assigned if words[name] < 2}
    assert unused == {"SKIPS_DYNAMO"}  # a method that ours overrides, by its name


def test_names_of_nodes_are_listed() -> None:
    """Whatever is compared with the name of a node of autograd is a name that `nodes.py` has an operation for."""
    written = {
        node.value
        for file, tree in _files().items()
        if file != "torch_internals/nodes.py"
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and _NODE.fullmatch(node.value)
    }
    assert "ReluBackward0" in written
    assert written - {*nodes.NODES, "Backward"} == set()
    kinds = {name.partition("Backward")[0].lower() for name in losses.FORM | losses._POINTWISE}
    listed = [*source_reading._MADE.values(), *source_reading._OPERATORS.values(), source_reading._INDEX]
    kinds |= set(re.split(r"[ |]", " ".join(listed)))
    assert kinds - nodes.kinds() == set()


@pytest.mark.parametrize("name", nodes.NODES)
def test_a_real_graph_makes_the_node(name: str) -> None:
    """The operation that stands beside the name makes a node of that name."""
    assert name in set(nodes.made_by(nodes.NODES[name]))


def test_a_node_that_is_not_made_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The probe itself works: another operation, one that is gone, one that takes other arguments."""
    wrong = {
        "ReluBackward0": lambda x: x.tanh(),
        "ExpBackward0": lambda x: x.no_such_thing(),
        "TBackward0": lambda x: x.t(1),
    }
    monkeypatch.setattr(nodes, "NODES", {**nodes.NODES, **wrong})
    missing = [name for name in names.missing(doctor=True) if not name.is_later()]
    assert {name.path for name in missing} == {f"autograd node {name}" for name in wrong}
    assert all(name.off for name in missing)


def test_nothing_is_missing_here() -> None:
    """The torch that the tests run with has everything that is not known to be of a later one."""
    assert [name.path for name in names.missing(doctor=True) if not name.is_later()] == []
    assert len({name.path for name in names.TABLE}) == len(names.TABLE)


def test_what_a_later_torch_brought_is_said_by_the_doctor_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is no news to who uses an older one; without it on a torch that should have it, it is."""
    feature = names.Feature("a test", "tests are off")
    before = len(names.TABLE)
    try:
        made = lookup.register("torch._C._no_such_function", feature, since=(2, 12))
        monkeypatch.setattr(torch, "__version__", "2.9.1+cu128")
        assert made.is_later()
        assert made not in names.missing()
        assert made in names.missing(doctor=True)
        monkeypatch.setattr(torch, "__version__", "2.12.0a0+git1234")
        assert made in names.missing()
    finally:
        del names.TABLE[before:]


def test_attributes_of_instances_are_probed_by_the_code_that_gives_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """What stands in the place of torch's function is not asked, also where torch itself has put it there."""
    assert lookup.named_in("torch.nn.Module.register_buffer", "_buffers")
    assert not lookup.named_in("torch.nn.Module.register_buffer", "_no_such_table")
    assert not lookup.named_in("torch.nn.Module.no_such_method", "_parameters")
    assert lookup.named_in("torch.Tensor.__add__", "_anything")  # no Python code
    monkeypatch.setattr(torch.nn.Module, "register_buffer", torch.nn.Module.register_parameter)
    assert lookup.named_in("torch.nn.Module.register_buffer", "_buffers")


def test_what_is_missing_says_so_where_it_is_used() -> None:
    """With the name and what is off."""
    feature = names.Feature("a test", "tests are off")
    before = len(names.TABLE)
    try:
        made = [
            lookup.thing("torch._C._no_such_function", feature),
            lookup.later("torch._C._no_such_function", feature)(),
            lookup.reader("torch.Tensor._no_such_attribute", feature),
        ]
        assert lookup.key("torch.Tensor._no_such_attribute", feature) == "_no_such_attribute (missing)"
        assert lookup.thing("torch._C._no_such_function", feature, otherwise=3) == 3
        for missing in made:
            with pytest.raises(names.MissingError, match=r"this torch has no torch\..*_no_such.*: tests are off"):
                missing(1)
        with pytest.raises(names.MissingError):
            _ = made[0].attribute
        assert len(names.missing()) == 5
    finally:
        del names.TABLE[before:]


# --- a job without one of them ----------------------------------------------------------------------------------------

_JOB = _ROOT / "tests" / "support" / "scripts" / "without_names.py"


#: Of each feature one name, and all of them.
_OF_EACH = [*{name.feature.name: name.path for name in names.TABLE if not name.path.startswith("autograd")}.values()]
_ALL = [name.path for name in names.TABLE if not name.path.startswith("autograd")]


@pytest.mark.timeout(1500)
@pytest.mark.jobs
@pytest.mark.parametrize(
    "gone",
    [
        pytest.param(_OF_EACH, id="of each feature one", marks=pytest.mark.slow),
        pytest.param(_ALL, id="all", marks=pytest.mark.thorough),
    ],
)
def test_training_ends_alike_whichever_name_is_missing(gone: list[str], tmp_path: Path) -> None:
    """Status, output and the bits of the model are those without ddpdebug, steps are seen, and what is off is told."""
    words = [sys.executable, str(_JOB), str(tmp_path / "results.json"), *gone]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    jobs: dict[str, dict[str, Any]] = json.loads((tmp_path / "results.json").read_text())
    plain = {ranks: jobs.pop(f"plain {ranks}") for ranks in (1, 2)}
    for ranks, alone in plain.items():
        whole = jobs.pop(f"all {ranks}")
        assert (alone["status"], "weights" in str(alone["out"])) == (0, True)
        assert (whole["status"], whole["out"], whole["told"]) == (0, alone["out"], [])
        assert whole["steps"] or ranks > 1
    assert set(jobs) == set(gone)
    offs = {name.path: name for name in names.TABLE}
    for path, job in jobs.items():
        assert (job["status"], job["out"]) == (0, plain[job["ranks"]]["out"]), path
        assert job["steps"] or job["ranks"] > 1, path  # two ranks may have ended before they have met
        if offs[path].applies() and not offs[path].by_doctor:
            text = " ".join(job["told"])
            assert path in text, path
            assert offs[path].off in text, path
