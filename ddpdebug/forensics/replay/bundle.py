"""Writes replay bundles: all that another process needs to run a bad step's forward and backward again.

A directory with `bundle.json` and `tensors.safetensors`, written under another name and renamed when it is complete.
Nothing in it is code. `docs/replay.md` describes the format.
"""

from __future__ import annotations

import ast
import contextlib
import inspect
import itertools
import json
import math
import os
import platform
import secrets
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ddpdebug import torch_internals as internals
from ddpdebug._version import __version__
from ddpdebug.clock import utc_now
from ddpdebug.disk import Disk, NoRoomError
from ddpdebug.forensics.replay.tensor_file import can_write, write_tensors
from ddpdebug.nested import is_container, items, tensors_in
from ddpdebug.probes.forward_capture import ForwardCapture
from ddpdebug.probes.holding import Lost
from ddpdebug.redaction import Redactor
from ddpdebug.schema.finding import strict
from ddpdebug.source_lines import getlines

FORMAT = 1
JSON_FILE = "bundle.json"
TENSOR_FILE = "tensors.safetensors"
LIMIT = 2 << 30
_MAX_MODULES = 2000
_MAX_TEXT = 200
_MAX_DEPTH = 16
_JSON_ROOM = 4 << 20


class BundleError(Exception):
    """A bundle could not be written; the text says why."""


def write_bundle(parent: Path, name: str, capture: ForwardCapture, facts: Mapping[str, Any], **options: Any) -> Path:
    """Write the bundle of a forward into a new directory below `parent`, and return it; see `UnnamedBundle`.

    Raises:
        BundleError: with the reason; nothing is left behind.
    """
    return UnnamedBundle(parent, capture, **options).publish(name, facts)


class UnnamedBundle:
    """A bundle whose tensors are written, under a temporary name: the facts about the fault come later.

    Args:
        parent: the directory of the bundles.
        limit: bytes; what does not fit is left out, and the bundle says so.
        previous: the forward of the step before, whose inputs were good.
        redactor: hides what is secret in all but the forward's arguments, which must stay what they are.
        disk: says whether there is room, before the bundle and before each piece of it.

    Raises:
        BundleError: with the reason; nothing is left behind.
    """

    def __init__(
        self,
        parent: Path,
        capture: ForwardCapture,
        *,
        limit: int = LIMIT,
        previous: ForwardCapture | None = None,
        redactor: Redactor | None = None,
        disk: Disk | None = None,
    ) -> None:
        module = capture.module()
        if module is None:
            raise BundleError("the model is gone")
        self._parent, self._disk = parent, disk or Disk()
        self._clean = (redactor or Redactor()).value
        self._temporary = parent / f".{secrets.token_hex(4)}.{os.getpid()}.partial"
        content = _Content(limit)
        described = content.describe(internals.unwrap_compiled(module), capture, previous)
        self._document = {**self._clean(_origin(internals.unwrap_compiled(module))), **described}
        with self._complete_or_gone():
            text = json.dumps(strict(self._document), allow_nan=False, indent=1).encode()
            reason = self._disk.refusal(parent, content.size + len(text) + _JSON_ROOM, "bundles")
            if reason is not None:
                raise BundleError(reason)
            self._disk.make_directory(parent, below=parent.parent)
            self._disk.make_directory(self._temporary)
            size = write_tensors(self._temporary / TENSOR_FILE, content.tensors, self._disk)
            self._document["tensor_bytes"] = size

    def publish(self, name: str, facts: Mapping[str, Any]) -> Path:
        """Complete the bundle and give it its name; return its path.

        Args:
            facts: what else to write down: code, step, rank, finding, replay, scaler, command. JSON values.

        Raises:
            BundleError: with the reason; nothing is left behind.
        """
        with self._complete_or_gone():
            document = {**self._document, **self._clean(strict(facts))}
            self._disk.write(
                self._temporary / JSON_FILE, json.dumps(strict(document), allow_nan=False, indent=1).encode()
            )
            return _publish(self._temporary, self._parent, name)

    @contextlib.contextmanager
    def _complete_or_gone(self) -> Iterator[None]:
        try:
            try:
                yield
            except NoRoomError as error:
                raise BundleError(error.reason) from None
            except (OSError, ValueError, RuntimeError) as error:
                raise BundleError(f"{type(error).__name__}: {error}") from None
        except BaseException:
            with contextlib.suppress(OSError):
                shutil.rmtree(self._temporary)
            raise


