"""Nothing of ours reaches a job: what torch and Python call is registered in one place, and what fails stays there.

The walk over all entries with a fault in each, in real jobs, is in tests/harm/test_isolated_entries.py.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import inspect
import pickle
import signal
import sys
import threading
import traceback
import warnings
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ddpdebug import torch_internals as internals
from ddpdebug.isolation.guard import Guard, contained
from ddpdebug.isolation.user_code import is_users
from ddpdebug.probes import entries as entries_module, threads as threads_module
from ddpdebug.probes.entries import Entries, entries_of
from ddpdebug.probes.threads import Threads

_PACKAGE = Path(__file__).parent.parent.parent / "ddpdebug"
_LIVE = (
    "probes",
    "forensics",
    "torch_internals",
    "sinks",
    "monitor",
    "exchange",
    "instrument",
    "isolation",
    "preflight",
)
_REGISTERS = {
    "register",
    "unregister",
    "register_at_fork",
    "setprofile",
    "settrace",
    "excepthook",
    "signal",
    "finalize",
}
#: Where something is registered elsewhere all the same, and why that cannot reach a job.
_ALLOWED = {
    ("probes/graph_lifetime.py", "weakref.ref"): "the callback is a method of a set: no code of ours runs",
    ("isolation/weak_table.py", "weakref.ref"): "as above, of a dictionary",
    ("forensics/token_trial.py", "register_forward_hook"): "in a disposable copy of the process",
    ("forensics/mixing_trial.py", "register_forward_hook"): "as above",
    ("forensics/mixing_trial.py", "register_forward_pre_hook"): "as above",
    ("forensics/replay/replay.py", "register_forward_hook"): "as above",
    ("forensics/replay/replay.py", "register_forward_pre_hook"): "as above",
    ("forensics/replay/replay.py", "register_hook"): "as above, on a graph of ours",
    (
        "preflight/sandbox/trials.py",
        "register_forward_hook",
    ): "on copies; what fails there fails a check",
    ("preflight/sandbox/trials.py", "register_forward_pre_hook"): "as above",
    ("preflight/sandbox/time_limit.py", "signal.signal"): "in a preflight, where no timer runs, and put back",
}


def _registrations(tree: ast.Module) -> Iterator[str]:
    """Yield what a module asks torch or Python to call, as it is written."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        called = ast.unparse(node.func)
        owner, _, name = called.rpartition(".")
        hooks = name.startswith("register_") and ("hook" in name or name == "register_prehook")
        process = owner in {"atexit", "os", "sys", "signal", "threading", "weakref"} and name in _REGISTERS
        callback = called in {"weakref.ref", "weakref.WeakMethod"} and len(node.args) > 1
        patched = called == "setattr" and ast.unparse(node.args[0]) not in {"record", "options"}
        if hooks:
            yield name
        elif called.startswith("gc.callbacks.") or (name == "insert" and "callbacks" in owner):
            yield "gc.callbacks"
        elif process or callback or patched:
            yield called


def _outside(files: dict[str, ast.Module]) -> set[tuple[str, str]]:
    return {(name, found) for name, tree in files.items() for found in _registrations(tree)} - {*_ALLOWED}


def _live() -> dict[str, ast.Module]:
    places = [_PACKAGE / place for place in _LIVE]
    files = [file for place in places for file in ([place] if place.suffix else place.rglob("*.py"))]
    return {file.relative_to(_PACKAGE).as_posix(): _tree(file) for file in files}


@functools.cache
def _tree(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


def test_one_place_registers() -> None:
    """Whatever torch or Python calls of a live job's ddpdebug is put in place in `probes/entries.py`."""
    files = _live()
    everything = {(name, found) for name, tree in files.items() for found in _registrations(tree)}
    entries = {found for name, found in everything if name == "probes/entries.py"}
    assert entries >= {"atexit.register", "weakref.ref", "setattr"}
    assert everything - {*_ALLOWED} == {("probes/entries.py", found) for found in entries} - {*_ALLOWED}
    assert set(_ALLOWED) <= everything  # no exception outlives what it was for


def _tracers(tree: ast.Module) -> list[str]:
    """Return where a module takes the slot of the interpreter's profilers and tracers, by whatever name."""
    slots = {"setprofile", "settrace", "setprofile_all_threads", "settrace_all_threads", "monitoring"}
    names = [node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "") for node in ast.walk(tree)]
    imported = [alias.name for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for alias in node.names]
    return [name for name in (*names, *imported) if name in slots]


@pytest.mark.smoke
def test_nothing_traces_the_job() -> None:
    """The interpreter's slots for profilers and tracers belong to the user."""
    files = _PACKAGE.rglob("*.py")
    found = {file.name: slots for file in files if (slots := _tracers(_tree(file)))}
    # around calls of ours behind the script's last line: the user's are taken out and put back
    assert found == {"outermost.py": ["settrace", "setprofile", "setprofile", "settrace"]}
    for line in ("sys.setprofile(f)", "threading.settrace(f)", "from sys import setprofile", "x = sys.monitoring"):
        assert _tracers(ast.parse(line)), line


