"""Gets the model for a replay from the user's code, and gives it the bundle's parameters."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from ddpdebug import torch_internals as internals
from ddpdebug.commands._replay_request import Request
from ddpdebug.errors import UsageError, did_you_mean
from ddpdebug.forensics.replay.bundle_reading import Bundle

_SHOWN = 3


def build_model(request: Request, bundle: Bundle) -> torch.nn.Module:
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
        return _call(lambda: torch.load(request.module, weights_only=False, map_location="cpu"), "loading --module")
    if request.model is not None:
        where, _, name = request.model.rpartition(":")
        source = Path(where)
        module = _import_file(source, name) if source.suffix == ".py" else _import_name(where)
        found = _attribute(module, name)
        return found if isinstance(found, torch.nn.Module) else _call(found, f"--model {request.model!r}")
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
    return _call(found, f"{name}() without arguments", "; give --model file.py:function with one that makes the model")


def _import_class_module(name: str) -> ModuleType:
    if name == "__main__" or not all(part.isidentifier() for part in name.split(".")):
        raise UsageError(f"the class comes from {name!r}, which cannot be imported by name; give --script file.py")
    return _import_name(name)


def _import_name(name: str) -> ModuleType:
    _add_path(Path.cwd())
    imported: ModuleType = _call(lambda: importlib.import_module(name), f"importing {name!r}")
    return imported


def _import_file(file: Path, wanted: str) -> ModuleType:
    """Import a file; one that fails after it has made what is wanted (a script that begins to train) will do."""
    if not file.is_file():
        raise UsageError(f"{str(file)!r} is no file")
    _add_path(file.resolve().parent)
    name = f"ddpdebug_replay_{file.stem}"  # not __main__: what stands under that condition must not run
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise UsageError(f"{str(file)!r} is no Python file")
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


def _call(function: Any, what: str, hint: str = "") -> Any:
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
        f"{len(names)} {text} ({', '.join(names[:_SHOWN])}{', ...' if len(names) > _SHOWN else ''})"
        for names, text in (
            (extra, "parameters of the bundle are not in the model"),
            (missing, "parameters of the model are not in the bundle"),
            (other, "parameters have other shapes"),
        )
        if names
    ]
    if problems:
        raise UsageError(f"this is not the bundle's model: {'; '.join(problems)}")
