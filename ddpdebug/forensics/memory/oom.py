"""Out-of-memory reports: every rank writes one when an allocation fails on any, before the error propagates.

The rank that failed writes first and tells the others, which write what they have at that moment: their shapes, their
memory, their phase. The error itself passes through unchanged.
"""

from __future__ import annotations

import json
import pickle
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from ddpdebug import torch_internals as internals
from ddpdebug.detectors.mem.explanation import ExplainingRule, explain
from ddpdebug.detectors.mem.sizes import size_text
from ddpdebug.disk import Disk
from ddpdebug.forensics.memory.oom_text import render
from ddpdebug.forensics.memory.snapshot import by_line
from ddpdebug.isolation.foreign import is_a
from ddpdebug.isolation.guard import Guard
from ddpdebug.isolation.local_variables import local_values
from ddpdebug.isolation.user_code import is_user_file, is_users, shorten
from ddpdebug.probes.entries import entries_of
from ddpdebug.probes.memory import Failure, MemoryProbe
from ddpdebug.probes.step_state import StepState
from ddpdebug.probes.threads import always_alone
from ddpdebug.probes.training_events import BackwardFailed, Bus, FirstForward, ForwardFailed
from ddpdebug.redaction import Redactor
from ddpdebug.run_directory import reader as run_files
from ddpdebug.schema.announcements import AllocationFailure, Announce, MemoryState
from ddpdebug.schema.wire import to_json
from ddpdebug.torch_internals import graph

_MAX_CONTRIBUTORS = 8
_MAX_REPORTS = 4
_MAX_SNAPSHOTS = 2
_CPU_MESSAGE = "DefaultCPUAllocator: can't allocate memory"
_SIZES = {"bytes": 1, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30}
_REQUESTED = re.compile(r"tried to allocate ([\d.]+) (bytes|KiB|MiB|GiB)", re.IGNORECASE)


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether an error is a failed allocation, of a device or of the host."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and (_CPU_MESSAGE in str(error) or "out of memory" in str(error).lower())