@pytest.mark.parametrize(
    "line",
    [
        "module.register_forward_hook(f)",
        "node.register_prehook(f)",
        "parameter.register_post_accumulate_grad_hook(f)",
        "register_optimizer_step_pre_hook(f)",
        "atexit.register(f)",
        "os.register_at_fork(after_in_child=f)",
        "weakref.ref(x, f)",
        "weakref.finalize(x, f)",
        "gc.callbacks.append(f)",
        "setattr(DistributedDataParallel, 'forward', f)",
        "sys.setprofile(f)",
        "signal.signal(15, f)",
    ],
)
def test_registrations_are_seen(line: str) -> None:
    """The check itself works."""
    assert len(_outside({"probes/new.py": ast.parse(line)})) == 1


#: What `map` may call there: written in C, so that no signal handler runs inside.
_IN_C = {"id", "str", "int", "float", "repr", "type", "len", "callable", "ord", "times.append"}


@pytest.mark.parametrize("file", sorted((_PACKAGE / "probes").rglob("*.py")), ids=lambda file: file.stem)
def test_no_iterator_in_c_calls_our_code(file: Path) -> None:
    """A StopIteration that a signal handler of the user's raises inside would be taken for the end of the iteration."""
    found = [
        f"line {node.lineno}: {ast.unparse(node)}"
        for node in ast.walk(_tree(file))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in {"map", "filter"}
        if (first := ast.unparse(node.args[0])) not in _IN_C and not first.startswith(("math.", "xxhash."))
    ]
    assert found == []


#: What a process has once: who takes it, and why that is nobody's.
_TAKEN_ONCE = {
    "faulthandler.dump_traceback_later": {
        "processes/dump_timer.py": "in the ranks of `check`, and only where the script does not use it"
    },
    "signal.setitimer": {
        "preflight/sandbox/time_limit.py": "in a preflight, where no timer runs",
        "processes/pusher.py": "in the process that sends a run to a hub",
    },
    "signal.signal": {
        "companion/owner.py": "in the process beside a rank",
        "companion/process.py": "in the process beside a rank",
        "hub/serve.py": "in the process of the hub",
        "preflight/sandbox/time_limit.py": "as above, put back",
        "processes/pusher.py": "in the process that sends a run to a hub",
        "processes/supervisor.py": "in the process that waits for ranks",
        "pytest_plugin/zygote.py": "in the process that forks ranks",
    },
    "names.update_default_group": {"torch_internals/__init__.py": "in a process that is claimed for it"},
    "sys.settrace": {"processes/outermost.py": "the user's own, taken out around calls of ours and put back"},
}


def test_what_a_process_has_once_is_taken_by_few() -> None:
    """Timers, handlers and the default group are the job's; who takes one is listed with the reason."""
    found: dict[str, set[str]] = {name: set() for name in _TAKEN_ONCE}
    for file in _PACKAGE.rglob("*.py"):
        for node in ast.walk(_tree(file)):
            called = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
            for name in (called, called.rpartition(".")[2]):
                if name in found:
                    found[name].add(file.relative_to(_PACKAGE).as_posix())
    assert found == {name: set(places) for name, places in _TAKEN_ONCE.items()}


def test_variables_of_running_functions_are_read_in_one_place() -> None:
    """Where it is known that reading them leaves nothing behind."""
    found = {
        file.relative_to(_PACKAGE).as_posix()
        for file in _PACKAGE.rglob("*.py")
        for node in ast.walk(_tree(file))
        if isinstance(node, ast.Attribute) and node.attr == "f_locals"
    }
    assert found == {
        "isolation/local_variables.py",  # of Python 3.13, which makes a view for each who asks
        "forensics/memory/holders.py",  # of a module or a class body, whose variables are in a dictionary anyway
    }


# --- the guard --------------------------------------------------------------------------------------------------------


class Unspeakable(RuntimeError):  # noqa: N818 - as it is
    """An error whose own text cannot be had."""

    def __str__(self) -> str:
        raise ValueError("no text")


@pytest.fixture
def troubles() -> list[tuple[str, str]]:
    return []


@pytest.fixture
def guard(troubles: list[tuple[str, str]]) -> Guard:
    return Guard(lambda part, message: troubles.append((part, message)))


def _raising(error: BaseException) -> Callable[..., Any]:
    def probe(*_: Any, **__: Any) -> Any:
        raise error

    return probe


def test_a_failing_probe_is_off_and_named(guard: Guard, troubles: list[tuple[str, str]]) -> None:
    """What fails is off from then on, says so once, and its neighbours go on."""
    for _ in range(2):
        assert guard.run("probe:a", _raising(RuntimeError("x"))) is None
        assert guard.run("probe:b", lambda: 3) == 3
    assert troubles == [("probe:a", "RuntimeError: x")]
    assert guard.run("probe:c", _raising(Unspeakable())) is None
    assert guard.contain("sinks", _raising(Unspeakable())) is None
    assert [part for part, _ in troubles] == ["probe:a", "probe:c", "sinks"]
    assert not guard.active


