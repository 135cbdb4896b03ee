"""How the arguments of a forward are kept: weakly, and as memory only while that fits a bound in bytes.

A value of the job is never held itself, so it dies when it would without ddpdebug. Of a tensor in ordinary host memory
another tensor on the same memory is held, up to a bound that is small against the model. Held weakly only is what lies
on a device, in memory that a loader's worker, NumPy or a file lent (each holds a file descriptor, or an object of the
user), and every object that is no plain tensor: it is there for as long as the job has it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch

from ddpdebug import torch_internals as internals
from ddpdebug.isolation.user_code import is_users
from ddpdebug.nested import is_container, items, mapped, rebuilt, tensors_in

#: Bytes that the kept forwards may hold together: this share of the models' parameters, and at least and at most so
#: much. The least is a batch of small images; a process that has loaded torch has some hundred MiB.
SHARE, LEAST, MOST = 8, 8 << 20, 64 << 20
_TEXT_BYTES = 1 << 16
_MAX_DEPTH = 8
#: Values without memory or insides of their own; texts and bytes as well where they are short.
_PLAIN = (bool, int, float, complex, Enum, torch.dtype, torch.device, torch.layout, torch.Size, slice, range)


@dataclass(frozen=True, kw_only=True)  # without slots: what looks into data classes asks for `vars`
class Lost:
    """Stands for a value that was not kept."""

    what: str


class Kept:
    """Stands for one value among a forward's arguments."""

    __slots__ = ("_nbytes", "_strong", "_weak", "why")

    def __init__(self, value: Any) -> None:
        self._weak: Callable[[], Any] = weakref.ref(value)
        self._strong: torch.Tensor | None = None
        self._nbytes = storage_of(value)[1] if isinstance(value, torch.Tensor) else 0
        self.why = f"a {type(value).__name__} that the script has let go"

    def get(self) -> Any:
        """Return the value, a tensor without its graph; or `Lost`."""
        value = self._weak() if self._strong is None else self._strong
        if value is None:
            return Lost(what=self.why)
        if not isinstance(value, torch.Tensor):
            return value
        if storage_of(value)[1] < self._nbytes:
            return Lost(what="its memory was given back")
        return value if value.grad_fn is None else value.detach().requires_grad_(value.requires_grad)

    def hold(self) -> None:
        """Keep a tensor's memory from here on, if it still is there and in host memory."""
        value = self._weak()
        if self._strong is None and type(value) is torch.Tensor and value.device.type == "cpu":
            self._strong = internals.alias(value).requires_grad_(value.requires_grad)

    def let_go(self) -> None:
        """Keep nothing any more."""
        self._strong = None


class Room:
    """Counts the bytes that are held, each piece of memory once.

    Args:
        limit: bytes; None takes a share of the models' parameters.
    """

    def __init__(self, limit: int | None = None) -> None:
        self._fixed = limit is not None
        self.limit = LEAST if limit is None else limit
        self.used = 0
        self._holders: dict[int, int] = {}  # by the memory's address

    def fit(self, parameters: int) -> None:
        """Take the bytes of the models' parameters into account."""
        if not self._fixed:
            self.limit = min(MOST, max(LEAST, parameters // SHARE))

    def take(self, pieces: dict[int, int]) -> None:
        """Count pieces of memory, given as address -> bytes."""
        for address, size in pieces.items():
            number = self._holders.get(address, 0)
            self._holders[address] = number + 1
            self.used += 0 if number else size

    def give_back(self, pieces: dict[int, int]) -> None:
        """Count them no longer; what an exception of the user's has kept from being counted is passed over."""
        for address, size in pieces.items():
            number = self._holders.pop(address, 0)
            if number > 1:
                self._holders[address] = number - 1
            elif number:
                self.used -= size


def hold(value: Any, kept: dict[int, Kept], depth: int = 0) -> Any:
    """Return the value with containers of its own, and a `Kept` in place of what is not plain; these go into `kept`."""
    if value is None or isinstance(value, _PLAIN) or (isinstance(value, str | bytes) and len(value) <= _TEXT_BYTES):
        return value
    if depth < _MAX_DEPTH and is_container(value):
        return rebuilt(value, [hold(item, kept, depth + 1) for _, item in items(value)])
    if not isinstance(value, torch.Tensor) and any(tensor.grad_fn is not None for tensor in tensors_in(value)):
        return Lost(what=f"a {type(value).__name__} with tensors that carry a graph")
    if id(value) not in kept:
        try:
            kept[id(value)] = Kept(value)
        except TypeError as error:  # no weak reference to it can be made
            if is_users(error):
                raise
            return Lost(what=f"a {type(value).__name__}")
    return kept[id(value)]


def fetch(value: Any) -> Any:
    """Return what `hold` was given, as far as it is still there, with `Lost` in place of the rest."""
    return mapped(value, lambda item: item.get() if isinstance(item, Kept) else item)


def is_ours_to_keep(tensor: torch.Tensor) -> bool:
    """Tell whether a tensor's memory is ordinary host memory, of which nobody counts the users."""
    if type(tensor) is not torch.Tensor or tensor.device.type != "cpu" or tensor.layout != torch.strided:
        return False
    storage = tensor.untyped_storage() if internals.is_plain(tensor) else None
    if storage is None or not storage.resizable() or storage.is_shared() or internals.is_traced():
        return False
    return not (torch.cuda.is_initialized() and tensor.is_pinned())


def storage_of(tensor: torch.Tensor) -> tuple[int, int]:
    """Return address and bytes of the memory behind a tensor, (0, 0) when it has none to itself."""
    if type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        return 0, 0  # fake ones warn when they are asked
    try:
        storage = tensor.untyped_storage()
        return storage.data_ptr(), storage.nbytes()
    except (RuntimeError, ValueError) as error:  # sparse, a wrapper of functorch or of a subclass, not initialised
        if is_users(error):
            raise
        return 0, 0


def size_text(size: int) -> str:
    """Return a number of bytes as people write it."""
    return f"{size / (1 << 20):.1f} MiB"