def _publish(temporary: Path, parent: Path, name: str) -> Path:
    for number in itertools.count(1):
        target = parent / (name if number == 1 else f"{name}-{number}")
        if not target.exists():
            temporary.rename(target)
            return target
    raise AssertionError


#: What the script gives, which may be anything; parameters are read by the job itself.
_GIVEN = frozenset({"inputs", "previous_inputs"})


class _Content:
    """Decides what fits, the most useful first, and describes it."""

    def __init__(self, limit: int) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self.left_out: list[dict[str, Any]] = []
        self.size = 0
        self._limit = limit

    def describe(
        self, module: torch.nn.Module, capture: ForwardCapture, previous: ForwardCapture | None
    ) -> dict[str, Any]:
        """Return the JSON value; the tensors are in `tensors` then."""
        rng = capture.rng
        states = {"cpu": rng.cpu, "cuda": rng.cuda}
        random = {name: self._reference(f"rng.{name}", state) for name, state in states.items() if state is not None}
        numpy = None if type(rng.numpy) is not tuple else [rng.numpy[0], rng.numpy[1].tolist(), *rng.numpy[2:]]
        arguments = [capture.args, capture.kwargs]
        inputs = self._tree("inputs", arguments) if self._fits("inputs", tensors_in(arguments)) else None
        buffers = {name: capture.buffers.get(name, buffer) for name, buffer in internals.named_buffers(module)}
        parameters, tied = _parameters(module)
        document: dict[str, Any] = {
            "inputs": inputs,
            "rng": {**random, "device": rng.device, "python": rng.python, "numpy": numpy},
            "autocast": {
                "device": capture.autocast.device,
                "enabled": capture.autocast.enabled,
                "dtype": str(capture.autocast.dtype).removeprefix("torch."),
            },
            "modes": dict(zip(capture.names, map(bool, capture.modes), strict=False)),
            "buffers": self._table("buffers", buffers),
            "output_gradients": self._table("output_gradients", {str(k): v for k, v in capture.gradients.items()}),
            "partial_gradients": capture.partial,
            "parameters": self._table("parameters", parameters),
            "tied": tied,
            "frozen": [name for name, p in parameters.items() if not p.requires_grad],
        }
        if previous is not None:
            before = [previous.args, previous.kwargs]
            fits = self._fits("previous_inputs", tensors_in(before))
            document["previous_inputs"] = self._tree("previous_inputs", before) if fits else None
        if capture.gradients_lost:
            self.left_out.append({"what": "output_gradients", "bytes": capture.gradients_lost, "why": "not kept"})
        document["changed_since_forward"] = capture.changed()
        document["called_at"] = capture.location
        document["left_out"] = self.left_out
        return document

    def _fits(self, what: str, tensors: Sequence[torch.Tensor]) -> bool:
        unwritable = [t for t in tensors if not can_write(t)]
        size = sum(t.nbytes for t in tensors)
        if unwritable:
            kinds = sorted({str(t.layout if t.device.type != "meta" else "meta") for t in unwritable})
            self.left_out.append({"what": what, "bytes": size, "why": f"tensors of kind {', '.join(kinds)}"})
            return False
        mapped = what in _GIVEN and not all(t.nbytes == 0 or internals.is_readable_memory(t) for t in tensors)
        if mapped:  # it may be larger than any disk, or end before its tensor
            self.left_out.append({"what": what, "bytes": size, "why": "a tensor lies in a file that is mapped"})
            return False
        if self.size + size > self._limit:
            self.left_out.append({"what": what, "bytes": size, "why": f"the limit is {self._limit} bytes"})
            return False
        return True

    def _table(self, what: str, tensors: Mapping[str, torch.Tensor]) -> dict[str, Any] | None:
        if not self._fits(what, list(tensors.values())):
            return None
        return {name: self._reference(f"{what}.{name}", tensor) for name, tensor in tensors.items()}

    def _reference(self, key: str, tensor: torch.Tensor) -> dict[str, Any]:
        self.tensors[key] = tensor
        self.size += tensor.nbytes
        dtype = str(tensor.dtype).removeprefix("torch.")
        return {"tensor": key, "dtype": dtype, "shape": list(tensor.shape), "requires_grad": tensor.requires_grad}

    def _tree(self, key: str, value: Any, depth: int = 0) -> dict[str, Any]:
        if isinstance(value, torch.Tensor):
            return self._reference(f"{key}.{len(self.tensors)}", value)
        if is_container(value) and depth < _MAX_DEPTH:
            parts = [(k, self._tree(key, item, depth + 1)) for k, item in items(value)]
            if not isinstance(value, dict):
                return {"list" if isinstance(value, list) else "tuple": [part for _, part in parts]}
            if all(isinstance(k, str | int) and not isinstance(k, bool) for k, _ in parts):
                return {"dict": [[k, part] for k, part in parts]}
        elif (described := _plain(value)) is not None:
            return described
        if isinstance(value, Lost):
            self.left_out.append({"what": key, "bytes": 0, "why": f"not kept: {value.what}"})
            return {"left_out": value.what}
        what = f"{type(value).__module__}.{type(value).__qualname__}"
        self.left_out.append({"what": key, "bytes": 0, "why": f"a {what} is neither a tensor nor a plain value"})
        return {"left_out": what}


