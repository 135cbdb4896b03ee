"""Opens checkpoints of `torch.distributed.checkpoint`, safetensors and `torch.save`."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from ddpdebug.checkpoints.entries import Entry, Piece, State, TensorEntry, flat
from ddpdebug.checkpoints.sharded import INDEX, read_sharded
from ddpdebug.errors import UsageError, text_of
from ddpdebug.sinks.words import clean

_WANTED = "give a directory of torch.distributed.checkpoint, a safetensors file or directory, or a file of torch.save"


def open_state(path: Path, *, trust: bool = False) -> State:
    """Return the state in a file or directory; its tensors are read on demand.

    Args:
        trust: unpickle what is more than tensors and plain values, which may run any code.

    Raises:
        UsageError: there is none, it cannot be read, or it holds what is not unpickled without `trust`.
    """
    if path.is_dir():
        return _of_directory(path, trust=trust)
    if not path.exists():
        raise UsageError(f"there is no checkpoint {str(path)!r}; {_WANTED}")
    if path.name == INDEX:
        return _of_directory(path.parent, trust=trust)
    if path.suffix == ".safetensors":
        return State(str(path), "safetensors", _of_safetensors(path))
    if path.name.endswith(".index.json"):
        return _of_index(path, trust=trust)
    return State(str(path), "torch.save", _of_pickle(path, trust=trust))


def _of_directory(path: Path, *, trust: bool) -> State:
    if (path / INDEX).is_file():
        return read_sharded(path, trust=trust)
    indices = sorted(path.glob("*.safetensors.index.json")) or sorted(path.glob("*.index.json"))
    files = sorted(path.glob("*.safetensors"))
    if len(indices) == 1:
        return _of_index(indices[0], trust=trust)
    if len(files) == 1:
        return State(str(files[0]), "safetensors", _of_safetensors(files[0]))
    found = ", ".join(sorted(item.name for item in path.iterdir())[:8])
    raise UsageError(f"{str(path)!r} is no checkpoint, or several: it has {found or 'nothing'}; {_WANTED}")


def _of_index(path: Path, *, trust: bool) -> State:
    """Read what a list of names with their files names."""
    try:
        names: dict[str, str] = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        files = sorted({str(file) for file in names.values()})
    except OSError as error:
        raise UsageError(f"cannot read {str(path)!r}: {error.strerror or error}") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise UsageError(f"{str(path)!r} has no weight_map, which says which tensor is in which file") from None
    states = {file: open_state(path.parent / file, trust=trust) for file in files}
    entries = {}
    for name, file in names.items():
        if name not in states[file].entries:
            raise UsageError(f"{file!r} has no {name!r}, though {str(path)!r} says so")
        entries[name] = states[file].entries[name]
    kind = next(iter(states.values())).kind if states else "safetensors"
    return State(str(path.parent), f"{kind}, {len(files)} files", entries)


def _of_safetensors(path: Path) -> dict[str, Entry]:
    try:
        file: Any = safe_open(path, framework="pt", device="cpu")
        return {name: _lazy(file.get_tensor(name), _reader(file, name)) for name in file.keys()}  # noqa: SIM118
    except OSError as error:
        raise UsageError(f"cannot read {str(path)!r}: {error.strerror or error}") from None
    except SafetensorError as error:
        raise UsageError(f"{str(path)!r} is no safetensors file: {clean(error, 200)}") from None


def _reader(file: Any, name: str) -> Callable[[], torch.Tensor]:
    return lambda: file.get_tensor(name)


def _lazy(tensor: torch.Tensor, read: Callable[[], torch.Tensor]) -> TensorEntry:
    shape = tuple(tensor.shape)
    return TensorEntry(shape, tensor.dtype, (Piece((0,) * len(shape), shape, read),))


def _of_pickle(path: Path, *, trust: bool) -> dict[str, Entry]:
    try:
        mapped = zipfile.is_zipfile(path)  # else of before torch 1.6
        found = torch.load(path, map_location="cpu", weights_only=not trust, mmap=mapped or None)
    except OSError as error:
        raise UsageError(f"cannot read {str(path)!r}: {error.strerror or error}") from None
    except Exception as error:  # noqa: BLE001 - whatever a damaged file leads to
        raise UsageError(_refused(path, error, trust=trust)) from None
    if isinstance(found, torch.nn.Module):
        found = found.state_dict()
    if isinstance(found, torch.Tensor) or not isinstance(found, dict | list | tuple):
        found = {"value": found}
    return flat(found, str(path))


def _refused(path: Path, error: Exception, *, trust: bool) -> str:
    try:
        names = [] if trust else torch.serialization.get_unsafe_globals_in_checkpoint(path)
    except Exception:  # noqa: BLE001 - no file of torch.save
        names = []
    if not names:
        return f"{str(path)!r} is no file of torch.save, or damaged: {clean(text_of(error), 200)}; {_WANTED}"
    more = "add --trust (in Python: trust=True) if you know who wrote it: then it is unpickled, which may run any code"
    return f"{str(path)!r} holds more than tensors and plain values: {', '.join(sorted(names)[:4])}; {more}"
