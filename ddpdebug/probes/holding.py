"""References to a forward's arguments: weak ones, and their memory only within a bound in bytes.

A value of the job is never held itself, so it dies when it would without ddpdebug. Of a tensor in ordinary host memory
the memory is held, up to a bound that is small against the model. Known only for as long as the job has it is what lies
on a device, or in memory that a loader's worker, NumPy or a file lent (each holds a file descriptor, or an object of
the user); so are objects. Of tensors that are no block of memory nothing is kept.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch

from ddpdebug import torch_internals as internals
from ddpdebug.isolation.user_code import is_users
from ddpdebug.nested import ITEMS, is_container, items, mapped, rebuilt, tensors_in

#: Bytes that the kept forwards may hold together: a batch of small images, whatever the model. What is held of large
#: batches and outputs is missing to the job, which has its peak in the same moment.
BOUND = 8 << 20
_TEXT_BYTES = 1 << 16
_MAX_DEPTH = 8
#: Values without memory or insides of their own; texts and bytes as well where they are short.
_PLAIN = (bool, int, float, complex, Enum, torch.dtype, torch.device, torch.layout, torch.Size, slice, range)


@dataclass(frozen=True, kw_only=True)  # without slots: what looks into data classes asks for `vars`
class Lost:
    """The placeholder of a value that was not kept."""

    what: str


class KeptObject:
    """A weak reference to an object, which exists for as long as the script holds it.

    Raises:
        TypeError: no weak reference to it can be made.
    """

    __slots__ = ("_object", "why")

    def __init__(self, value: object) -> None:
        self._object = weakref.ref(value)
        self.why = f"a {type(value).__name__} that the script has let go"

    def get(self) -> Any:
        """Return the object, or `Lost`."""
        value = self._object()
        return Lost(what=self.why) if value is None else value


class KeptTensor:
    """A reference to the memory of a plain tensor."""

    __slots__ = ("_memory", "_nbytes", "_requires_grad", "why")

    def __init__(self, tensor: torch.Tensor) -> None:
        self._memory, self._requires_grad = internals.Memory(tensor), tensor.requires_grad
        self._nbytes = storage_of(tensor)[1]
        self.why = f"a {type(tensor).__name__} that the script has let go"

    def get(self) -> Any:
        """Return a tensor on the same memory, or `Lost`."""
        tensor = self._memory.tensor()
        if tensor is None:
            return Lost(what=self.why)
        if storage_of(tensor)[1] < self._nbytes:
            return Lost(what="its memory was given back")
        return tensor.detach().requires_grad_(self._requires_grad)

    def version(self) -> int | None:
        """Return the number of in-place writes to the tensor."""
        return self._memory.version

    def hold(self) -> None:
        """Hold the memory from now on, if it still exists."""
        self._memory.hold()

    def let_go(self) -> None:
        """Hold the memory no longer."""
        self._memory.let_go()


#: What stands for one value among a forward's arguments; `why` says why it may be lost.
Kept = KeptObject | KeptTensor


class Room:
    """The count of held bytes, each piece of memory once.

    Args:
        limit: bytes.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = 0
        self._holders: dict[int, int] = {}  # by the memory's address

    def take(self, pieces: dict[int, int]) -> None:
        """Add pieces of memory, given as address -> bytes."""
        for address, size in pieces.items():
            number = self._holders.get(address, 0)
            self._holders[address] = number + 1
            self.used += 0 if number else size

    def give_back(self, pieces: dict[int, int]) -> None:
        """Subtract pieces of memory; those that were never added, because of a user's exception, are ignored."""
        for address, size in pieces.items():
            number = self._holders.pop(address, 0)
            if number > 1:
                self._holders[address] = number - 1
            elif number:
                self.used -= size


class Counted:
    """The number of items of containers that one forward's arguments may still have to be kept."""

    def __init__(self) -> None:
        self.left = ITEMS


def hold(value: Any, kept: dict[int, Kept], counted: Counted, depth: int = 0) -> Any:
    """Return the value with new containers and a `Kept` in place of each value that is not plain; fills `kept`."""
    kind = type(value)  # no `isinstance`, which asks the value
    if value is None or issubclass(kind, _PLAIN) or (kind in {str, bytes} and len(value) <= _TEXT_BYTES):
        return value
    if depth < _MAX_DEPTH and is_container(value):
        number = dict.__len__(value) if kind is dict else list.__len__(value) if kind is list else tuple.__len__(value)
        counted.left -= number
        if counted.left < 0:
            return Lost(what=f"a {kind.__name__} of {number} items")
        return rebuilt(value, [hold(item, kept, counted, depth + 1) for _, item in items(value)])
    if id(value) not in kept:
        stands = _kept(value)
        if type(stands) is Lost:
            return stands
        kept[id(value)] = stands
    return kept[id(value)]


def _kept(value: Any) -> Any:
    """Return what stands for a value that is no container."""
    name = type(value).__name__
    if issubclass(type(value), torch.Tensor):
        # of a class of the user's only the memory could be kept: a forward may ask for the class, or act by it
        known = type(value) in {torch.Tensor, torch.nn.Parameter}
        if not known or not internals.is_plain(value) or value.is_conj() or value.is_neg():
            return Lost(what=f"a {name} that is no plain block of memory")
        return KeptTensor(value)
    if any([tensor.grad_fn is not None for tensor in tensors_in(value)]):
        return Lost(what=f"a {name} with tensors that carry a graph")
    try:
        return KeptObject(value)
    except TypeError as error:  # no weak reference to it can be made
        if is_users(error):
            raise
        return Lost(what=f"a {name}")


def fetch(value: Any) -> Any:
    """Return the value that `hold` was given, with `Lost` in place of parts that do not exist any more."""
    return mapped(value, lambda item: item.get() if type(item) in {KeptObject, KeptTensor} else item)


def is_ours_to_keep(tensor: torch.Tensor) -> bool:
    """Return whether a tensor's memory is ordinary host memory, whose users nobody counts."""
    if type(tensor) is not torch.Tensor or tensor.device.type != "cpu" or tensor.layout != torch.strided:
        return False
    storage = tensor.untyped_storage() if internals.is_plain(tensor) else None
    if storage is None or not storage.resizable() or storage.is_shared() or internals.is_traced():
        return False
    return not (torch.cuda.is_initialized() and tensor.is_pinned())


def storage_of(tensor: torch.Tensor) -> tuple[int, int]:
    """Return address and bytes of the memory behind a tensor; (0, 0) if it has no storage of its own."""
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
    """Return a number of bytes as readable text."""
    return f"{size / (1 << 20):.1f} MiB"
