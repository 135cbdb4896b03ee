"""What is read of a run is produced by a run, and the other way round.

Rules, sinks and reports are tested with rows and details made by hand, which hides a field that nothing fills in any
more. Here they are compared with what the recorded runs of the corpus and three short jobs have left: every field of
the row, every flag, every kind of detail with its keys, every topic of an announcement. What is read is collected from
the code, what the rules' examples hold from the rules, what is promised from the classes of `schema/`; none of it is
listed here.
"""

from __future__ import annotations

import ast
import inspect
import math
import re
import sys
import textwrap
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest

import ddpdebug
from ddpdebug.config.settings import Config
from ddpdebug.detectors.base import Facts, runbook
from ddpdebug.detectors.catalog import catalog
from ddpdebug.detectors.comparison import CLASS_COLUMNS
from ddpdebug.run_directory.reader import read_observations, read_rows
from ddpdebug.schema.announcements import TOPICS, read_announcement
from ddpdebug.schema.details import DETAILS, KINDS, read_detail
from ddpdebug.schema.row import Flag, Row
from ddpdebug.schema.wire import Struct, from_json, to_json

sys.path.append(str(Path(__file__).resolve().parents[1] / "detection"))
import recorded_runs

pytestmark = [pytest.mark.jobs, pytest.mark.timeout(1000)]

_HERE = Path(__file__).resolve().parent
_PACKAGE = Path(ddpdebug.__file__).parent

#: Filled in by the CUDA allocator only: `torch_internals/memory.py` reads nothing else's.
_ON_CUDA_FIELDS = {
    "device_allocated_bytes",
    "device_reserved_bytes",
    "device_peak_bytes",
    "device_inactive_bytes",
    "device_limit_bytes",
    "device_retries",
    "copy_seconds",
}
#: Columns for more classes of shards than two ranks have: tests/probes/test_mesh.py.
_UNFILLED = {name for name in Row._fields if re.match(r"class_[1-5]_", name)}
#: Keys, topics and flags that only a GPU, another command, or a script outside of the corpus brings up.
_UNUSUAL = {
    ("place", "gpu_uuid"),
    ("place", "device"),
    ("contract", "gathered.location"),
    ("contract", "gathered.shapes"),
    *(("numerics", f"{found}.candidates") for found in ("loss", "loss_backward")),
}
_ELSEWHERE = {"equivalence": "tests/commands/test_equivalence.py"}
_FLAGS_ELSEWHERE = {
    "ALONE": "tests/probes/test_unwatched_steps.py",
    "KEPT_GATHERED": "tests/probes/test_shard_gathers.py",
}

#: Keys that no code reads, for people who read `observations.jsonl`, and what these tell them.
_FOR_PEOPLE = {
    "compiled": "why module outputs were not looked at",
    "peak": "the most that was in use, in the summary of a failed allocation",
    "sample": "all numbers of the allocator, likewise",
    "visits": "whether the search for a holder has seen all or stopped at its limit",
}

#: Where what ranks say is defined.
_SCHEMA = ("details", "announcements", "wire")
#: Who fills in rows, details and announcements; everything else reads them. `preflight` and `testing` do neither.
_PRODUCERS = ("probes/", "forensics/", "torch_internals/", "preflight/", "testing/", "pytest_plugin/")
_NEITHER = ("schema/row.py", *(f"schema/{name}.py" for name in _SCHEMA), "detectors/examples.py")

#: What rules share.
_RULES = ("detectors/comparison.py", "detectors/kinds.py")