class Reports:
    """Writes this rank's summaries.

    Args:
        add_to: adds evidence to the findings of a code.
        announce: tells all ranks.
        directory: the run directory, None while it is not known.
    """

    def __init__(  # noqa: PLR0913 - what it depends on
        self,
        bus: Bus,
        state: StepState,
        guard: Guard,
        memory: MemoryProbe,
        add_to: Callable[[str, Mapping[str, Any]], None],
        announce: Announce,
        directory: Callable[[], Path | None],
        *,
        redactor: Redactor | None = None,
        disk: Disk | None = None,
    ) -> None:
        self.closed = False
        self.rank, self.world = 0, 1
        self.redactor, self.disk = redactor or Redactor(), disk or Disk()
        self.level = "off"  # how much of the allocator's history CUDA records: `off`, `light` or `full`
        self.rule = ExplainingRule()  # whose thresholds are those of MEM401
        self._state, self._guard, self._memory = state, guard, memory
        self._alone = entries_of(guard).threads.alone
        self._add_to, self._announce = add_to, announce
        self._directory = directory
        self._seen: set[int] = set()
        self._written = self._snapshots = 0
        self._pending: list[tuple[str, bytes]] = []
        self._batches: dict[str, str] = {}
        bus.on("probe:memory", FirstForward, self.prepare)
        bus.on("probe:memory", ForwardFailed, self._call_failed)
        bus.on("probe:memory", BackwardFailed, self._call_failed)

    def prepare(self, _: FirstForward) -> None:
        """Register with CUDA for out-of-memory errors, and record allocations as `level` says; at the first forward."""
        if entries_of(self._guard).when_out_of_memory("probe:memory", self._observed) and self.level != "off":
            internals.record_memory_history(self.level)

    def close(self) -> None:
        """Stop recording."""
        self.closed = True
        if self.level != "off" and torch.cuda.is_initialized():
            internals.stop_memory_history()

    def _observed(self, device: int, requested: int, total: int, free: int) -> None:
        """Take the numbers while what fills the memory is still there: the error's way up frees much of it."""
        del device, total, free
        if not self.closed:
            self._note_failure(requested)

    def _note_failure(self, requested: int) -> None:
        node, snapshot = internals.current_node(), None
        if self.level != "off" and self._snapshots < _MAX_SNAPSHOTS:
            self._snapshots += 1
            snapshot = internals.memory_snapshot()
        failure = Failure(
            requested=requested,
            sample=self._memory.provider.sample(),
            operation=None if node is None else graph.name_of(node),
            lines=by_line(snapshot) if snapshot is not None else {},
            snapshot=snapshot,
            table=internals.memory_summary(),
        )
        self._memory.note_failure(failure)

    # --- the rank that failed -----------------------------------------------------------------------------------------

    def _call_failed(self, event: ForwardFailed | BackwardFailed) -> None:
        error = event.error
        if isinstance(error, Exception) and not is_users(error):  # a handler may raise MemoryError
            self.failed(error)

    def failed(self, error: BaseException | None) -> None:
        """Write the summary of a failed allocation, once for each error; ignore other errors."""
        if error is None or id(error) in self._seen or not is_out_of_memory(error) or self._written >= _MAX_REPORTS:
            return
        self._seen.add(id(error))
        failure = self._memory.take_failure()
        place = where(error, self._state, self._alone)
        numbers = self._numbers(failure)
        requested = failure.requested if failure is not None else requested_bytes(str(error))
        known = {**place, **numbers, "requested": requested, "error": str(error)[:2000]}
        summary = AllocationFailure(**self.redactor.value(known))  # an error may quote anything
        self._write(summary, failure)
        self._announce(summary)

    # --- all ranks ----------------------------------------------------------------------------------------------------

    def hear(self, rank: int, state: MemoryState) -> None:
        """Record a rank's summary, in the background thread; write this rank's own when another rank has failed."""
        shapes = "x".join(map(str, state.shapes[0])) if state.shapes else ""
        self._batches[str(rank)] = f"{state.elements} elements ({shapes or 'none yet'})"
        if state.failed and rank != self.rank and self._written < _MAX_REPORTS:
            summary = MemoryState(phase=phase_now(self._state), **self._numbers(None))
            self._write(summary, None)
            self._announce(summary)
        if not state.failed:
            self._add_to("MEM401", {"batch": dict(sorted(self._batches.items()))})

    def _numbers(self, failure: Failure | None) -> dict[str, Any]:
        state, memory = self._state, self._memory
        sample = failure.sample if failure is not None else memory.provider.sample()
        on_device = bool(sample.device_allocated_bytes)
        used = sample.device_allocated_bytes or sample.host_private_bytes
        with self._alone() as alone:  # not in the background thread
            split, largest = split_of(state, used, gradients=alone)
        names = module_names(state)
        modules = failure.modules.items() if failure is not None else ()
        return {
            "rank": self.rank,
            "world": self.world,
            "step": state.next_step(),
            "steps": state.next_step(),
            "device": on_device,
            "allocated": used,
            "reserved": sample.device_reserved_bytes,
            "peak": sample.device_peak_bytes or sample.host_peak_bytes,
            "limit": sample.device_limit_bytes if on_device else sample.host_limit_bytes,
            "sample": asdict(sample),
            "split": split,
            "largest": largest,
            "operation": failure.operation if failure is not None else None,
            "lines": dict(failure.lines) if failure is not None else {},
            "modules": {names.get(key, "(other)"): size for key, size in modules},
            "shapes": (*map(tuple, memory.shapes),),
            "elements": memory.elements,
            "largest_elements": memory.largest,
            "curve": tuple([(past.step, past.used, past.elements) for past in tuple(memory.history)]),
            "directory": f"{run_files.RANKS}/{self.rank}/memory",
        }

    # --- files --------------------------------------------------------------------------------------------------------

    def _write(self, summary: MemoryState, failure: Failure | None) -> None:
        self._written += 1
        stem = f"step-{summary.step}" + ("" if self._written == 1 else f"-{self._written}")
        explanation = explain(summary, self.rule) if isinstance(summary, AllocationFailure) else None
        table = failure.table if failure is not None else internals.memory_summary()
        data = to_json(summary) | ({} if explanation is None else {"cause": asdict(explanation)})
        self._pending.append((f"{stem}.json", json.dumps(data, default=str).encode()))
        self._pending.append((f"{stem}.txt", render(summary, explanation, table).encode("utf-8", "replace")))
        if failure is not None and failure.snapshot is not None:
            self._pending.append((f"{stem}-snapshot.pickle", pickle.dumps(failure.snapshot)))
        self.flush()

    def flush(self) -> None:
        """Write the reports that have waited for the run directory."""
        base = self._directory()
        if base is None or not self._pending:
            return
        folder = base / run_files.RANKS / str(self.rank) / "memory"
        self.disk.make_directory(folder, below=base)
        while self._pending:
            name, data = self._pending.pop(0)
            what = "snapshots" if name.endswith(".pickle") else "summaries"
            reason = self.disk.refusal(folder, len(data), what)
            if reason is None:
                self.disk.write(folder / name, data)
            else:
                self._add_to("MEM401", {f"{name} not written": reason})


