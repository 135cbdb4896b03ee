"""Reads replay bundles, which may be truncated, of another version, or malicious.

Only JSON and safetensors are read, every type and size is checked, and nothing in a bundle is executed or imported.
Raises UsageError with what is wrong.
"""

from __future__ import annotations

import functools
import json
import stat
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import safetensors
import torch

from ddpdebug.errors import UsageError
from ddpdebug.forensics.replay.bundle import FORMAT, JSON_FILE, TENSOR_FILE
from ddpdebug.isolation.process_state import Autocast, RandomState
from ddpdebug.probes.forward_capture import ForwardCapture
from ddpdebug.sinks.words import clean

_MAX_JSON = 64 << 20
_MAX_HEADER = 64 << 20
_MAX_TENSORS = 200_000
_MAX_NODES = 1_000_000
_MAX_DEPTH = 64
_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype) and not str(dtype).startswith("torch.q")
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Bundle:
    """The content of a bundle; None stands for parts that were left out."""

    path: Path
    facts: Mapping[str, Any]  # the whole JSON document; only what has a type of its own below has been checked
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    gradients: dict[int, torch.Tensor]
    parameters: dict[str, torch.Tensor] | None
    buffers: dict[str, torch.Tensor] | None
    tied: dict[str, str]
    frozen: frozenset[str]
    rng: RandomState
    autocast: Autocast
    modes: dict[str, bool]
    partial: bool
    left_out: list[str]

    def capture(self, module: torch.nn.Module) -> ForwardCapture:
        """Return the forward, to be run on a module with the bundle's parameters and buffers."""
        modes = bytes(self.modes.values())
        return ForwardCapture(
            module=lambda: module,
            step=_number(self.facts.get("step"), -1),
            given=(self.args, self.kwargs),
            rng=self.rng,
            autocast=self.autocast,
            names=tuple(self.modes),
            read_modes=lambda: modes,
            gradients=dict(self.gradients),
            partial=self.partial,
            ended=True,
        )


def read_bundle(path: Path) -> Bundle:
    """Read a bundle's directory."""
    if not path.is_dir():
        raise UsageError(f"{str(path)!r} is no bundle: a bundle is a directory with {JSON_FILE} and {TENSOR_FILE}")
    document = _document(path / JSON_FILE)
    tensors = _Tensors(path / TENSOR_FILE)
    try:
        return _bundle(path, document, tensors)
    except _MalformedError as error:
        raise UsageError(f"{str(path)!r} is damaged: {clean(error)}") from None
    except (KeyError, TypeError, ValueError, IndexError, OverflowError, RuntimeError) as error:
        raise UsageError(f"{str(path)!r} is damaged: {type(error).__name__}: {clean(error)}") from None


class _MalformedError(Exception):
    """The error for a part of a bundle that is not as the format says."""


def _document(file: Path) -> dict[str, Any]:
    size = _regular(file)
    if size > _MAX_JSON:
        raise UsageError(f"{str(file)!r} has {size} bytes; at most {_MAX_JSON} are read")
    try:
        document = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"{str(file)!r} is cut off or no JSON: {error}") from None
    if not isinstance(document, dict) or _number(document.get("format"), 0) < 1:
        raise UsageError(f"{str(file)!r} does not describe a bundle: it has no format number")
    if document["format"] > FORMAT:
        raise UsageError(
            f"{str(file)!r} has format {document['format']}, this ddpdebug reads {FORMAT}; "
            f"install the version that wrote it: {str(document.get('ddpdebug', 'unknown'))[:40]!r}"
        )
    return document


def _regular(file: Path) -> int:
    """Return the size of a file that is one: no link, which could lead anywhere, no pipe, which could wait."""
    try:
        found = file.lstat()
    except (OSError, ValueError) as error:
        raise UsageError(f"{str(file)!r} cannot be read: {error}; the bundle is not complete") from None
    if not stat.S_ISREG(found.st_mode):
        raise UsageError(f"{str(file)!r} is no regular file; links and other special files are not followed")
    return found.st_size


