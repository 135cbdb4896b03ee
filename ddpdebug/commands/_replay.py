"""Execution of `ddpdebug replay` after its line was checked: makes the model, replays the bundle, prints the result.

Loads torch. Everything that is printed of the bundle or the model is escaped.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from rich.console import Console
from rich.text import Text

from ddpdebug import torch_internals as internals
from ddpdebug.commands._progress import progress
from ddpdebug.commands._replay_request import Request
from ddpdebug.commands._target import plain_console
from ddpdebug.errors import UsageError, did_you_mean
from ddpdebug.forensics.replay.bundle_reading import Bundle, read_bundle
from ddpdebug.forensics.replay.replay import Trace, replay
from ddpdebug.forensics.replay.tracer import Origin
from ddpdebug.isolation.process_state import Autocast
from ddpdebug.nested import mapped
from ddpdebug.probes.forward_capture import ForwardCapture
from ddpdebug.schema.finding import strict
from ddpdebug.sinks.text import SEPARATOR, tensor_text
from ddpdebug.sinks.words import clean

_SECONDS = 3600.0
_MAX_NAMES = 3
_WIDTH = 120
_LABEL = 10
_MAX_MASKED = 4
_KINDS = {
    "input": "the input was bad already",
    "parameter": "the parameter was bad before the forward",
    "buffer": "the buffer was bad before the forward",
    "output-gradient": "the gradient that entered the model was bad already: the loss made it",
    "tensor": "it came in from outside of the model",
    "uninitialised": "memory that nobody has written was read",
    "unknown": "where it came from could not be followed",
}


def run(request: Request) -> int:
    """Replay the bundle, print the result and return the exit code."""
    bundle = read_bundle(request.bundle)
    device = _device(request, bundle)
    dtype = None if request.dtype is None else getattr(torch, request.dtype)
    model = _build_model(request, bundle)
    model.to(device=device, dtype=dtype)
    capture = _capture(bundle, model, device, dtype)
    notes = _notes(bundle, device)

    with progress(f"replaying {request.bundle}"):
        trace = replay(capture, seconds=_SECONDS, autocast=request.amp and dtype is None)
    _show(request, bundle, trace, notes)
    if request.json is not None:
        _write(request, bundle, trace, notes)
    if trace.reproduced:
        return 1
    return 0 if trace.complete else 3


def _device(request: Request, bundle: Bundle) -> torch.device:
    if request.device is None:
        usable = bundle.autocast.device == "cuda" and torch.cuda.is_available()
        return torch.device("cuda" if usable else "cpu")
    try:
        device = torch.device(request.device)
        torch.zeros((), device=device)
    except (RuntimeError, AssertionError, ValueError) as error:
        raise UsageError(f"--device {request.device!r} cannot be used: {str(error).splitlines()[0]}") from None
    return device


def _capture(bundle: Bundle, model: torch.nn.Module, device: torch.device, dtype: torch.dtype | None) -> ForwardCapture:
    def move(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        kind = dtype if dtype is not None and value.is_floating_point() else value.dtype
        return value.detach().to(device, kind).requires_grad_(value.requires_grad)

    capture = bundle.capture(model)
    gradients = {} if _has_bad_forward(bundle) else capture.gradients
    cast = bundle.autocast
    rng = bundle.rng if device.type == "cuda" else replace(bundle.rng, cuda=None)
    return replace(
        capture,
        given=mapped((capture.args, capture.kwargs), move),
        gradients={position: move(gradient) for position, gradient in gradients.items()},
        rng=rng,
        autocast=Autocast(device=device.type, enabled=cast.enabled, dtype=cast.dtype),
    )


def _has_bad_forward(bundle: Bundle) -> bool:
    """Return whether the forward was bad in the run: the recorded gradients do not belong to another forward then."""
    found = bundle.facts.get("replay")
    culprit = found.get("culprit") if isinstance(found, dict) else None
    return isinstance(culprit, dict) and culprit.get("phase") == "forward"


def _notes(bundle: Bundle, device: torch.device) -> list[str]:
    notes = [f"left out of the bundle: {text}" for text in bundle.left_out]
    if bundle.parameters is None:
        notes.append("the bundle has no parameters: the model's own were used, so the result may differ")
    if device.type != bundle.autocast.device:
        notes.append(
            f"recorded on {bundle.autocast.device}, run on {device.type}: other kernels, and other random numbers there"
        )
    changed = bundle.facts.get("changed_since_forward")
    if isinstance(changed, list) and changed:
        notes.append(f"written between the forward and the bundle: {', '.join(map(str, changed[:3]))}")
    return notes


def _write(request: Request, bundle: Bundle, trace: Trace, notes: list[str]) -> None:
    assert request.json is not None
    result = {
        "bundle": str(bundle.path),
        **{name: bundle.facts.get(name) for name in ("code", "step", "rank")},
        **trace.to_json(),
        "bundle_notes": notes,
    }
    try:
        request.json.write_text(json.dumps(strict(result), allow_nan=False, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise UsageError(f"--json {str(request.json)!r} cannot be written: {error.strerror}") from None


# --- the model, from the user's code ----------------------------------------------------------------------------------


def _build_model(request: Request, bundle: Bundle) -> torch.nn.Module:
    """Return the model, with the bundle's parameters and buffers as far as it has them."""
    made = _made(request, bundle)
    model = internals.unwrap_compiled(made) if isinstance(made, torch.nn.Module) else made
    if isinstance(model, torch.nn.parallel.DistributedDataParallel):
        model = internals.unwrap_compiled(model.module)
    if not isinstance(model, torch.nn.Module):
        raise UsageError(f"the model is a {type(model).__name__}, not a torch.nn.Module")
    _load(model, bundle)
    return model


