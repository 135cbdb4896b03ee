"""A limit on CPU tensors, to rehearse a smaller device: the operation beyond it raises a real `torch.OutOfMemoryError`.

Counts the storages that operations make, exactly, while it is switched on (`memory_limit`); costs some microseconds an
operation, so it is off by default. The counts stand in the fields of the device, so that all rules read them.
"""

from __future__ import annotations

import sys
import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from ddpdebug import torch_internals as internals
from ddpdebug.isolation.user_code import user_location
from ddpdebug.nested import tensors_in
from ddpdebug.probes.entries import Entries
from ddpdebug.probes.memory import Failure, MemorySample, SystemProvider

_MAX_CONTRIBUTORS = 8


@dataclass(frozen=True, slots=True)
class _Storage:
    size: int
    line: str | None
    module: int | None  # id of the innermost module that ran
    ref: Any  # tells when it is freed


class CpuLimit(internals.OperationMode):
    """The dispatch mode that counts bytes of CPU tensors and raises beyond `limit`.

    Args:
        entries: what hooks are put in place through; what runs under its guard is neither counted nor stopped.
        on_failure: called before the error is raised.
    """

    def __init__(self, limit: int, entries: Entries, on_failure: Callable[[Failure], None]) -> None:
        super().__init__()
        self.limit, self.live, self.peak = limit, 0, 0
        self._entries, self._on_failure = entries, on_failure
        self._storages: dict[int, _Storage] = {}
        self._running: list[int] = []
        self._before = entries.before_modules("probe:memory-limit", self._enters)
        self._after = entries.after_modules("probe:memory-limit", self._leaves, always_call=True)
        self._system = SystemProvider()

    def start(self) -> None:
        """Start to count in this thread and in its backward passes."""
        self._before.on()
        self._after.on()
        self._entries.guard.own_modes += 1
        self.__enter__()

    def stop(self) -> None:
        """Stop counting."""
        self._before.off()
        self._after.off()
        self._entries.guard.own_modes -= 1
        self.__exit__(None, None, None)

    def _enters(self, module: torch.nn.Module, _: Any) -> None:
        self._running.append(id(module))

    def _leaves(self, *_: Any) -> None:
        if self._running:
            self._running.pop()

    def sample(self) -> MemorySample:
        """Return the system's memory sample with the counts in place of a device's."""
        return replace(
            self._system.sample(),
            device_allocated_bytes=self.live,
            device_reserved_bytes=self.live,
            device_peak_bytes=self.peak,
            device_limit_bytes=self.limit,
        )

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation and count what it has made."""
        result = func(*args, **(kwargs or {}))
        if not self._entries.guard.active:
            for tensor in tensors_in(result):
                if tensor.device.type == "cpu" and tensor.layout is torch.strided:
                    self._take(tensor.untyped_storage(), func)
        return result

    def _take(self, storage: torch.UntypedStorage, func: Any) -> None:
        key, size = internals.storage_key(storage), storage.nbytes()
        if key in self._storages or not size:
            return
        if self.live + size > self.limit:
            self._fail(size, func)
        line = user_location(sys._getframe(1))  # noqa: SLF001 - the documented way to walk the stack cheaply
        module = self._running[-1] if self._running else None
        self._storages[key] = _Storage(size, line, module, self._until(storage, key))
        self.live += size
        self.peak = max(self.peak, self.live)

    def _until(self, storage: torch.UntypedStorage, key: int) -> weakref.ref[Any]:
        return self._entries.when_gone("probe:memory-limit", storage, partial(self._gone, key))

    def _gone(self, key: int) -> None:
        storage = self._storages.pop(key, None)
        if storage is not None:
            self.live -= storage.size

    def _fail(self, size: int, func: Any) -> None:
        lines, modules = Counter[str](), Counter[int]()
        for storage in list(self._storages.values()):
            lines[storage.line or "unknown"] += storage.size
            if storage.module is not None:
                modules[storage.module] += storage.size
        self._on_failure(
            Failure(
                requested=size,
                sample=self.sample(),
                operation=str(func),
                lines=dict(lines.most_common(_MAX_CONTRIBUTORS)),
                modules=dict(modules.most_common(_MAX_CONTRIBUTORS)),
            )
        )
        raise torch.OutOfMemoryError(
            f"out of memory: tried to allocate {size} bytes, {self.live} bytes of CPU tensors are in use and the "
            f"limit set by memory_limit is {self.limit} bytes"
        )
