"""Events: who hears of what, in which order, and what stays where a probe fails."""

from __future__ import annotations

import ast
import functools
import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ddpdebug.config.settings import Config
from ddpdebug.isolation.guard import Guard
from ddpdebug.monitor.monitor import Monitor
from ddpdebug.probes import training_events
from ddpdebug.probes.training_events import BackwardEnded, Bus, Event, StepBegan, StepEnded, Tensors, part_of

_PACKAGE = Path(training_events.__file__).parent.parent
KINDS = [kind for kind in vars(training_events).values() if isinstance(kind, type) and issubclass(kind, Event)]
KINDS.remove(Event)
STEP = StepBegan(torch.optim.SGD([nn.Parameter(torch.ones(1))]), closure=False)


@pytest.fixture
def troubles() -> list[str]:
    return []


@pytest.fixture
def guard(troubles: list[str]) -> Guard:
    return Guard(lambda part, message: troubles.append(f"{part}: {message}"))


def test_subscribers_hear_in_the_stated_order(guard: Guard) -> None:
    """Whoever subscribes first; parts that are not named come last, as they have subscribed."""
    bus, heard = Bus(guard), list[str]()
    for part in ("probe:x", "probe:recipe", "probe:backward", "probe:a"):
        bus.on(part, BackwardEnded, lambda _, part=part: heard.append(part))  # type: ignore[misc]  # its own
    bus.emit(BackwardEnded())
    assert heard == ["probe:backward", "probe:recipe", "probe:x", "probe:a"]


def test_a_subscriber_that_fails_is_off_alone(guard: Guard, troubles: list[str]) -> None:
    """It says so once, and the others hear of this event and of later ones."""
    bus, heard = Bus(guard), list[Event]()
    bus.on("probe:recipe", StepBegan, lambda _: 1 / 0)
    bus.on("probe:optimizer", StepBegan, heard.append)
    bus.on("probe:optimizer", StepEnded, heard.append)
    for event in (STEP, STEP, StepEnded(STEP.optimizer)):
        bus.emit(event)
    assert heard == [STEP, STEP, StepEnded(STEP.optimizer)]
    assert troubles == ["probe:recipe: ZeroDivisionError: division by zero"]


def test_who_would_know_half_of_the_loop_is_off(guard: Guard, troubles: list[str]) -> None:
    """Where an event cannot be made, its subscribers are off, also for other events; those of other events are not."""
    bus, heard = Bus(guard), list[Event]()
    bus.on("probe:recipe", StepBegan, heard.append)
    bus.on("probe:recipe", StepEnded, heard.append)
    bus.on("probe:x", StepEnded, heard.append)
    guard.run(part_of(StepBegan), lambda: 1 / 0)
    bus.emit(StepEnded(STEP.optimizer))
    assert heard == [StepEnded(STEP.optimizer)]
    assert sorted(troubles)[1:] == ["probe:recipe: it needs event:StepBegan, which is off"]


def test_arguments_are_walked_once() -> None:
    """By whoever asks first; not at all where nobody does."""

    class Counted(dict[str, Any]):
        pass

    walks: list[int] = []

    class Noted(tuple[Any, ...]):
        __slots__ = ()

        def __iter__(self) -> Any:
            walks.append(1)  # a walk does not run code of the user's
            return super().__iter__()

    x = torch.ones(2)
    tensors = Tensors((Noted((x, [x])), Counted(a=x)))
    first = tensors()
    assert [t is x for t in first] == [True] * 3
    assert tensors() is first
    assert walks == []


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_events_are_drawn_and_emitted_and_heard(kind: type[Event]) -> None:
    """Each is frozen, stands in the drawing of the loop, is emitted in one place, and its order names subscribers."""
    assert kind.__name__ in (training_events.__doc__ or "")
    assert kind.__slots__ == tuple(f for f in inspect.get_annotations(kind) if f != "order")
    emitted = [name for name, calls in _emitted().items() if kind.__name__ in calls]
    assert len(emitted) == 1, emitted
    heard = {part for part, _ in _monitor().probes.bus._looks.get(kind, ())}
    assert heard
    assert {*kind.order} <= heard