def _made(request: Request, bundle: Bundle) -> Any:
    if request.module is not None:
        return _users(lambda: torch.load(request.module, weights_only=False, map_location="cpu"), "loading --module")
    if request.model is not None:
        where, _, name = request.model.rpartition(":")
        source = Path(where)
        module = _import_file(source, name) if source.suffix == ".py" else _import_name(where)
        found = _attribute(module, name)
        return found if isinstance(found, torch.nn.Module) else _users(found, f"--model {request.model!r}")
    named = bundle.facts.get("model")
    wanted: Mapping[str, Any] = named if isinstance(named, dict) else {}
    module_name, name = str(wanted.get("module")), str(wanted.get("class"))
    if module_name.startswith("torch.") and not request.import_class:
        raise UsageError(
            f"the model is a plain torch {name} that the training script puts together; give --model file.py:function "
            "with a function that returns it"
        )
    if request.script is not None:
        module = _import_file(request.script, name)
    elif request.import_class:
        module = _import_class_module(module_name)
    else:
        place = f" of {wanted.get('file')!r}" if wanted.get("file") else ""
        raise UsageError(
            f"the bundle cannot bring the model's code: it is the class {name!r}{place}. Give --model file.py:function "
            "with a function that returns it, or --script file.py if the class can be made without arguments"
        )
    found = _attribute(module, name)
    return _users(found, f"{name}() without arguments", "; give --model file.py:function with one that makes the model")


def _import_class_module(name: str) -> ModuleType:
    if name == "__main__" or not all(part.isidentifier() for part in name.split(".")):
        raise UsageError(f"the class comes from {name!r}, which cannot be imported by name; give --script file.py")
    return _import_name(name)


def _import_name(name: str) -> ModuleType:
    _add_path(Path.cwd())
    imported: ModuleType = _users(lambda: importlib.import_module(name), f"importing {name!r}")
    return imported


def _import_file(file: Path, wanted: str) -> ModuleType:
    """Import a file; one that fails after it has made what is wanted (a script that begins to train) will do."""
    if not file.is_file():
        raise UsageError(f"{str(file)!r} is no file; give the Python file that holds {wanted!r}")
    _add_path(file.resolve().parent)
    name = f"ddpdebug_replay_{file.stem}"  # not __main__: what stands under that condition must not run
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise UsageError(f"{str(file)!r} is no Python file; its name must end in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        if not hasattr(module, wanted.partition(".")[0]):
            raise UsageError(
                f"importing {str(file)!r} failed: {type(error).__name__}: {error}; put what runs the training under "
                "`if __name__ == '__main__':`, below the model's class"
            ) from error
    return module


def _add_path(folder: Path) -> None:
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))