def test_nobody_left_to_be_told() -> None:
    """A guard whose own words cannot be delivered keeps that to itself as well."""
    guard = Guard(_raising(Unspeakable()))
    assert guard.run("probe:a", _raising(RuntimeError("x"))) is None
    guard.tell("threads", "text")
    assert guard.off == {"probe:a"}


class Preempted(Exception):  # noqa: N818 - what users write
    pass


def _alarm() -> None:
    signal.raise_signal(signal.SIGALRM)


def _keeps_frame(number: int, frame: Any) -> None:
    raise Preempted


def _star(*args: Any) -> None:
    raise TimeoutError


def _forgets(number: int, frame: Any = None) -> None:
    del number
    frame = None
    raise RuntimeError(frame)


class _Callable:
    def __call__(self, number: int, frame: Any) -> None:
        self._deeper()

    def _deeper(self) -> None:
        raise OSError("from further down")

    def method(self, _: int, __: Any) -> None:
        raise SystemExit(3)


@pytest.mark.parametrize(
    "handler, kind",
    [
        (_keeps_frame, Preempted),
        (_star, TimeoutError),
        (_forgets, RuntimeError),
        (_Callable(), OSError),
        (_Callable().method, SystemExit),
        (signal.default_int_handler, KeyboardInterrupt),
    ],
)
def test_a_signal_handlers_exception_is_the_users(
    handler: Any, kind: type[BaseException], guard: Guard, troubles: list[Any]
) -> None:
    """It goes through, switches nothing off, and what was half noted is told to be forgotten."""
    cuts: list[int] = []
    guard.when_cut(lambda: cuts.append(1))
    before = signal.signal(signal.SIGALRM, handler)
    try:
        with pytest.raises(kind):
            guard.run("probe:a", guard.run, "probe:b", _alarm)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert (troubles, guard.off, guard.active) == ([], set(), False)
    assert cuts


def _once(number: int, frame: Any) -> None:
    signal.signal(number, signal.SIG_IGN)
    raise Preempted


def _once_starred(*args: Any) -> None:
    signal.signal(args[0], signal.SIG_IGN)
    raise Preempted


