"""Reads the directories that `torch.distributed.checkpoint` writes, without a process group and without its classes.

Their index, `.metadata`, is a pickle, and a pickle runs what it likes when it is read: this reader knows the classes
that torch writes there by name, makes plain objects of its own of them, and refuses every other name.
"""

from __future__ import annotations

import io
import math
import pathlib
import pickle
from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

import torch

from ddpdebug.checkpoints.entries import Entry, Piece, State, TensorEntry, flat
from ddpdebug.errors import UsageError, text_of
from ddpdebug.sinks.words import clean

INDEX = ".metadata"
_TRUST = "add --trust if you know who wrote it: then it is unpickled, which may run any code"


class _Plain:
    """An object of a class of torch: what it was given, and its attributes."""

    def __init__(self, *args: Any) -> None:
        self.args = args

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict):
            self.__dict__.update(state)
        else:
            self.args = state


class _Tensor(_Plain):
    """What the index says of a tensor."""

    properties: Any
    size: Any
    chunks: Any


_METADATA = "torch.distributed.checkpoint.metadata"
_KNOWN: dict[tuple[str, str], Any] = {
    **{
        (module, name): _Plain
        for module, names in {
            _METADATA: "Metadata MetadataIndex ChunkStorageMetadata BytesStorageMetadata TensorProperties StorageMeta "
            "_MEM_FORMAT_ENCODING",
            "torch.distributed.checkpoint.filesystem": "_StorageInfo",
            # where earlier versions of torch have it
            "torch.distributed._shard.sharded_tensor.metadata": "TensorProperties MEM_FORMAT_ENCODING",
        }.items()
        for name in names.split()
    },
    (_METADATA, "TensorStorageMetadata"): _Tensor,
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): str,
    ("collections", "OrderedDict"): OrderedDict,
    ("builtins", "set"): set,
    ("pathlib", "PosixPath"): pathlib.PurePosixPath,
    ("pathlib", "PurePosixPath"): pathlib.PurePosixPath,
    ("pathlib._local", "PosixPath"): pathlib.PurePosixPath,  # of Python 3.13
}


class _Unpickler(pickle.Unpickler):
    """Makes plain objects of the classes that torch writes."""

    def __init__(self, file: BinaryIO, *, trust: bool) -> None:
        super().__init__(file)
        self.trust = trust

    def find_class(self, module: str, name: str) -> Any:
        known = _KNOWN.get((module, name))
        if known is None and module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if known is None and self.trust:
            return super().find_class(module, name)
        if known is None:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which torch does not write there; {_TRUST}")
        return known

    def persistent_load(self, pid: object) -> NoReturn:
        raise pickle.UnpicklingError("it refers to objects outside of the file")


def read_sharded(directory: Path, *, trust: bool) -> State:
    """Return the state in a directory; its chunks are read on demand.

    Raises:
        UsageError: the directory cannot be read, holds what only unpickling would make, or is not complete.
    """
    shown = str(directory)
    try:
        with (directory / INDEX).open("rb") as file:
            index = _Unpickler(file, trust=trust).load()
        tensors: Mapping[str, Any] = index.state_dict_metadata
        places = {(key.fqn, _place(getattr(key, "offset", None))): info for key, info in index.storage_data.items()}
        entries: dict[str, Entry] = {}
        for name, entry in tensors.items():
            if isinstance(entry, _Tensor):
                entries[name] = _tensor(directory, name, entry, places)
            else:  # lists are kept whole there
                entries |= flat({name: _value(directory, name, places.get((name, None)), trust=trust)}, shown)
    except UsageError:
        raise
    except OSError as error:
        raise UsageError(f"cannot read {shown!r}: {error.strerror or error}") from None
    except Exception as error:  # noqa: BLE001 - a broken pickle raises whatever it likes
        raise UsageError(f"cannot read {INDEX} of {shown!r}: {clean(text_of(error), 300)}") from None
    return State(shown, "torch.distributed.checkpoint", entries)


def _place(offset: Any) -> tuple[int, ...] | None:
    return None if offset is None else tuple(map(int, offset))


def _tensor(directory: Path, name: str, entry: _Tensor, places: Mapping[Any, Any]) -> TensorEntry:
    stated = entry.properties.args  # torch writes a tuple that begins with the dtype
    dtype = stated[0] if stated else entry.properties.dtype
    pieces = []
    for chunk in entry.chunks:
        place, shape = _place(chunk.offsets) or (), tuple(chunk.sizes)
        if math.prod(shape):
            pieces.append(Piece(place, shape, _chunk(directory, name, places.get((name, place)), shape)))
    found = TensorEntry(tuple(entry.size), dtype, tuple(pieces))
    if not found.complete:
        raise UsageError(f"{str(directory)!r} is not complete: it has not all elements of {name!r}")
    return found


def _bytes(directory: Path, name: str, info: Any) -> io.BytesIO:
    shown = str(directory)
    if info is None:
        raise UsageError(f"{str(directory)!r} is not complete: its {INDEX} does not say where {name!r} is")
    if getattr(info, "transform_descriptors", None):
        raise UsageError(f"{name!r} of {shown!r} was written compressed, which is not read; save it without extensions")
    file = directory / str(info.relative_path)
    if not file.resolve().is_relative_to(directory.resolve()):
        raise UsageError(f"{INDEX} of {shown!r} names a file elsewhere: {str(info.relative_path)!r}")
    try:
        with file.open("rb") as opened:
            opened.seek(info.offset)
            data = opened.read(info.length)
    except OSError as error:
        raise UsageError(f"cannot read {str(file)!r}: {error.strerror or error}") from None
    if len(data) < info.length:
        raise UsageError(f"{str(file)!r} is too short: it ends within {name!r}")
    return io.BytesIO(data)


def _chunk(directory: Path, name: str, info: Any, shape: tuple[int, ...]) -> Callable[[], torch.Tensor]:
    def read() -> torch.Tensor:
        data = _bytes(directory, name, info)
        try:
            found = torch.load(data, map_location="cpu", weights_only=True)
        except Exception as error:  # noqa: BLE001 - whatever a damaged file leads to
            raise UsageError(f"cannot read {name!r} of {str(directory)!r}: {clean(text_of(error), 200)}") from None
        if not isinstance(found, torch.Tensor) or tuple(found.shape) != shape:
            raise UsageError(f"{name!r} of {str(directory)!r} is not what its {INDEX} says")
        return found.detach()

    return read


def _value(directory: Path, name: str, info: Any, *, trust: bool) -> Any:
    data = _bytes(directory, name, info)
    try:
        return torch.load(data, map_location="cpu", weights_only=not trust)
    except Exception:  # noqa: BLE001 - bytes of the job's own, or what may not be unpickled: compared as it is
        return data.getvalue()