def _attribute(module: ModuleType, path: str) -> Any:
    found: Any = module
    for name in path.split("."):
        if not hasattr(found, name):
            names = [known for known in vars(module) if not known.startswith("_")]
            raise UsageError(f"{module.__name__} has no {path!r}; {did_you_mean(path, names[:30])}")
        found = getattr(found, name)
    return found


def _users(function: Any, what: str, hint: str = "") -> Any:
    """Run the user's code; what it raises is shown as a message."""
    try:
        return function()
    except Exception as error:
        raise UsageError(f"{what} failed: {type(error).__name__}: {error}{hint}") from error


def _load(model: torch.nn.Module, bundle: Bundle) -> None:
    """Put the bundle's parameters and buffers into the model; their names and shapes must be the model's."""
    if bundle.parameters is not None:
        own = {name: list(p.shape) for name, p in model.named_parameters()}
        given = {name: list(p.shape) for name, p in bundle.parameters.items()}
        _compare(own, given, set(bundle.tied))
        made = {
            name: torch.nn.Parameter(value, requires_grad=name not in bundle.frozen and value.is_floating_point())
            for name, value in bundle.parameters.items()
        }
        made |= {name: made[first] for name, first in bundle.tied.items() if first in made}
        for name, parameter in made.items():
            _put(model, name, internals.PARAMETERS, parameter)
    known = dict(model.named_buffers())
    for name, value in (bundle.buffers or {}).items():
        if name in known and known[name].shape == value.shape:
            _put(model, name, internals.BUFFERS, value)


def _put(model: torch.nn.Module, path: str, table: str, value: torch.Tensor) -> None:
    owner, _, name = path.rpartition(".")
    try:
        tables = internals.module_tables(model.get_submodule(owner))
    except AttributeError:
        return  # a tied name that this model does not have
    if name in tables[table]:
        tables[table][name] = value


def _compare(own: Mapping[str, list[int]], given: Mapping[str, list[int]], tied: set[str]) -> None:
    missing = [name for name in own if name not in given and name not in tied]
    extra = [name for name in given if name not in own]
    other = [name for name in own if name in given and own[name] != given[name]]
    problems = [
        f"{len(names)} {text} ({', '.join(names[:_MAX_NAMES])}{', ...' if len(names) > _MAX_NAMES else ''})"
        for names, text in (
            (extra, "parameters of the bundle are not in the model"),
            (missing, "parameters of the model are not in the bundle"),
            (other, "parameters have other shapes"),
        )
        if names
    ]
    if problems:
        raise UsageError(f"this is not the bundle's model: {'; '.join(problems)}")


# --- the result, for people -------------------------------------------------------------------------------------------


def _show(request: Request, bundle: Bundle, trace: Trace, notes: Sequence[str]) -> None:
    """Print the result."""
    console: Console = plain_console(_WIDTH)
    facts = bundle.facts
    head = [clean(facts.get("code", "")), f"step {clean(facts.get('step'))}", f"rank {clean(facts.get('rank'))}"]
    console.print(Text(SEPARATOR.join(filter(None, head)), "bold"), soft_wrap=True)
    _line(console, "bundle", clean(bundle.path))
    _line(console, "run", _conditions(request, bundle, trace))
    console.print()
    console.print(
        Text(_verdict(request, bundle, trace), "bold red" if trace.reproduced else "bold green"), soft_wrap=True
    )
    if trace.culprit is not None:
        _culprit(console, trace, trace.culprit)
    for origin in trace.masked[:_MAX_MASKED]:
        text = f"{clean(origin.name, 100)} makes {origin.value}, {clean(origin.ended_at, 100)} hides it"
        _line(console, "masked", SEPARATOR.join([text, *(clean(line, 300) for line in origin.stack[:1])]))
    if trace.culprit is None or trace.culprit.kind == "output-gradient":
        _loss(console, facts.get("loss"))
    if trace.calls:
        _calls(console, trace)
    for note in (*notes, *trace.notes):
        _line(console, "note", clean(note))
    if not trace.complete:
        _line(console, "note", f"the replay is not complete: {clean(trace.reason)}")