# --- where ------------------------------------------------------------------------------------------------------------


def where(
    error: BaseException, state: StepState, alone: Callable[[], AbstractContextManager[bool]] = always_alone
) -> dict[str, Any]:
    """Return phase, module and line of an error, read from the frames of its traceback.

    Args:
        alone: tells whether gradients may be read here; without them the module of a backward is not known.
    """
    names = module_names(state)
    phase, module, line = None, None, None
    for frame in _callers(error.__traceback__):  # where it was caught lies above what it has left
        if is_user_file(frame.f_code.co_filename):
            line = f"{shorten(frame.f_code.co_filename)}:{frame.f_lineno}"
            break
    for frame, number in _frames(error.__traceback__):
        file = frame.f_code.co_filename
        phase = _own_phase(file, frame.f_code.co_name) or phase
        if is_user_file(file):
            line = f"{shorten(file)}:{number}"
        if frame.f_code.co_name in {"forward", *internals.CALLS}:
            running = local_values(frame).get("self")
            if is_a(running, torch.nn.Module) and not is_a(running, DistributedDataParallel):
                module = names.get(id(running), type(running).__name__)
                phase = phase or ("loss" if is_a(running, internals.LOSS_MODULES) else "forward")
        elif frame.f_code.co_name in internals.LOSSES and file.endswith("/torch/nn/functional.py"):
            phase = phase or "loss"
    if phase == "backward" and module is None:
        with alone() as readable:
            module = _backward_module(state) if readable else None
    return {"phase": phase or "between", "module": module, "location": line}


def _own_phase(file: str, function: str) -> str | None:
    """Return the phase that a frame begins, whatever it was called from."""
    if "/torch/optim/" in file:
        return "optimizer"
    in_backward = "/torch/autograd/" in file and function in {"backward", "grad", internals.RUN_BACKWARD}
    return "backward" if in_backward else None


def _frames(trace: TracebackType | None) -> Iterator[tuple[FrameType, int]]:
    while trace is not None:
        yield trace.tb_frame, trace.tb_lineno
        trace = trace.tb_next


def _callers(trace: TracebackType | None) -> Iterator[FrameType]:
    frame = None if trace is None else trace.tb_frame.f_back
    while frame is not None:
        yield frame
        frame = frame.f_back


