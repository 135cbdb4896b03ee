"""The contents of a data set: digests of its plain data and of a split's indices. Runs none of its code."""

from __future__ import annotations

import sys
import weakref
from array import array
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import PosixPath, PurePosixPath, PureWindowsPath, WindowsPath
from types import FrameType, FunctionType
from typing import Any, NamedTuple, TypeGuard

import torch
from torch.utils.data import Subset, random_split

from ddpdebug import fingerprint, torch_internals as internals
from ddpdebug.isolation.foreign import attributes_of, is_a, is_one_of, of_class
from ddpdebug.isolation.local_variables import local_values
from ddpdebug.isolation.user_code import is_user_file, is_users, shorten
from ddpdebug.schema.announcements import Content, IndexList
from ddpdebug.schema.details import hex_digest

_MAX_DEPTH = 3
_MAX_ITEMS = 200_000
#: Of a longer list so many items are read, evenly spaced.
_SAMPLED_ITEMS = 20_000
_BUDGET_BYTES = 32 << 20
_TENSOR_BYTES = 1 << 20
#: Up to so many elements the rows of a tensor are compared without their order as well.
_ROWS_ITEMS = 1 << 22
#: Of a list of tensors or arrays, or of records that hold some, so many items are read.
_HEAVY_ITEMS = 256
#: Of a longer text three parts of a third of this length are read.
_LONG_TEXT = 3 << 20
_MAX_COLUMNS = 8
_MAX_PARTS = 64
#: Hashes of indices that are told of a split: the smallest ones, which are a fair sample of the indices.
_SKETCH = 64
_DICTS = (dict, OrderedDict, Counter, defaultdict)
_PATHS = (PosixPath, PurePosixPath, PureWindowsPath, WindowsPath)
_SCALARS = (type(None), bool, int, float, str, bytes)
#: Of an array in a file so many rows are read, else more.
_FILE_ROWS, _ARRAY_ROWS, _ROW_ITEMS = 16, 256, 1024
_MAX_SPLITS = 64
#: Between the place that makes a subset and `random_split` there are our own frames only.
_MAX_FRAMES = 12


class Held(NamedTuple):
    """The content of a data set's attribute, as the ranks compare it."""

    digest: int
    size: int  # bytes looked at, about
    content: Content | None = None  # of a collection of records


def source_of(dataset: Any) -> str | None:
    """Return the class of the user's data set and the line that makes its items; None for another package's."""
    while is_a(dataset, Subset):
        dataset = attributes_of(dataset).get("dataset")
    made = of_class(type(dataset), "__getitem__") or of_class(type(dataset), "__iter__")
    code = made.__code__ if type(made) is FunctionType else None
    if code is None or not is_user_file(code.co_filename):
        return None
    return f"{type(dataset).__name__} at {shorten(code.co_filename)}:{code.co_firstlineno}"


def _is_listed(value: Any) -> TypeGuard[Sequence[Any]]:
    """Return whether the indices of a subset can be gone through without any code of the user's."""
    return is_one_of(value, (list, tuple, range, torch.Tensor, array)) or _is_array(value)


def held_by(dataset: Any, prefix: str = "dataset", depth: int = 0) -> Iterator[tuple[str, Held]]:
    """Yield (attribute path, content) of the plain data in a data set."""
    if depth > _MAX_DEPTH:
        return
    if (whole := _held(dataset)) is not None:
        yield prefix, whole
        return
    budget = _BUDGET_BYTES
    for name, value in sorted(attributes_of(dataset).items()):
        path = f"{prefix}.{name}"
        if depth == 0 and name == "indices" and is_a(dataset, Subset):
            continue  # which `Splits` tells
        if is_a(value, torch.utils.data.Dataset):
            yield from held_by(value, path, depth + 1)
            continue
        if (found := _held(value)) is None:
            continue
        budget -= found.size
        if budget < 0:
            return
        yield path, found