def _logged(handler: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(handler)
    def logs(*args: Any, **kwargs: Any) -> None:
        kwargs["seen"] = args
        del kwargs["seen"], args
        raise Preempted from None

    return logs


@pytest.mark.parametrize(
    "handler", [_once, _once_starred, _logged(_keeps_frame), functools.partial(_logged(_keeps_frame), 1)]
)
def test_a_handler_that_is_wrapped_or_no_longer_installed(handler: Any, guard: Guard, troubles: list[Any]) -> None:
    """It is known by its code while it is installed, and afterwards by what it was given."""
    before = signal.signal(signal.SIGALRM, handler)
    try:
        with pytest.raises(Preempted):
            guard.run("probe:a", _alarm)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert (troubles, guard.off) == ([], set())


def test_looking_for_a_handler_keeps_no_variable(guard: Guard) -> None:
    """The values of a frame that an error has left die with `traceback.clear_frames`."""
    kept: list[BaseException] = []

    def handler(number: int, frame: Any) -> None:
        batch = torch.ones(3)
        refs.append(weakref.ref(batch))
        raise Preempted

    refs: list[weakref.ref[torch.Tensor]] = []
    before = signal.signal(signal.SIGALRM, handler)
    try:
        guard.run("probe:a", _alarm)
    except Preempted as error:
        kept.append(error)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert refs[0]() is not None
    traceback.clear_frames(kept[0].__traceback__)
    assert refs[0]() is None


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_an_exception_between_the_halves_of_no_grad_leaves_autograd_as_it_was(
    guard: Guard, error: type[BaseException]
) -> None:
    """The context manager is written in Python: a handler may run after it has switched, before it can switch back."""

    def probe(recording: bool) -> None:
        torch.set_grad_enabled(recording)
        raise error

    for before in (True, False):
        with torch.set_grad_enabled(before):
            with contextlib.suppress(KeyboardInterrupt):
                guard.run("probe:a", probe, not before)
            assert torch.is_grad_enabled() is before
    assert torch.is_grad_enabled()


def test_what_a_generator_makes_of_a_handlers_stop_iteration_is_the_users(guard: Guard, troubles: list[Any]) -> None:
    """The interpreter turns it into a RuntimeError; the user's own error goes on."""

    def handler(number: int, frame: Any) -> None:
        raise StopIteration("from the handler")

    before = signal.signal(signal.SIGALRM, handler)
    try:
        with pytest.raises(StopIteration, match="from the handler"):
            guard.run("probe:a", lambda: sum(_alarm() or 1 for _ in range(2)))
    finally:
        signal.signal(signal.SIGALRM, before)
    assert troubles == []


def test_classes_of_tensors_do_not_see_probes(guard: Guard, troubles: list[Any]) -> None:
    """Their own code runs for the user only, a forward that is run again included."""
    seen: list[str] = []

    class Logged(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func.__name__)
            return super().__torch_function__(func, types, args, kwargs or {})

    tensor = torch.ones(2).as_subclass(Logged)
    assert guard.run("probe:a", lambda: float((tensor + 1).sum())) == 4.0
    assert seen == []

    def again() -> None:
        with internals.as_users():
            tensor.add(1)

    guard.run("probe:a", again)
    assert "add" in seen
    assert troubles == []


def test_functions_that_are_looked_at_stay_the_same(entries: Entries) -> None:
    """Identity, pickle, parameters, globals, and what inspect reads; also of what is decorated, and of methods."""
    functions = [nn.utils.clip_grad_norm_, torch.autograd.backward, nn.Module.load_state_dict, nn.Module.__call__]

    def said() -> list[Any]:
        codes = [function.__code__ for function in functions]
        names = [(code.co_name, code.co_filename, code.co_firstlineno, code.co_flags) for code in codes]
        parameters = [(inspect.getfullargspec(function), inspect.signature(function)) for function in functions]
        return [names, parameters, [(f.__globals__["__name__"], vars(f), inspect.getsource(f)) for f in functions]]

    before = said()
    owners = [(nn.utils, "clip_grad_norm_"), (torch.autograd, "backward"), (nn.Module, "load_state_dict")]
    seen: list[str] = []
    for owner, name in owners:
        entries.patch(owner, name, before=[("probe:a", lambda *_, name=name, **__: seen.append(name))])
    entries.on_modules()
    assert said() == before
    assert [getattr(owner, name) for owner, name in owners] == functions[:3]
    assert all(pickle.loads(pickle.dumps(function)) is function for function in functions[:2])
    model = nn.Linear(1, 1)
    torch.autograd.backward(model(torch.ones(1, 1)).sum())
    functions[0](model.parameters(), 1.0)
    model.load_state_dict(model.state_dict())
    assert seen == ["backward", "clip_grad_norm_", "load_state_dict"]
    entries.close()
    assert said() == before
    functions[0](model.parameters(), 1.0)
    assert len(seen) == 3


def test_what_cannot_have_a_look_in_its_code_is_wrapped(entries: Entries, monkeypatch: pytest.MonkeyPatch) -> None:
    """A built-in function, a generator, a function without source; of those that can, each look goes by itself."""
    space: dict[str, Any] = {"__name__": __name__}
    exec("def without_source(a):\n return a + 1", space)

    def generates(a: int) -> Iterator[int]:
        yield a

    for name, function in (("one", space["without_source"]), ("two", generates), ("three", len)):
        monkeypatch.setattr(Owner, name, staticmethod(function), raising=False)
    seen: list[Any] = []
    for name in ("one", "two", "three"):
        entries.patch(Owner, name, before=[("probe:a", lambda *args, **_: seen.append(args))])
    assert (Owner.one(1), list(Owner.two(2)), Owner.three("abc")) == (2, [2], 3)  # type: ignore[attr-defined]
    assert seen == [(1,), (2,), ("abc",)]


def test_several_looks_lie_in_one_function() -> None:
    """Whichever is taken away first, the others stay, and in the end the code is the function's own."""
    code = Owner.add.__code__
    seen: list[int] = []
    made = [Entries(Guard(lambda part, text: pytest.fail(f"{part}: {text}"))) for _ in range(3)]
    for number, entries in enumerate(made):
        entries.patch(Owner, "add", before=[("probe:a", lambda *_, number=number, **__: seen.append(number))])
    Owner().add(1)
    made[1].close()
    Owner().add(1)
    made[0].close()
    made[2].close()
    Owner().add(1)
    assert sorted(seen[:3]) == [0, 1, 2]
    assert sorted(seen[3:]) == [0, 2]
    assert Owner.add.__code__ is code


def test_a_models_own_methods_are_not_called() -> None:
    """The tables say the same."""

    class Own(nn.Sequential):
        def named_parameters(self, *_: Any, **__: Any) -> Any:
            raise AssertionError

        named_modules = modules = parameters = named_buffers = buffers = children = named_parameters

    linear = nn.Linear(2, 2)
    parts = [linear, nn.BatchNorm1d(2), nn.Sequential(linear, nn.Linear(2, 1))]
    own, usual = Own(*parts), nn.Sequential(*parts)
    for name in ("named_parameters", "named_buffers"):
        assert [n for n, _ in getattr(internals, name)(own)] == [n for n, _ in getattr(usual, name)()]
    assert [n for n, _ in internals.named_modules(own)] == [n for n, _ in usual.named_modules()]
    assert list(internals.children(own)) == parts
    all_names = [n for n, _ in usual.named_parameters(remove_duplicate=False)]
    assert [n for n, _ in internals.named_parameters(own, remove_duplicate=False)] == all_names


def test_an_exception_sent_by_another_thread_is_the_users(guard: Guard, troubles: list[Any]) -> None:
    """As notebooks and time limits send it: it has no frame of its own."""
    import ctypes

    for kind in (Preempted, TimeoutError):
        me = ctypes.c_ulong(threading.get_ident())

        def probe(kind: type[Exception] = kind, me: Any = me) -> None:
            entries_module._home(None)
            ctypes.pythonapi.PyThreadState_SetAsyncExc(me, ctypes.py_object(kind))
            entries_module._home(None)

        code = probe.__code__.replace(co_filename=entries_module.__file__)  # as if it were a probe of ours
        with pytest.raises(kind):
            guard.run("probe:a", type(probe)(code, globals(), "probe", probe.__defaults__, probe.__closure__))
    assert troubles == []


def test_what_the_users_code_raises_because_we_call_it_is_ours(guard: Guard, troubles: list[Any]) -> None:
    """A container of the user's that raises when a probe walks it has raised for us only."""

    class Odd:
        def __len__(self) -> int:
            raise Preempted("not for you")

    assert guard.run("probe:a", lambda: len(Odd())) is None
    assert troubles == [("probe:a", "Preempted: not for you")]


def test_threads_of_ours_end_with_a_word() -> None:
    """`SystemExit` ends a thread without one; an error without a text has none."""
    for error in (SystemExit(1), Unspeakable(), GeneratorExit()):
        with pytest.raises(RuntimeError, match=type(error).__name__):
            contained(_raising(error))()
    with pytest.raises(OSError, match="as it is"):
        contained(_raising(OSError("as it is")))()


class _Counts(torch.utils._python_dispatch.TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


class _Functions(torch.overrides.TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


def test_a_mode_of_ours_is_seen_by_the_parts_that_put_it_there_alone(guard: Guard, troubles: list[Any]) -> None:
    """A number that torch holds as a tensor comes out of any mode as a number, which no operation takes."""
    product: Any = (torch.ones(2, requires_grad=True) * 7).grad_fn
    with _Counts():
        guard.own_modes = 1
        read = [guard.run(part, product._saved_other.item) for part in ("probe:losses", "close:memory")]
    assert read == [7, None]
    assert [part for part, _ in troubles] == ["close:memory"]


def test_what_hangs_on_a_part_goes_off_with_it(guard: Guard, troubles: list[tuple[str, str]]) -> None:
    """Each says so once, others go on, and what was in place is taken away, even if that fails too."""
    gone: list[str] = []
    guard.needs("probe:b", "probe:a", "probe:x")
    guard.needs("probe:c", "probe:b")
    guard.when_off("probe:b", _raising(RuntimeError("y")))
    guard.when_off("probe:c", lambda: gone.append("c"))
    guard.run("probe:a", _raising(ValueError("z")))
    guard.run("probe:x", _raising(ValueError("z")))
    assert guard.run("probe:b", lambda: 1) is guard.run("probe:c", lambda: 1) is None
    assert guard.run("probe:d", lambda: 1) == 1
    assert gone == ["c"]
    assert sorted(troubles) == [
        ("close:probe:b", "RuntimeError: y"),
        ("probe:a", "ValueError: z"),
        ("probe:b", "it needs probe:a, which is off"),
        ("probe:c", "it needs probe:b, which is off"),
        ("probe:x", "ValueError: z"),
    ]


def test_a_look_at_all_modules_goes_with_its_part(entries: Entries, guard: Guard) -> None:
    """The first call after its part went off takes it away; the forward in which it failed goes on."""
    entries.on_modules()
    hook = entries.before_modules("probe:a", _raising(RuntimeError("x")))
    hook.on()
    model = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
    assert model(torch.ones(1)).shape == (1,)
    assert "probe:a" in guard.off
    assert not hook.is_on
    assert entries.calls.idle


def test_looks_at_modules_leave_nothing_on_them(entries: Entries) -> None:
    """Tables of hooks are empty, no frame is added, and a copy of the function's code looks at nothing."""
    entries.on_modules()
    seen: list[Any] = []

    class Deep(nn.Module):
        def forward(self, x: Any, y: Any = None) -> Any:
            if y is not None:
                raise OverflowError
            return len(inspect.stack(0)), dict(vars(self)), len(torch.nn.modules.module._global_forward_hooks)

    model = Deep()
    plain = model(1)
    before = entries.before_modules("probe:a", lambda module, args: seen.append(("before", args)))
    after = entries.after_modules("probe:a", lambda module, args, output: seen.append(("after", output)))
    always = entries.after_modules("probe:a", lambda *args: seen.append(("always", args[2])), always_call=True)
    one = entries.before_module("probe:a", model, lambda module, args: seen.append("one"))
    for hook in (before, after, always):
        hook.on()
    assert model(1) == plain
    assert seen == [("before", (1,)), "one", ("after", plain), ("always", plain)]
    seen.clear()
    one.remove()
    with pytest.raises(OverflowError):
        model(1, y=2)
    assert seen == [("before", (1,)), ("always", None)]
    for hook in (before, after, always):
        hook.off()
    seen.clear()
    model(1)
    assert not seen
    copied = pickle.loads(pickle.dumps(entries.calls))
    assert copied.idle
    assert id(model) not in copied.of


def test_profilers_see_no_probe(guard: Guard) -> None:
    """Operations of a probe are in no list of operations; those around it are, and those after a failure."""
    with torch.profiler.profile() as profiler:
        torch.ones(2).sum()
        guard.run("probe:a", lambda: torch.ones(2).cumsum(0))
        guard.run("probe:a", lambda: guard.run("probe:b", lambda: torch.ones(2).cumsum(0)))
        guard.run("probe:a", _raising(RuntimeError("x")))
        torch.ones(2).prod()
    keys = {event.key for event in profiler.key_averages()}
    assert {"aten::sum", "aten::prod"} <= keys
    assert "aten::cumsum" not in keys


def test_modes_do_not_see_probes(guard: Guard, troubles: list[Any]) -> None:
    """Dispatch and function modes, fake tensors, a default device: none of them gets an operation of ours."""
    x = torch.arange(4.0)
    for mode in (_Counts(), _Functions()):
        with mode:
            assert guard.run("probe:a", lambda: float(x.sum())) == 6.0
            assert mode.seen == []
            (x + 1).sum()
        assert mode.seen
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True):  # a probe would ask fake tensors for numbers
        assert guard.run("probe:a", lambda: float(x.sum())) is None
        assert guard.run("close:a", lambda: float(x.sum())) == 6.0
    with torch.device("meta"):
        assert guard.run("probe:a", lambda: float(torch.ones(3).sum())) == 3.0
    assert torch.func.vmap(lambda row: row + (guard.run("probe:a", lambda: 1) or 0))(x).tolist() == x.tolist()
    assert troubles == []


def test_without_a_way_aside_nothing_is_looked_at(guard: Guard, monkeypatch: pytest.MonkeyPatch) -> None:
    """A torch that has no such way: the probe does not run while a mode is on, and runs without one."""
    monkeypatch.setattr("ddpdebug.torch_internals.modes._without_dispatch", None)
    with _Counts() as mode:
        assert guard.run("probe:a", lambda: float(torch.ones(2).sum())) is None
    assert mode.seen == []
    assert guard.run("probe:a", lambda: 2) == 2


# --- entries ----------------------------------------------------------------------------------------------------------


class Owner:
    def add(self, a: int, b: int = 1) -> int:
        """Add."""
        if a < 0:
            warnings.warn("negative", FutureWarning, stacklevel=2)
        if a > 100:
            raise OverflowError(a)
        return a + b


@pytest.fixture
def entries(guard: Guard) -> Iterator[Entries]:
    made = entries_of(guard)
    yield made
    made.close()


def test_a_look_goes_away(entries: Entries) -> None:
    """Same arguments, same result, once; looks before and after; nothing is left after `close`."""
    seen: list[Any] = []
    original = vars(Owner)["add"]
    entries.patch(
        Owner,
        "add",
        before=[("probe:a", lambda owner, *args, **kwargs: seen.append((args, kwargs)))],
        after=[("probe:b", lambda result, owner, *args, **kwargs: seen.append(result))],
        failed=[("probe:c", lambda error, owner, *args, **kwargs: seen.append(type(error)))],
    )
    assert Owner().add(1, b=5) == 6
    with pytest.raises(OverflowError):
        Owner().add(101)
    assert seen == [((1,), {"b": 5}), 6, ((101,), {"b": 1}), OverflowError]
    assert (Owner.add.__doc__, Owner.add.__name__) == ("Add.", "add")
    entries.close()
    assert vars(Owner)["add"] is original


def test_a_wrapper_below_somebody_elses_looks_no_more_after_close(entries: Entries) -> None:
    """Who wrapped ours keeps it alive; it then calls the original and does nothing else."""
    seen: list[int] = []
    original = Owner.add
    entries.patch(Owner, "add", before=[("probe:a", lambda *_, **__: seen.append(1))])
    ours = Owner.add
    Owner.add = lambda self, a: ours(self, a, 1)  # type: ignore[method-assign,assignment,misc]
    try:
        Owner().add(1)
        entries.close()
        assert Owner().add(1) == 2
    finally:
        Owner.add = original  # type: ignore[method-assign]
    assert seen == [1]


def test_what_torch_lacks_is_said_and_left_out(entries: Entries, troubles: list[tuple[str, str]]) -> None:
    """One missing name switches one look off."""
    entries.patch(Owner, "_no_such_name", before=[("probe:a", print)])
    assert [part for part, _ in troubles] == ["torch"]
    assert "Owner._no_such_name" in troubles[0][1]


def test_a_warning_belongs_to_the_line_that_calls(entries: Entries) -> None:
    """File, line and module of a warning are those without the wrapper, and so are the filters and `once` registers."""

    def where() -> list[tuple[str, int]]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            Owner().add(-1)
        return [(w.filename, w.lineno) for w in caught]

    plain = where()
    entries.patch(Owner, "add", before=[("probe:a", lambda *_, **__: None)])
    assert where() == plain
    assert plain[0][0] == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.filterwarnings("error", category=FutureWarning, module=__name__.replace(".", r"\."))
        with pytest.raises(FutureWarning):
            Owner().add(-1)


def test_tracebacks_are_those_of_the_original(entries: Entries) -> None:
    """Where the original raises, a traceback has the same frames, lines and marks as without the look."""

    def text() -> str:
        with pytest.raises(OverflowError) as caught:
            Owner().add(101)
        return "".join(traceback.format_exception(caught.value))

    texts = [text()]
    entries.patch(Owner, "add", before=[("probe:a", lambda *_, **__: None)])
    texts.append(text())
    assert texts[0] == texts[1]


def test_looks_at_all_modules_end_whatever_happened(entries: Entries) -> None:
    """Off is off, also where an exception came before that was noted."""
    entries.on_modules()
    seen: list[Any] = []
    hook = entries.after_modules("probe:a", lambda module, args, output: seen.append(type(module)))
    hook.on()
    nn.Linear(1, 1)(torch.ones(1))
    hook.is_on = False  # as an exception would leave it
    entries.calls.tidy()
    assert entries.calls.idle
    nn.Linear(1, 1)(torch.ones(1))
    assert seen == [nn.Linear]


# --- threads ----------------------------------------------------------------------------------------------------------


def test_a_probe_in_one_thread_is_none_in_another(guard: Guard) -> None:
    """What another thread of the job calls meanwhile is the job's, and its own modes are set aside as ever."""

    class Counts(torch.overrides.TorchFunctionMode):
        seen = 0

        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.seen += 1
            return function(*args, **(kwargs or {}))

    def other() -> tuple[bool, int, bool]:
        idle = not guard.active
        with Counts() as mode:
            guard.run("probe:other", torch.zeros, 2)
            return idle, mode.seen, not guard.active

    assert guard.run("probe:one", lambda: (guard.active, _in_thread(other))) == (True, (True, 0, True))
    assert not guard.active


def _in_thread(call: Callable[[], Any], name: str | None = None) -> Any:
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(call()), name=name)
    thread.start()
    thread.join()
    return found[0]


def test_the_first_thread_that_trains_is_followed() -> None:
    """Another one is left alone and that is said once; after its end the next one may be followed."""
    told: list[str] = []
    threads = Threads(lambda part, text: told.append(text))
    assert threads.is_here()
    assert threads.begins()
    assert not _in_thread(threads.begins, "second")
    assert not _in_thread(threads.is_here)
    assert not _in_thread(threads.begins)
    assert threads.several
    assert len(told) == 1
    assert "'MainThread' is followed" in told[0]
    assert "'second'" in told[0]
    alone = Threads(lambda part, text: told.append(text))
    assert _in_thread(alone.begins)
    assert alone.begins()  # the other one has ended
    assert len(told) == 1


def test_ranks_follow_the_same_one_of_several_threads() -> None:
    """Whichever thread is the first on this rank, the one of the first model is followed."""
    threads = Threads(lambda part, text: None)
    threads.compared = True
    ready, done = threading.Event(), threading.Event()
    found: dict[int, bool] = {}

    def second() -> None:
        found[1] = threads.begins(1)
        ready.set()
        done.wait(60)

    def first() -> None:
        ready.wait(60)
        found[0] = threads.begins(0)
        done.set()

    both = [threading.Thread(target=call) for call in (second, first)]
    for thread in both:
        thread.start()
    for thread in both:
        thread.join()
    assert found == {1: False, 0: True}


def test_who_looks_alone_is_let_finish(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread begins to train when the look is over; from then on nobody is alone, and another never was."""
    monkeypatch.setattr(threads_module, "_PATIENCE", 600.0)
    threads = Threads(lambda part, text: None)
    assert threads.begins()
    order: list[str] = []
    ready = threading.Event()

    def second() -> None:
        with threads.alone() as alone:
            order.append(f"second {alone}")
        ready.set()
        threads.begins()
        order.append("second begins")

    thread = threading.Thread(target=second)
    with threads.alone() as alone:
        order.append(f"first {alone}")
        assert threads.begins()  # a signal handler of this thread may train
    thread.start()
    ready.wait(600)
    thread.join()
    with threads.alone() as alone:
        order.append(f"first {alone}")
    assert order == ["first True", "second False", "second begins", "first False"]


def test_a_thread_does_not_begin_to_train_while_another_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    """It waits for the end of the look, but not for ever: the job goes on whatever holds the look up."""
    monkeypatch.setattr(threads_module, "_PATIENCE", 600.0)
    threads = Threads(lambda part, text: None)
    assert threads.begins()
    order: list[str] = []
    about_to = threading.Event()

    def second() -> None:
        about_to.set()
        threads.begins()
        order.append("second begins")

    thread = threading.Thread(target=second)
    with threads.alone() as alone:
        assert alone
        thread.start()
        about_to.wait(600)
        thread.join(0.2)  # without the lock it would be through
        assert not threads.several
        order.append("the look ends")
    thread.join()
    assert order == ["the look ends", "second begins"]
    monkeypatch.setattr(threads_module, "_PATIENCE", 0.01)
    other = Threads(lambda part, text: None)
    assert other.begins()
    with other.alone():
        assert not _in_thread(other.begins)
        assert other.several


def test_names_of_the_wrappers_file() -> None:
    """What Python leaves out when it counts frames is told by this name."""
    from ddpdebug.probes import importlib_bootstrap

    assert "importlib" in importlib_bootstrap.__file__
    assert "_bootstrap" in importlib_bootstrap.__file__
    assert not is_users(RuntimeError())
    assert sys.version_info >= (3, 11)


def test_whatever_registers_is_described() -> None:
    """Each method that registers something for a time or for one object says what and when, for docs/patches.md."""
    tree = ast.parse((_PACKAGE / "probes" / "entries.py").read_text(encoding="utf-8"))
    (kind,) = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "Entries"]
    methods = {node.name: node for node in kind.body if isinstance(node, ast.FunctionDef)}
    lasting = {"_patch", "_patch_home", "on_step", "on_modules"}  # these are listed as they are put in place
    found = {name for name, node in methods.items() if {*_registrations(ast.Module([node], []))}} - lasting
    found |= {name for name, node in methods.items() if "ModuleHook(" in ast.unparse(node)} - {"__init__", "tidy"}
    assert found - {"close"} <= {*entries_module.PASSING}
    elsewhere = {"OperationMode"}  # by probes that say so here
    assert {*entries_module.PASSING} - elsewhere <= {*methods}


def test_what_a_failed_part_has_registered_is_taken_away(entries: Entries) -> None:
    """Also at the end, when the part has long been off."""
    entries.on_parts("probe:a", _raising(RuntimeError("x")))
    nn.Linear(1, 1)
    assert entries.guard.off == {"probe:a"}
    entries.close()
    assert not torch.nn.modules.module._global_parameter_registration_hooks


class OfClass(nn.Identity):
    """Has a method of the class."""

    @classmethod
    def made(cls, number: int) -> tuple[type, int]:
        return cls, number


class Below(OfClass):
    """Inherits it."""


def test_a_method_of_a_class_is_wrapped_for_all_that_inherit(entries: Entries) -> None:
    """The look is given the class that it is called on; afterwards it is the method that it was."""
    seen: list[Any] = []
    before = vars(OfClass)["made"]
    entries.patch(OfClass, "made", before=[("probe:a", lambda *args: seen.append(args))])
    assert (OfClass.made(1), Below.made(2)) == ((OfClass, 1), (Below, 2))
    assert seen == [(OfClass, 1), (Below, 2)]
    entries.close()
    assert vars(OfClass)["made"] is before


def test_what_is_placed_and_what_is_hidden(entries: Entries, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrapper knows whose function it lies over, and what has been put over it."""

    def strangers(self: Owner, a: int, b: int = 1) -> int:
        return a - b

    strangers.__module__ = "their.library"
    monkeypatch.setattr(nn.Identity, "extra_repr", strangers)
    entries.patch(Owner, "add", "sums", before=[("probe:a", lambda *_, **__: None)])
    entries.patch(nn.Identity, "extra_repr", "texts", before=[("probe:a", lambda *_, **__: None)])
    entries.patch(Owner, "no_such_name", "nothing")
    own, over = entries.placed
    assert (own.why, own.over, own.hidden()) == ("sums", None, None)
    assert over.over is not None
    assert "their.library" in over.over
    assert entries.left_out == [f"{__name__}.Owner.no_such_name"]
    ours = Owner.add
    monkeypatch.setattr(Owner, "add", strangers)
    assert "their.library" in str(own.hidden())
    monkeypatch.setattr(Owner, "add", ours)
    assert own.hidden() is None
    other = Entries(entries.guard)
    other.patch(Owner, "add", "sums", before=[("probe:a", lambda *_, **__: None)])
    entries.close()
    assert "as it was" in str(own.hidden())  # another's look that lies there is not ours
    (theirs,) = other.placed
    assert theirs.hidden() is None
    other.close()
    assert "as it was" in str(theirs.hidden())