def _memory() -> int:
    """Return the bytes of memory that are free; where nobody says, no file is too large."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, ValueError, StopIteration):
        return 1 << 62


class _Tensors:
    """The tensors of a bundle, by key."""

    def __init__(self, file: Path) -> None:
        size = _regular(file)
        with file.open("rb") as opened:
            head = opened.read(8)
        length = struct.unpack("<Q", head)[0] if len(head) == 8 else -1
        if not 2 <= length <= min(_MAX_HEADER, size - 8):
            raise UsageError(f"{str(file)!r} is cut off or no safetensors file: its header has {length} bytes")
        if size > (room := _memory()):
            raise UsageError(f"{str(file)!r} has {size} bytes, and there are {room} bytes of memory to read them into")
        try:
            with safetensors.safe_open(file, framework="pt") as opened:
                keys = list(opened.keys())
                if len(keys) > _MAX_TENSORS:
                    raise UsageError(f"{str(file)!r} has {len(keys)} tensors; at most {_MAX_TENSORS} are read")
                self._tensors: dict[str, torch.Tensor] = {key: opened.get_tensor(key) for key in keys}
        except (safetensors.SafetensorError, OSError, ValueError, RuntimeError, MemoryError) as error:
            if isinstance(error, UsageError):
                raise
            raise UsageError(f"{str(file)!r} is cut off or damaged: {clean(error)}") from None

    def get(self, reference: Any) -> torch.Tensor:
        """Return what a reference names."""
        if not isinstance(reference, dict) or not isinstance(reference.get("tensor"), str):
            raise _MalformedError(f"{str(reference)[:80]!r} is no reference to a tensor")
        tensor = self._tensors.get(reference["tensor"])
        if tensor is None:
            raise _MalformedError(f"the tensor {reference['tensor'][:80]!r} is missing")
        dtype = _dtype(reference.get("dtype"))
        shape = reference.get("shape")
        if not isinstance(shape, list) or not all(_is_size(n) for n in shape):
            raise _MalformedError(f"the tensor {reference['tensor'][:80]!r} has no shape")
        if tensor.dtype != dtype:
            if tensor.dtype is not torch.uint8 or tensor.dim() != 1:
                raise _MalformedError(f"the tensor {reference['tensor'][:80]!r} is {tensor.dtype}, not {dtype}")
            tensor = tensor.clone().view(dtype)
        wanted = reference.get("requires_grad") is True and (dtype.is_floating_point or dtype.is_complex)
        return tensor.reshape(shape).requires_grad_(wanted)

    def table(self, value: Any) -> dict[str, torch.Tensor] | None:
        """Return the tensors of a name -> reference table."""
        if value is None:
            return None
        return {name: self.get(reference).detach() for name, reference in _mapping(value).items()}


def _bundle(path: Path, document: Mapping[str, Any], tensors: _Tensors) -> Bundle:
    if document.get("inputs") is None:
        reasons = [text for text in _left_out(document) if text.startswith("inputs")]
        raise UsageError(f"{str(path)!r} has no inputs, so there is nothing to run again: {'; '.join(reasons)}")
    args, kwargs = _Tree(tensors).value(document["inputs"])
    if not isinstance(args, tuple) or not isinstance(kwargs, dict) or not all(isinstance(k, str) for k in kwargs):
        raise _MalformedError("the inputs are not positional and named arguments")
    cast = _mapping(document["autocast"])
    autocast = Autocast(device=_device(cast["device"]), enabled=cast["enabled"] is True, dtype=_dtype(cast["dtype"]))
    gradients = tensors.table(document.get("output_gradients")) or {}
    return Bundle(
        path=path,
        facts=document,
        args=args,
        kwargs=kwargs,
        gradients={_position(key): value for key, value in gradients.items()},
        parameters=tensors.table(document.get("parameters")),
        buffers=tensors.table(document.get("buffers")),
        tied={name: _text(first) for name, first in _mapping(document.get("tied", {})).items()},
        frozen=frozenset(_text(name) for name in _list(document.get("frozen", []))),
        rng=_random_state(_mapping(document["rng"]), tensors),
        autocast=autocast,
        modes={name: value is True for name, value in _mapping(document["modes"]).items()},
        partial=document.get("partial_gradients") is True,
        left_out=_left_out(document),
    )


def _random_state(value: Mapping[str, Any], tensors: _Tensors) -> RandomState:
    cpu = tensors.get(value["cpu"]) if value.get("cpu") is not None else None
    cuda = tensors.get(value["cuda"]) if value.get("cuda") is not None else None
    if any(state is not None and state.dtype is not torch.uint8 for state in (cpu, cuda)):
        raise _MalformedError("a generator's state is not made of bytes")
    python = numpy = None
    if value.get("python") is not None:
        version, state, gauss = _list(value["python"])
        python = (version, tuple(_list(state)), gauss)
    if value.get("numpy") is not None:
        import numpy as np  # noqa: PLC0415 - torch works without it

        kind, keys, position, has_gauss, cached = _list(value["numpy"])
        numpy = (_text(kind), np.array(_list(keys), dtype=np.uint32), position, has_gauss, cached)
    return RandomState(cpu=cpu, cuda=cuda, device=_number(value.get("device"), 0), python=python, numpy=numpy)


class _Tree:
    """Builds nested arguments from their description."""

    def __init__(self, tensors: _Tensors) -> None:
        self._tensors = tensors
        self._nodes = 0

    def value(self, node: Any, depth: int = 0) -> Any:
        """Return what a node describes."""
        self._nodes += 1
        if depth > _MAX_DEPTH or self._nodes > _MAX_NODES:
            raise _MalformedError("the inputs are nested too deeply, or too many")
        if not isinstance(node, dict):
            raise _MalformedError("a part of the inputs is not described")
        readers: dict[str, Callable[[Any], Any]] = {
            "tensor": lambda _: self._tensors.get(node),
            "list": lambda parts: [self.value(part, depth + 1) for part in _list(parts)],
            "tuple": lambda parts: tuple([self.value(part, depth + 1) for part in _list(parts)]),
            "dict": lambda parts: {_key(k): self.value(part, depth + 1) for k, part in map(_list, _list(parts))},
            "value": _plain,
            "float": lambda text: float(_text(text)),
            "dtype": _dtype,
            "left_out": _missing,
        }
        kind = next((kind for kind in readers if kind in node), None)
        if kind is None:
            raise _MalformedError("a part of the inputs is of no known kind")
        return readers[kind](node[kind])


def _missing(what: Any) -> Any:
    raise UsageError(f"an argument of the model is missing in the bundle: {str(what)[:120]!r} could not be written")


def _left_out(document: Mapping[str, Any]) -> list[str]:
    found = []
    for item in _list(document.get("left_out", [])):
        entry = _mapping(item)
        found.append(f"{_text(entry['what'])} ({_number(entry.get('bytes'), 0)} bytes): {_text(entry['why'])}")
    return found


T = TypeVar("T")


def _is_a(kind: type[T], word: str, value: Any) -> T:
    if not isinstance(value, kind):
        raise _MalformedError(f"{str(value)[:60]!r} stands where a {word} must be")
    return value


_mapping: Callable[[Any], dict[str, Any]] = functools.partial(_is_a, dict, "table")
_list: Callable[[Any], list[Any]] = functools.partial(_is_a, list, "list")
_text: Callable[[Any], str] = functools.partial(_is_a, str, "text")


def _key(value: Any) -> str | int:
    if not isinstance(value, str | int):
        raise _MalformedError("a dict's key is neither text nor number")
    return value


def _plain(value: Any) -> Any:
    if not (value is None or isinstance(value, bool | int | float | str)):
        raise _MalformedError("a plain value is not plain")
    return value


def _position(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) < 8):
        raise _MalformedError("an output's position is no number")
    return int(text)


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 48


def _number(value: Any, default: int) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) else default


def _dtype(value: Any) -> torch.dtype:
    dtype = _DTYPES.get(value) if isinstance(value, str) else None
    if dtype is None:
        raise _MalformedError(f"{str(value)[:40]!r} is no dtype")
    return dtype


def _device(value: Any) -> str:
    if value not in {"cpu", "cuda", "xpu", "mps"}:
        raise _MalformedError(f"{str(value)[:40]!r} is no kind of device")
    return str(value)