#: A rule that wants to know everything about every step, of every rank.
_CURIOUS = """
from ddpdebug.processes import detached

def refuse(*args):
    raise OSError("the rules judge in the rank, where there is one more")

detached.start = refuse
import ddpdebug.diagnosis.engine
import ddpdebug.exchange.ticks
from ddpdebug.schema.details import KINDS
from ddpdebug.detectors.base import Detector
from ddpdebug.schema.finding import Severity

class Curious(Detector):
    code, severity, title, wants, every_sample = "TEST999", Severity.INFO, "asks", KINDS, True

    def can_show(self, step):
        return False

    def suspects(self, step):
        return True

rules = ddpdebug.diagnosis.engine.catalog()
ddpdebug.diagnosis.engine.catalog = lambda: (*rules, Curious)
ddpdebug.exchange.ticks.LEAVE_SECONDS = 60.0  # on a busy machine nobody is left behind
"""
#: Script, arguments, options, exit status of the ranks.
_JOBS: tuple[tuple[str, list[str], list[str], set[int]], ...] = (
    ("loops.py", [], ["--tolerance", "1e-6"], {0}),
    ("loading.py", [], [], {0}),
    ("nonfinite.py", ["fail"], ["--guard", "skip"], {1}),
)


#: So many values of one kind with the same keys are looked at.
_ENOUGH = 20


@dataclass
class Produced:
    """What the jobs have left."""

    fields: set[str] = field(default_factory=set)
    flags: Flag = field(default_factory=lambda: Flag(0))
    paths: dict[str, set[str]] = field(default_factory=dict)  # kind or topic -> dotted paths of keys
    keys: set[str] = field(default_factory=set)  # all of them, also in values that are left to other pages
    unread: dict[str, Any] = field(default_factory=dict)  # kind or topic -> a value that is not read as it was said
    read: dict[str, list[Struct | None]] = field(default_factory=dict)
    forms: Counter[tuple[str, frozenset[str]]] = field(default_factory=Counter)

    def take(self, rows: Iterable[Row], observations: Iterable[Mapping[str, Any]]) -> None:
        """Add what a run has left."""
        unseen = set(Row._fields) - self.fields
        for row in rows:
            self.flags |= Flag(row.flags)
            for name in [name for name in unseen if (value := getattr(row, name)) and not math.isnan(value)]:
                unseen.discard(name)
                self.fields.add(name)
        for observed in observations:
            about = observed["payload"]
            if observed["kind"] == "last_state":
                for row in about["rows"].values():
                    self.flags |= Flag(row["flags"])
            elif observed["kind"] == "detail":
                self.say(about["detail"], about["value"], read_detail(about["detail"], about["value"]))
            else:
                topic = about["topic"]
                self.say(topic_of(topic), about["value"], read_announcement(topic, about["value"]))

    def say(self, kind: str, value: Any, read: Struct | None) -> None:
        """Add a detail or an announcement."""
        form = kind, frozenset(dotted(value))
        self.forms[form] += 1
        if value is None or self.forms[form] > _ENOUGH:  # this rank cannot tell, or many have told the like
            return
        again = None if read is None else strict(to_json(read))
        if not is_part(value, again):  # a recording may lack what is said today
            self.unread.setdefault(kind, (value, again))
        self.paths.setdefault(kind, set()).update(paths(read))
        self.read.setdefault(kind, []).append(read)
        self.keys |= set(keys(value))


def is_part(value: Any, whole: Any) -> bool:
    """Return whether all of a JSON value is in another one, its keys in the same order."""
    if isinstance(value, dict) and isinstance(whole, dict):
        order = [key for key in whole if key in value]
        return order == [*value] and all(is_part(item, whole[key]) for key, item in value.items())
    if isinstance(value, list) and isinstance(whole, list):
        return len(value) == len(whole) and all(map(is_part, value, whole))
    return bool(value == whole) and isinstance(value, bool) is isinstance(whole, bool)


def topic_of(topic: str) -> str:
    """Return a topic without the number of the DDP or loader that it is about."""
    return re.sub(r":\d+$", "", topic)


