"""Recognition of tensors that are not held, without any reference to the tensor object.

A weak reference to a tensor, of Python or of C++, keeps `torch.utils.swap_tensors` from working, by which modules are
converted and states are loaded. So what is referred to weakly is the memory behind it, of which nobody counts that:
its Python object, which lives as long as the memory. `StorageWeakRef` of torch ends in a method of Python's, in which
what a signal handler raises would be lost, and keeps a part of the memory's description.
"""

from __future__ import annotations

import weakref

import torch

from ddpdebug.torch_internals import names
from ddpdebug.torch_internals.dtensors import held_here
from ddpdebug.torch_internals.unlisted import unlisted


class Seen:
    """Recognises a tensor by its identity and its memory; one without memory of its own is never recognised.

    That of a DTensor is the memory of the part that this rank holds.
    """

    __slots__ = ("_memory", "_number")

    def __init__(self, tensor: torch.Tensor) -> None:
        self._number, self._memory = id(tensor), _memory_of(held_here(tensor))

    def is_alive(self) -> bool:
        """Return whether the tensor's memory still exists."""
        return self._memory is not None and self._memory() is not None

    def is_of(self, tensor: torch.Tensor) -> bool:
        """Return whether this is the same tensor, on the same memory."""
        if id(tensor) != self._number or self._memory is None:
            return False
        memory = self._memory()
        return memory is not None and memory is held_here(tensor).untyped_storage()


class Memory:
    """The memory of a plain tensor (`is_plain`), the tensor's layout on it, and its version counter.

    Nothing is held until `hold`; the memory itself may be had as long as somebody else has it. No dispatch mode of the
    user's sees what is made for that.
    """

    __slots__ = ("_held", "_place", "_standin", "_weak")

    def __init__(self, tensor: torch.Tensor) -> None:
        with names.as_plain():  # else that of a subclass is a view of another one, which holds the memory
            self._weak = weakref.ref(tensor.untyped_storage())
            self._place = tensor.storage_offset(), tensor.size(), tensor.stride()
            self._standin = _alias(tensor)  # shares the counter of in-place changes, also when it is empty
        self._held = True
        self.let_go()

    @property
    def version(self) -> int | None:
        """The number of in-place writes; None if they are not counted (inference mode)."""
        return None if self._standin.is_inference() else int(names.version(self._standin))

    def tensor(self) -> torch.Tensor | None:
        """Return a tensor on the memory, without a graph; None if the memory is gone."""
        if self._held:
            return self._standin
        storage = self._weak()
        if storage is None:
            return None
        with names.without_dispatch_keys():
            return self._nothing().set_(storage, *self._place)

    def hold(self) -> None:
        """Hold the memory from now on, if it still exists."""
        tensor = None if self._held else self.tensor()
        if tensor is not None:
            self._standin.data = tensor
            self._held = True

    def let_go(self) -> None:
        """Hold the memory no longer."""
        if self._held:
            self._held = False
            with names.without_dispatch_keys():
                self._standin.data = self._nothing()

    def _nothing(self) -> torch.Tensor:
        return torch.empty(0, dtype=self._standin.dtype, device=self._standin.device)


def _alias(tensor: torch.Tensor) -> torch.Tensor:
    with names.without_dispatch_keys():
        return unlisted(tensor.detach())


def _memory_of(tensor: torch.Tensor) -> weakref.ref[torch.UntypedStorage] | None:
    if type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        return None  # fake ones warn when they are asked
    try:
        return weakref.ref(tensor.untyped_storage())
    except (RuntimeError, ValueError) as error:  # sparse, wrapped by functorch or a subclass, not initialised
        if type(error) not in {RuntimeError, ValueError, NotImplementedError}:
            raise  # a class of somebody else's: a signal handler's
        return None