@functools.cache
def _monitor() -> Monitor:
    return Monitor(Config(tolerance=1e-5))


@functools.cache
def _modules() -> dict[str, ast.Module]:
    rooms = ("probes", "instrument", "monitor", "forensics", "exchange")
    files = [file for room in rooms for file in sorted((_PACKAGE / room).rglob("*.py"))]
    return {file.relative_to(_PACKAGE).as_posix(): ast.parse(file.read_text(encoding="utf-8")) for file in files}


@functools.cache
def _emitted() -> dict[str, list[str]]:
    return {name: _calls(tree) for name, tree in _modules().items()}


def _calls(tree: ast.Module) -> list[str]:
    """Return what is made for `emit`, or by `Patches._event`, by the last part of its name."""
    calls = [n for n in ast.walk(tree) if isinstance(n, ast.Call) and n.args]
    made = [call.args[0] for call in calls if ast.unparse(call.func).endswith(".emit")]
    kinds = [m.func for m in made if isinstance(m, ast.Call)]
    kinds += [call.args[0] for call in calls if ast.unparse(call.func) == "self._event"]
    return [ast.unparse(kind).rpartition(".")[2] for kind in kinds]


def _slots(trees: list[ast.Module]) -> set[str]:
    """Return the names of attributes that classes keep callables in, as their constructors declare them."""
    found = set()
    for tree in trees:
        for function in ast.walk(tree):
            if isinstance(function, ast.FunctionDef) and function.name == "__init__":
                given = {a.arg for a in (*function.args.args, *function.args.kwonlyargs) if _is_call(a.annotation)}
                for node in ast.walk(function):
                    if isinstance(node, ast.AnnAssign) and _is_call(node.annotation):
                        found.add(ast.unparse(node.target).removeprefix("self."))
                    elif isinstance(node, ast.Assign):
                        pairs = zip(_parts(node.targets[0]), _parts(node.value), strict=False)
                        found |= {t.attr for t, v in pairs if isinstance(t, ast.Attribute) and ast.unparse(v) in given}
    return found


def _is_call(annotation: ast.expr | None) -> bool:
    return annotation is not None and ast.unparse(annotation).startswith("Callable")


def _parts(node: ast.expr) -> list[ast.expr]:
    return node.elts if isinstance(node, ast.Tuple) else [node]


def _overwritten(tree: ast.Module, slots: set[str]) -> list[str]:
    """Return where such an attribute of another object is assigned."""
    targets = [
        t
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign)
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
        for t in _parts(target)
        if isinstance(t, ast.Attribute)
    ]
    return [ast.unparse(t) for t in targets if ast.unparse(t.value) not in {"self", "cls"} and t.attr in slots]


def test_callbacks_are_given_to_constructors() -> None:
    """What an object calls stands in its constructor, or subscribes by a method: nobody puts it there afterwards."""
    trees = _modules()
    slots = _slots(list(trees.values()))
    assert slots >= {"_announce", "_hand_over", "_due", "_on_end", "_stop"}
    assert {name: found for name, tree in trees.items() if (found := _overwritten(tree, slots))} == {}


@pytest.mark.parametrize(
    "line", ["probe.on_bad = look", "self.probe.on_bad, x = look, 1", "self.a.b.on_bad: object = f"]
)
def test_overwritten_callbacks_are_seen(line: str) -> None:
    """The check itself works, for what is given and for what has a default."""
    kinds = ("def __init__(self, call: Callable[[], int]) -> None: self.on_bad = call",
             "def __init__(self) -> None: self.on_bad: Callable[[], None] = print")  # fmt: skip
    for kind in kinds:
        assert _overwritten(ast.parse(line), _slots([ast.parse(f"class A:\n    {kind}")]))
    assert not _overwritten(ast.parse("self.on_bad = look"), {"on_bad"})