def paths(value: Any, at: str = "") -> Iterator[str]:
    """Yield the dotted paths of the keys in a detail or an announcement; not of tables, whose keys are names."""
    if isinstance(value, Struct):
        told = to_json(value)
        for f in fields(value):
            key = f.metadata.get("key", f.name)
            if type(value).bare:
                yield from paths(getattr(value, f.name), at)
            elif key in told:
                below = f"{at}.{key}".removeprefix(".")
                yield below
                yield from paths(getattr(value, f.name), below)
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from paths(item, f"{at}.*")
    elif isinstance(value, tuple):
        for item in value:
            yield from paths(item, at)


def promised_paths(kind: Any, at: str = "") -> Iterator[str]:
    """Yield the dotted paths that a class, or a type hint, promises."""
    if isinstance(kind, type) and issubclass(kind, Struct):
        hints = get_type_hints(kind)
        for f in fields(kind):
            below = at if kind.bare else f"{at}.{f.metadata.get('key', f.name)}".removeprefix(".")
            if not kind.bare:
                yield below
            yield from promised_paths(hints[f.name], below)
    elif get_origin(kind) is Mapping:
        yield from promised_paths(get_args(kind)[1], f"{at}.*")
    elif get_origin(kind) is not Literal:
        for part in get_args(kind):
            yield from promised_paths(part, at)


def keys(value: Any) -> Iterator[str]:
    """Yield all keys in a JSON value."""
    for item in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from keys(item)
    if isinstance(value, dict):
        yield from value


def dotted(value: Any, at: str = "") -> Iterator[str]:
    """Yield the dotted paths of all keys in a JSON value."""
    for key, item in value.items() if isinstance(value, dict) else ():
        yield f"{at}.{key}"
        yield from dotted(item, f"{at}.{key}")
    for item in value if isinstance(value, list) else ():
        yield from dotted(item, at)


def damaged(value: Any) -> Iterator[Any]:
    """Yield what is left of a JSON value when one of its parts is gone, or is something else."""
    yield from (None, [], {}, "x", 1.5, True)
    if isinstance(value, dict):
        yield {**value, "unknown": 1}
        for key, item in value.items():
            yield {name: other for name, other in value.items() if name != key}
            yield from ({**value, key: wrong} for wrong in damaged(item))
    elif isinstance(value, list) and value:
        yield from ([wrong, *value[1:]] for wrong in damaged(value[0]))