def _backward_module(state: StepState) -> str | None:
    """Name the module whose gradients were due: the last one, in backward order, that has none yet."""
    for wrapper in state.wrappers:
        module = wrapper.module()
        if module is None or not wrapper.arrived:
            continue
        for name, parameter in reversed(list(internals.named_parameters(module))):
            if parameter.requires_grad and parameter.grad is None:
                return name.rpartition(".")[0] or name
    return None


def phase_now(state: StepState) -> str:
    """Return the present phase of the training thread, as far as hooks show it."""
    if state.in_backward:
        return "backward"
    return "forward" if any(wrapper.in_forward for wrapper in state.wrappers) else "between"


def requested_bytes(message: str) -> int | None:
    """Return the size in an error message, in bytes; None if it names none."""
    found = _REQUESTED.search(message)
    return None if found is None else int(float(found[1]) * _SIZES[found[2].lower()])


# --- what fills it ----------------------------------------------------------------------------------------------------


def module_names(state: StepState) -> dict[int, str]:
    """Return the names of all modules of the watched models by their ids."""
    names: dict[int, str] = {}
    for wrapper in state.wrappers:
        module = wrapper.module()
        if module is not None:
            for name, inner in internals.named_modules(module):
                names.setdefault(id(inner), name or "(model)")
    return names


def split_of(state: StepState, used: int, *, gradients: bool = True) -> tuple[dict[str, int], dict[str, str]]:
    """Return the used bytes by kind (`other`: activations, buckets, caches), and the largest modules.

    Args:
        gradients: they may be read here; otherwise they are among what is left, `gradients_and_other`.
    """
    sizes = Counter[str]()
    modules = Counter[str]()
    seen: set[int] = set()
    found = [*_of_models(state, gradients=gradients), *_of_optimizers(state, gradients=gradients)]
    main = Counter(t.device.type for kind, _, t in found if kind == "parameters").most_common(1)
    for kind, name, tensor in found:
        here = isinstance(tensor, torch.Tensor) and tensor.device.type == main[0][0]
        if here and id(tensor) not in seen:
            seen.add(id(tensor))
            sizes[kind] += tensor.nbytes
            modules[name.rpartition(".")[0] or name] += tensor.nbytes
    rest = "other" if gradients else "gradients_and_other"
    sizes[rest] = max(0, used - sum(sizes.values()))
    order = ("parameters", *(("gradients",) if gradients else ()), "optimizer_state", "buffers", rest)
    top = {name: size_text(size) for name, size in modules.most_common(_MAX_CONTRIBUTORS) if name}
    return {kind: sizes[kind] for kind in order}, top


def checkpoint_bytes(state: StepState) -> int:
    """Return the size of a checkpoint: the bytes of all watched parameters, buffers and optimizer states."""
    sizes: dict[int, int] = {}
    for _, _, tensor in (*_of_models(state, gradients=False), *_of_optimizers(state, gradients=False)):
        if isinstance(tensor, torch.Tensor):
            sizes[id(tensor)] = tensor.nbytes
    return sum(sizes.values())


def _of_models(state: StepState, *, gradients: bool) -> Iterator[tuple[str, str, Any]]:
    for wrapper in state.wrappers:
        module = wrapper.module()
        if module is None:
            continue
        for name, buffer in internals.named_buffers(module):
            yield "buffers", name, buffer
        for name, parameter in internals.named_parameters(module):
            yield "parameters", name, parameter
            if gradients:
                yield "gradients", name, parameter.grad


def _of_optimizers(state: StepState, *, gradients: bool) -> Iterator[tuple[str, str, Any]]:
    for watch in state.watches:
        names = {id(p): name for name, p in zip(watch.names, watch.params, strict=True)}
        for name, parameter in zip(watch.names, watch.params, strict=True):
            yield "parameters", name, parameter
            if gradients:
                yield "gradients", name, parameter.grad
        for optimizer in watch.optimizers():
            for parameter, held in list(internals.state(optimizer).items()):
                for value in list(held.values()):
                    yield "optimizer_state", names.get(id(parameter), ""), value