def _held(value: Any) -> Held | None:  # noqa: PLR0911 - one for each kind
    """Return what a value holds if it is plain data."""
    if is_a(value, torch.Tensor):
        digest = fingerprint.sampled_fingerprint(value, _TENSOR_BYTES)[0]
        return Held(digest, min(value.nbytes, _TENSOR_BYTES), _content([("", _rows(value))]))
    if _is_array(value):
        return _array(value)
    if is_one_of(value, (bool, int, float, str)):
        return Held(fingerprint.of_text(_short(repr(value))), 8)
    if is_one_of(value, (set, frozenset)) and 0 < len(value) <= _MAX_ITEMS:
        texts = [_text(item) for item in value]
        known = sorted(text for text in texts if text is not None)
        return Held(fingerprint.of_text("\n".join(known)), 16 * len(known)) if len(known) == len(texts) else None
    if is_one_of(value, _DICTS):
        return _listed([*value, *value.values()], records=False) if 0 < len(value) <= _MAX_ITEMS else None
    if is_one_of(value, (list, tuple)) and len(value):
        return _listed(value, records=True)
    return None


def _listed(items: Sequence[Any], *, records: bool) -> Held | None:
    """Return what a list holds; `records`: each item may be one."""
    total = len(items)
    if all([is_a(item, torch.Tensor) for item in items[:_MAX_PARTS]]):
        return _tensors(items)
    if (limit := _limit(items)) is None:
        return None
    if total > limit:
        items = [items[i * (total - 1) // (limit - 1)] for i in range(limit)]
    columns = {name: _hashes(column) for name, column in _columns(items).items()}
    known = {name: column for name, column in columns.items() if column is not None}
    if len(known) < len(columns):
        return None
    digest = fingerprint.combine([total, *(fingerprint.fingerprint(column) for column in known.values())])
    content = _content(list(known.items())) if records and total == len(items) else None
    return Held(digest, 16 * len(items) * len(known), content)


def _tensors(items: Sequence[Any]) -> Held | None:
    """Return what a list of tensors holds: the columns of one table, or one sample each."""
    if not all([is_a(item, torch.Tensor) for item in items]):
        return None
    chosen = items[:_MAX_PARTS] if len(items) <= _MAX_PARTS else items[:: len(items) // _MAX_PARTS][:_MAX_PARTS]
    digest = fingerprint.combine([len(items), *(fingerprint.glance(item) for item in chosen)])
    rows = len(items[0]) if items[0].dim() else 0
    table = len(items) <= _MAX_COLUMNS and all([item.dim() and len(item) == rows for item in items])
    content = _content([(str(i), _rows(item)) for i, item in enumerate(items)]) if table else None
    return Held(digest, 1 << 12, content)


def _limit(items: Sequence[Any]) -> int | None:
    """Return how many items of a list are read; None for one that holds no plain data."""
    texts = [text for item in items[:_MAX_PARTS] if (text := _text(item)) is not None]
    if len(texts) < min(len(items), _MAX_PARTS):
        return None
    if _is_heavy(items[0]):
        return _HEAVY_ITEMS
    affordable = _BUDGET_BYTES // max(1, sum(map(len, texts)) // len(texts))
    return max(2, min(_MAX_ITEMS if len(items) <= _MAX_ITEMS else _SAMPLED_ITEMS, affordable))


def _is_heavy(item: Any, depth: int = 0) -> bool:
    """Return whether tensors or arrays are in a record."""
    if is_a(item, torch.Tensor) or _is_array(item):
        return True
    parts = _parts(item) or []
    return depth < _MAX_DEPTH and any([_is_heavy(part, depth + 1) for part in parts[:_MAX_PARTS]])


def _short(text: str) -> str:
    """Return a text, or parts of a long one and its length."""
    part = _LONG_TEXT // 3
    if len(text) <= _LONG_TEXT:
        return text
    middle = len(text) // 2
    return f"{len(text)} {text[:part]}{text[middle : middle + part]}{text[-part:]}"


def _columns(items: Sequence[Any]) -> dict[str, Sequence[Any]]:
    """Return the columns of a list of records; one column of anything else."""
    first = items[0]
    if is_one_of(first, (tuple, list)) and 1 < len(first) <= _MAX_COLUMNS:
        size = len(first)
        if all([is_one_of(item, (tuple, list)) and len(item) == size for item in items]):
            return {str(i): [item[i] for item in items] for i in range(size)}
    if type(first) is dict and 1 < len(first) <= _MAX_COLUMNS:
        keys = list(first)
        if all([type(key) is str for key in keys]) and all(
            [type(i) is dict and i.keys() == first.keys() for i in items]
        ):
            return {key: [item[key] for item in items] for key in sorted(keys)}
    return {"": items}


def _hashes(items: Sequence[Any]) -> torch.Tensor | None:
    """Return a hash of each item; what all paths begin with (the folder of this node or rank) does not count."""
    if all([type(item) is str or is_one_of(item, _PATHS) for item in items]):
        texts = [str(item) for item in items]
        low, high = min(texts), max(texts)
        same = next(
            iter([i for i, (a, b) in enumerate(zip(low, high, strict=False)) if a != b]), min(len(low), len(high))
        )
        cut = low.rfind("/", 0, same) + 1
        return _vector(fingerprint.of_text(text[cut:]) for text in texts)
    found = array("Q")
    for item in items:
        text = _text(item)
        if text is None:
            return None
        found.append(fingerprint.of_text(text))
    return _vector(found)


def _vector(values: Any) -> torch.Tensor:
    held = values if isinstance(values, array) else array("Q", values)
    return torch.frombuffer(held, dtype=torch.int64)


def _text(item: Any, depth: int = 0) -> str | None:  # noqa: PLR0911 - likewise
    """Return what stands for a plain value, None for anything else; no code of a class of the user's runs."""
    if is_one_of(item, _SCALARS):
        return repr(item)
    if is_one_of(item, _PATHS):
        return repr(str(item))
    if is_one_of(item, (torch.Tensor, torch.nn.Parameter)):
        return f"{fingerprint.glance(item):x}"
    numpy = sys.modules.get("numpy")
    if numpy is not None and is_a(item, numpy.generic):
        return repr(item.item())
    if _is_array(item):
        found = _array(item)
        return None if found is None else f"{found.digest:x}"
    parts = _parts(item)
    if parts is None or depth >= _MAX_DEPTH or len(parts) > _MAX_PARTS:
        return None
    texts = [_text(part, depth + 1) for part in parts]
    return None if None in texts else f"({', '.join(map(str, texts))})"


def _parts(item: Any) -> list[Any] | None:
    """Return what a small record is made of."""
    kind = type(item)
    if is_one_of(item, (tuple, list)) or (is_a(item, tuple) and hasattr(kind, "_fields")):
        return list(tuple.__iter__(item) if is_a(item, tuple) else item)
    if kind is dict:
        return [*item, *item.values()]
    if hasattr(kind, "__dataclass_fields__") and (own := attributes_of(item)):
        return [*own, *own.values()]
    return None


# --- arrays and tensors -----------------------------------------------------------------------------------------------


def _is_array(value: Any) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and is_one_of(value, (numpy.ndarray, numpy.memmap))


def _array(value: Any) -> Held | None:
    """Return what an array holds; of one in a file a few rows are read."""
    if value.dtype.hasobject:
        listed = value.dtype.kind == "O" and value.ndim == 1 and 0 < len(value) <= _MAX_ITEMS
        return _listed(value.tolist(), records=True) if listed else None
    in_file = type(value).__name__ == "memmap"
    if value.ndim == 0 or (value.nbytes <= _TENSOR_BYTES and not in_file):
        digest = fingerprint.of_bytes(value.tobytes())
    else:
        number = min(len(value), _FILE_ROWS if in_file else _ARRAY_ROWS)
        rows = [value[i * (len(value) - 1) // max(1, number - 1)] for i in range(number)]
        texts = [row.flat[:_ROW_ITEMS].tobytes() for row in rows]  # `reshape` may copy a whole row
        digest = fingerprint.combine([value.nbytes, *(fingerprint.of_bytes(text) for text in texts)])
    columns: torch.Tensor | None = None
    if value.ndim and not in_file and value.size * value.itemsize <= _ROWS_ITEMS:
        if value.dtype.kind in "biuf" and value.dtype.isnative:
            held = torch.frombuffer(bytearray(value.tobytes() or b"0"), dtype=torch.uint8)
            columns = _rows(held.reshape(len(value), -1)) if value.nbytes else None
        elif value.dtype.kind in "US" and value.ndim == 1:
            columns = _hashes(value.tolist())
    return Held(digest, min(value.nbytes, _TENSOR_BYTES), _content([("", columns)]))


def _rows(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return a hash of each row of a tensor; None where it is large or not in host memory."""
    plain = is_one_of(tensor, (torch.Tensor, torch.nn.Parameter)) and internals.is_plain(tensor) and tensor.is_cpu
    if not plain or not tensor.dim() or not tensor.numel() or tensor.numel() > _ROWS_ITEMS:
        return None
    return fingerprint.rows(tensor)


def _content(columns: list[tuple[str, torch.Tensor | None]]) -> Content | None:
    """Return what the rows of some columns are, whatever their order; None where a column is not known."""
    known = {name: column for name, column in columns if column is not None}
    if not known or len(known) < len(columns) or len({len(column) for column in known.values()}) > 1:
        return None
    unordered = fingerprint.unordered(list(known.values()))
    named = {name: hex_digest(fingerprint.fingerprint(column)) for name, column in known.items() if len(known) > 1}
    return Content(length=len(next(iter(known.values()))), unordered=hex_digest(unordered), columns=named)


# --- splits -----------------------------------------------------------------------------------------------------------


class Splits:
    """The newest subsets, with the lines that made them and their seeds."""

    def __init__(self) -> None:
        self._made: dict[int, tuple[weakref.ref[Any], IndexList]] = {}  # by id; what is known without the indices

    def note(self, subset: Subset[Any], location: str | None) -> None:
        """Record a subset as it is made."""
        drawn, seed = _drawn_by()
        about = IndexList(digest="", length=0, location=location, drawn=drawn, seed=seed)
        self._made[id(subset)] = weakref.ref(subset), about
        while len(self._made) > _MAX_SPLITS:
            del self._made[next(iter(self._made))]

    def of(self, dataset: Any) -> IndexList | None:
        """Return the indices of a subset and their origin; None if unknown."""
        held = attributes_of(dataset).get("indices") if is_a(dataset, Subset) else None
        if not _is_listed(held):
            return None
        reference, about = self._made.get(id(dataset), (None, None))
        if about is None or reference is None or reference() is not dataset:
            about = IndexList(digest="", length=0)
        length, chosen = len(held), held[:_MAX_ITEMS]
        chosen = chosen.tolist() if hasattr(chosen, "tolist") else list(chosen)
        try:
            numbers = torch.tensor(array("q", chosen), dtype=torch.int64)
        except (TypeError, ValueError, OverflowError) as error:
            if is_users(error):
                raise
            return replace(about, digest=hex_digest(fingerprint.of_text(repr(chosen))), length=length)
        mixed = fingerprint.mixed(numbers) & ((1 << 53) - 1)
        return replace(
            about,
            digest=hex_digest(fingerprint.fingerprint(numbers)),
            length=length,
            members=hex_digest(fingerprint.unordered([numbers])),
            sketch=tuple(mixed.sort().values[:_SKETCH].tolist()) if length <= _MAX_ITEMS else (),
        )


def _drawn_by() -> tuple[str | None, int | None]:
    """Return which generator `random_split`, if that is what runs, has drawn from, and its seed."""
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001 - there is no other way to a caller's argument
    for _ in range(_MAX_FRAMES):
        if frame is None:
            break
        if frame.f_code is random_split.__code__:
            generator = local_values(frame).get("generator")
            if generator is None or generator is torch.default_generator:
                return "default", torch.initial_seed()
            return "own", generator.initial_seed() if type(generator) is torch.Generator else None
        frame = frame.f_back
    return None, None