def strict(value: Any) -> Any:
    """Return a JSON value with the numbers that JSON lacks as texts, as files have it."""
    if isinstance(value, dict):
        return {key: strict(item) for key, item in value.items()}
    if isinstance(value, list):
        return [strict(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def words(found: Iterable[str]) -> set[str]:
    """Return the keys in dotted paths, without names."""
    return {path.rpartition(".")[2] for path in found} - {"*"}


@pytest.fixture(scope="module")
def produced(run_jobs: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Produced:
    """Read the recordings and run the jobs, every step of them looked at."""
    folder = tmp_path_factory.mktemp("contract")
    jobs = []
    for number, (script, arguments, options, _) in enumerate(_JOBS):
        (folder / str(number)).mkdir()
        own = ["--out", str(folder / str(number) / "run"), "--every-step", "--metrics-port", "0", *options]
        about = {
            "script": str(_HERE / "scripts" / script),
            "args": arguments,
            "options": own,
            "ranks": 2,
            "timeout": 240,
            "meets": 0,
        }
        jobs.append({**about, "cwd": str(folder / str(number)), "inject": {"0": _CURIOUS, "1": _CURIOUS}})
    found = Produced()
    for recording in recorded_runs.read(recorded_runs.FOLDER):
        found.take(recording.rows, recording.observations)
    for number, result in enumerate(run_jobs(jobs)):
        assert {rank["status"] for rank in result} == _JOBS[number][3], [rank["err"][-2000:] for rank in result]
        run = folder / str(number) / "run"
        found.take(read_rows(run), ({"kind": o.kind, "payload": o.payload} for o in read_observations(run)))
    return found


# --- what the code reads ----------------------------------------------------------------------------------------------


@cache
def consumers() -> tuple[tuple[str, ast.Module], ...]:
    """Return the modules that read what a run leaves, without the examples of the rules."""
    trees = []
    for path in sorted(_PACKAGE.rglob("*.py")):
        name = path.relative_to(_PACKAGE).as_posix()
        if not name.startswith(_PRODUCERS) and name not in _NEITHER:
            trees.append((name, _WithoutExamples().visit(ast.parse(path.read_text(encoding="utf-8")))))
    return tuple(trees)


class _WithoutExamples(ast.NodeTransformer):
    """Takes away what a rule's examples are made of, and docstrings."""

    def visit_Assign(self, node: ast.Assign) -> ast.AST | None:
        names = {target.id for target in node.targets if isinstance(target, ast.Name)}
        return None if names & {"fires_on", "silent_on"} else node

    def visit_Expr(self, node: ast.Expr) -> ast.AST | None:
        return None if isinstance(node.value, ast.Constant) else self.generic_visit(node)


def texts(tree: ast.AST) -> set[str]:
    """Return the texts in code, apart from the keys of what it makes itself."""
    made = {id(key) for node in ast.walk(tree) if isinstance(node, ast.Dict) for key in node.keys}
    return {
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in made
    }


def attributes(tree: ast.AST) -> set[str]:
    """Return the names of the attributes that code reads."""
    return {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)}


def asked(tree: ast.AST) -> Iterator[str]:
    """Yield the keys that code asks tables for: `x["key"]`, `x.get("key")`, `tables(step, kind, "key")`."""
    for node in ast.walk(tree):
        keys: list[ast.expr] = []
        if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load):
            keys = [node.slice]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "get":
            keys = node.args[:1]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "tables":
            keys = node.args[1:]
        yield from (key.value for key in keys if isinstance(key, ast.Constant) and isinstance(key.value, str))


def made(tree: ast.AST) -> Iterator[str]:
    """Yield the keys of the tables that code makes itself: evidence of a finding."""
    for node in ast.walk(tree):
        keys: list[ast.expr | None] = []
        if isinstance(node, ast.Dict):
            keys = list(node.keys)
        elif isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store):
            keys = [node.slice]
        yield from (key.value for key in keys if isinstance(key, ast.Constant) and isinstance(key.value, str))


@cache
def promised() -> dict[str, set[str]]:
    """Return the keys that the classes of the schema promise, by kind and topic, as dotted paths."""
    kinds: dict[str, tuple[type[Struct], ...]] = {**TOPICS, **{name: (kind,) for name, kind in DETAILS.items()}}
    return {name: {path for kind in some for path in promised_paths(kind)} for name, some in kinds.items()}


# --- the row ----------------------------------------------------------------------------------------------------------


@pytest.mark.smoke
def test_every_field_of_the_row_is_filled_in(produced: Produced) -> None:
    """On a CPU all but the device's."""
    assert set(Row._fields) - produced.fields == _ON_CUDA_FIELDS | _UNFILLED


def test_every_field_of_the_row_is_read() -> None:
    """A field that nothing reads is sent for nothing; what a property of the row is made of is read by its readers."""
    read = {word for _, tree in consumers() for word in attributes(tree) | texts(tree)}
    for name, kind in vars(Row).items():
        if isinstance(kind, property) and kind.fget is not None and name in read:
            read |= attributes(ast.parse(textwrap.dedent(inspect.getsource(kind.fget))))
    slots = {f"{name}_{slot}" for name in ("local_sum", "local_norm", "reduced_sum") for slot in range(8)}
    assert {"local_sums", "local_norms", "reduced_sums"} <= read
    assert {name for name in set(Row._fields) - slots - read if not name.startswith("class_")} == set()


@pytest.mark.smoke
def test_every_flag_is_set_and_read(produced: Produced) -> None:
    """By some step of the jobs, and by somebody who wants to know."""
    assert {flag.name for flag in Flag if not produced.flags & flag} == _FLAGS_ELSEWHERE.keys()
    read = {word for _, tree in consumers() for word in attributes(tree)}
    assert [flag.name for flag in Flag if flag.name not in read] == []