def _plain(value: Any) -> dict[str, Any] | None:
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": str(value)}
    if value is None or isinstance(value, bool | int | float | str):
        return {"value": value}
    return {"dtype": str(value).removeprefix("torch.")} if isinstance(value, torch.dtype) else None


def _parameters(module: torch.nn.Module) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Return the parameters by name, and for the further names of a shared one its first."""
    names: dict[int, str] = {}
    tied = {}
    found: dict[str, torch.Tensor] = {}
    for name, parameter in internals.named_parameters(module, remove_duplicate=False):
        if id(parameter) in names:
            tied[name] = names[id(parameter)]
        else:
            names[id(parameter)] = name
            found[name] = parameter
    return found, tied


def _origin(module: torch.nn.Module) -> dict[str, Any]:
    """Return what says where the bundle comes from and what the model is."""
    kind = type(module)
    file = line = None
    with contextlib.suppress(OSError, TypeError, SyntaxError, ValueError):
        file = inspect.getsourcefile(kind)
        line = None if file is None else _line_of(kind, file)
    named = list(itertools.islice(internals.named_modules(module), _MAX_MODULES))
    return {
        "format": FORMAT,
        "ddpdebug": __version__,
        "versions": {"torch": torch.__version__, "python": platform.python_version()},
        "time": utc_now().strftime("%Y-%m-%dT%H:%M:%SZ"),
        "script": sys.argv[0] if sys.argv else None,
        "model": {"module": kind.__module__, "class": kind.__qualname__, "file": file, "line": line},
        "modules": [{"path": path, "class": type(m).__qualname__, "text": _text(m)} for path, m in named],
    }


def _line_of(kind: type, file: str) -> int | None:
    """Return the line of a class in its file; `inspect` would leave the file in the script's cache of lines."""
    classes = [node for node in ast.walk(ast.parse("".join(getlines(file)))) if isinstance(node, ast.ClassDef)]
    return next(iter([node.lineno for node in classes if node.name == kind.__name__]), None)


def _text(module: torch.nn.Module) -> str:
    try:
        return str(module.extra_repr())[:_MAX_TEXT]
    except Exception:  # noqa: BLE001 - the user's method
        return ""
