"""Adapter for the memory probes: torch's allocators, history, snapshots, storages."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from ddpdebug.torch_internals import names


def device_memory_stats() -> Mapping[str, Any]:
    """Return the accelerator's nested allocator statistics, empty while it is not in use; queries no device."""
    kind = accelerator()
    if kind is None or (kind == "cuda" and not torch.cuda.is_initialized()):
        return {}
    if not names.allocator_is_ready():
        return {}
    # torch 2.6 has it under another name, and reads the memory of CUDA's devices only
    current: Any = getattr(torch.accelerator, "current_device_index", torch.cuda.current_device)
    stats: Mapping[str, Any] = names.device_stats(current())
    return stats


@functools.cache
def accelerator() -> str | None:
    """Return the kind of accelerator that this torch is built for, without a query of the driver; None if none."""
    try:
        device = torch.accelerator.current_accelerator()
    except RuntimeError:  # torch 2.6 says so where it is built for none
        return None
    return None if device is None else device.type


#: Up to so many bytes a tensor is read wherever it lies.
_SMALL = 32 << 20


def is_readable_memory(tensor: torch.Tensor) -> bool:
    """Return whether a plain tensor can be read whole: a large one must not lie in a file that is mapped.

    Such a file may be larger than the host's memory, or have become shorter than the tensor. Shared memory, of which
    loaders' workers make their batches, is no file.
    """
    if not tensor.is_cpu or tensor.nbytes <= _SMALL:
        return True
    storage = tensor.untyped_storage()
    own = storage.resizable() and not storage.is_shared()
    return bool(own) or _is_anonymous(storage.data_ptr(), storage.nbytes())


def _is_anonymous(address: int, size: int) -> bool:
    """Return whether memory may be read and has no file behind it, as far as the system says so."""
    end = address + size
    try:
        table = Path("/proc/self/maps").read_bytes()
    except OSError:
        return False
    for line in table.splitlines():
        place, mode, _, _, inode, *name = line.split(None, 5)
        first, last = [int(number, 16) for number in place.split(b"-")]
        if last <= address or first >= end:
            continue
        in_memory = inode == b"0" or (name and name[0].startswith((b"/dev/shm/", b"/memfd:")))
        if not in_memory or not mode.startswith(b"r"):
            return False
    return True


def device_memory_limit() -> int:
    """Return the bytes of the current device that this process may use; queries the driver."""
    # torch has it for all accelerators since 2.10
    info: Any = getattr(torch.accelerator, "get_memory_info", torch.cuda.mem_get_info)
    return int(info()[1] * _share_of_device())


def _share_of_device() -> float:
    share: Any = getattr(torch.cuda, "get_per_process_memory_fraction", None) if torch.cuda.is_initialized() else None
    try:
        return 1.0 if share is None else min(1.0, share())  # without a limit cudaMallocAsync has one beyond the device
    except RuntimeError as error:  # an allocator that knows none
        if type(error) not in {RuntimeError, NotImplementedError}:
            raise  # a class of somebody else's: a signal handler's
        return 1.0


def record_memory_history(level: str) -> bool:
    """Start to record the allocator's history at `light` or `full`; return whether this torch supports it.

    `light` keeps the Python stack of what is allocated now, `full` also a ring of the last 50,000 events.
    """
    record = names.record_memory_history
    if record is None or not torch.cuda.is_initialized():
        return False
    if level == "full":
        record("all", context="all", stacks="python", max_entries=50_000)
    else:
        record("state", context="state", stacks="python", max_entries=1)
    return True


def stop_memory_history() -> None:
    """Stop the recording of `record_memory_history`."""
    names.record_memory_history(None)


def memory_snapshot() -> Any:
    """Return the allocator's snapshot: plain containers and scalars; None without a CUDA device in use."""
    return names.memory_snapshot() if torch.cuda.is_initialized() else None


def memory_summary() -> str:
    """Return torch's own table of the allocator; empty without a CUDA device in use."""
    return str(torch.cuda.memory_summary()) if torch.cuda.is_initialized() else ""


def observe_out_of_memory(observer: Callable[[int, int, int, int], None]) -> bool:
    """Have `observer(device, requested, total, free)` called before CUDA raises, for good; return whether it works."""
    attach = names.observe_out_of_memory
    if attach is None or not torch.cuda.is_initialized():
        return False
    attach(observer)
    return True


def current_node() -> Any:
    """Return the autograd node that runs in this thread; None outside of backward."""
    return names.current_node()


def storage_key(storage: torch.UntypedStorage) -> int:
    """Return an id of a storage, the same for all Python objects that represent it, valid while it lives."""
    return int(names.storage_id(storage))


def number_of_samples(sampler: Mapping[str, Any]) -> int | None:
    """Return the `num_samples` that a `RandomSampler` was given, from its attributes; None for the default."""
    number = sampler.get(names.NUMBER_OF_SAMPLES)
    return number if type(number) is int else None


def worker_pids(iterator: Any) -> list[int]:
    """Return the process ids of a DataLoader iterator's workers."""
    return [int(worker.pid) for worker in getattr(iterator, names.WORKERS, ()) if worker.pid is not None]