# --- details and announcements ----------------------------------------------------------------------------------------


@pytest.mark.smoke
def test_all_that_is_said_is_read_as_it_was_said(produced: Produced) -> None:
    """No kind, topic, key or type is unknown to the schema, and writing again gives all of it, in the same order."""
    assert produced.unread == {}
    assert produced.paths.keys() - promised().keys() == set()


@pytest.mark.smoke
def test_all_that_is_promised_is_said(produced: Produced) -> None:
    """And the schema promises nothing else."""
    assert promised().keys() - produced.paths.keys() == _ELSEWHERE.keys()
    lacking = {
        kind: found - produced.paths[kind] - {key for topic, key in _UNUSUAL if topic == kind}
        for kind, found in promised().items()
        if kind in produced.paths
    }
    assert {kind: sorted(keys) for kind, keys in lacking.items() if keys} == {}


@pytest.mark.smoke
def test_what_is_damaged_is_left_out(produced: Produced) -> None:
    """Nothing that comes from a job is trusted: a value of a wrong type is none or its field's default."""
    for some in produced.read.values():
        for read in {type(one): one for one in some if one is not None}.values():
            for value in damaged(to_json(read)):
                again = from_json(type(read), value)
                told = strict(to_json(again))
                assert again is None or strict(to_json(from_json(type(read), told))) == told


@pytest.mark.smoke
def test_every_topic_and_kind_that_rules_ask_for_is_said(produced: Produced) -> None:
    """By the names under which rules register."""
    topics = {topic for rule in catalog() for topic in rule.topics}
    assert topics - {topic.partition(":")[0] for topic in produced.paths} == _ELSEWHERE.keys()
    wanted = {kind for rule in catalog() for kind in rule.wants}
    assert wanted == set(KINDS)


@pytest.mark.smoke
def test_the_examples_of_rules_are_like_what_is_said(produced: Produced) -> None:
    """A rule whose examples hold what no run produces passes its tests and never fires."""
    strange: dict[str, set[str]] = {}
    for rule in catalog():
        for example in (*rule.fires_on, *rule.silent_on):
            for item in example:
                told = [(topic_of(item.topic), item.values)] if isinstance(item, Facts) else item.details.items()
                for kind, by_rank in told:
                    if kind in _ELSEWHERE:
                        continue
                    held = {path for value in by_rank.values() for path in paths(value)}
                    usual = produced.paths.get(kind, set()) | {path for topic, path in _UNUSUAL if topic == kind}
                    if unknown := held - usual:
                        strange.setdefault(f"{rule.code} {kind}", set()).update(unknown)
    assert {what: sorted(unknown) for what, unknown in strange.items()} == {}


@pytest.mark.smoke
def test_rules_read_keys_that_exist(produced: Produced) -> None:
    """What a rule asks a table for is said by a run, or was made by a rule, or is a setting."""
    rules = [(name, tree) for name, tree in consumers() if re.match("detectors/.+/", name) or name in _RULES]
    known = produced.keys | set(Row._fields)
    known |= {entry.name for entry in fields(Config)} | {word for _, tree in rules for word in made(tree)}
    known |= {*KINDS, *CLASS_COLUMNS, *(topic for topic in produced.paths)}
    known |= runbook(catalog()[0]).keys()
    for kind in _ELSEWHERE:
        known |= words(promised()[kind])
    lacking = {name: sorted(set(asked(tree)) - known) for name, tree in rules}
    assert {name: keys for name, keys in lacking.items() if keys} == {}


@pytest.mark.smoke
def test_all_that_is_said_is_read(produced: Produced) -> None:
    """Or is kept for people, for a reason."""
    read = {word for _, tree in consumers() for word in texts(tree) | attributes(tree)}
    said = {word: kind for kind, found in produced.paths.items() for word in words(found)}
    assert sorted(word for word in said if word not in read) == sorted(_FOR_PEOPLE)