def _conditions(request: Request, bundle: Bundle, trace: Trace) -> str:
    cast = bundle.autocast
    amp = request.amp and request.dtype is None and cast.enabled
    autocast = f"autocast {str(cast.dtype).removeprefix('torch.')}" if amp else "no autocast"
    parts = [f"{trace.operations} operations", "forward and backward" if trace.backward else "forward only"]
    return SEPARATOR.join([*parts, request.dtype or "dtypes as recorded", autocast, f"{trace.seconds:.1f} s"])


def _verdict(request: Request, bundle: Bundle, trace: Trace) -> str:
    if trace.culprit is not None:
        origin = trace.culprit
        if origin.kind in _KINDS:
            return f"{origin.value}: {clean(origin.name, 100)}: {_KINDS[origin.kind]}"
        made = "nan of the infinities that were written as a mask" if origin.made_of else f"{origin.value}"
        return f"{clean(origin.name, 100)} makes {made}, in {origin.phase}"
    if not trace.complete:
        return "nothing non-finite was seen, but the replay did not get to its end"
    if request.dtype is not None:
        return f"it survives in {request.dtype}: nothing non-finite came out"
    if not request.amp and bundle.autocast.enabled:
        return "it survives without autocast: nothing non-finite came out"
    return f"nothing non-finite came out{': what arose was masked' if trace.masked else ''}"


def _culprit(console: Console, trace: Trace, origin: Origin) -> None:
    if origin.module is not None:
        name = clean(origin.module, 160) or "the model itself"
        _line(console, "module", f"{name} ({clean(origin.module_class, 80)}, call {origin.call})")
    if origin.node is not None:
        of = f", the backward of {clean(origin.forward_op, 100)}" if origin.forward_op and origin.is_builtin else ""
        _line(console, "node", f"{clean(origin.node, 100)}{of}")
    if trace.location is not None:
        _line(console, "line", clean(trace.location, 300))
    for i, entry in enumerate(origin.stack):
        _line(console, "stack" if i == 0 else "", clean(entry, 300))
    for operand in origin.operands:
        _line(console, "operand", _contents(operand))
    if origin.result is not None:
        _line(console, "result", _contents(origin.result))
    if origin.made_of is not None:
        place = SEPARATOR.join(origin.made_of.stack[:1])
        _line(console, "made of", clean(f"{origin.made_of.name}{SEPARATOR}{place}", 300))
    if origin.became_nan is not None:
        _line(console, "then", f"{clean(origin.became_nan, 300)} makes nan of it")


def _loss(console: Console, found: object) -> None:
    """Print what was found of the loss during the run: it is not part of the bundle."""
    known: Mapping[str, Any] = found if isinstance(found, dict) else {}
    words = [known.get("operation"), known.get("location") or known.get("expression")]
    if any(words):
        found_then = SEPARATOR.join(str(word) for word in words if word)
        _line(console, "loss", f"{clean(found_then, 300)} (found in the run; the loss is not part of a bundle)")


def _contents(value: Mapping[str, Any]) -> str:
    """Return a tensor's description on one line: `float32 [3, 4] · 0 to 2.5 · 7 zeros`."""
    if "value" in value:
        return f"the number {clean(value['value'], 60)}"
    return tensor_text(value, SEPARATOR)


def _calls(console: Console, trace: Trace) -> None:
    console.print()
    console.print(Text("module calls before it" if trace.reproduced else "last module calls", "bold"), soft_wrap=True)
    rows = [("module", "class", "call", "output")]
    for call in trace.calls:
        output = _contents(call["output"]) if call["output"] else ""
        name = clean(call["module"], 80) or "(model)"
        rows.append((name, clean(call["class"], 40), str(call["call"]), output))
    widths = [max(len(row[i]) for row in rows) for i in range(3)]
    for number_of_row, row in enumerate(rows):
        cells = [f"{cell:{width}}" for cell, width in zip(row[:3], widths, strict=True)]
        console.print(Text("  ".join(["", *cells, row[3]]).rstrip(), "" if number_of_row else "dim"), soft_wrap=True)


def _line(console: Console, label: str, text: str) -> None:
    console.print(Text.assemble((f"  {label:{_LABEL}}", "dim"), text), soft_wrap=True)
