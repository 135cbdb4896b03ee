"""The training thread's counts for the coverage: steps, parameters, processes. Silence must not pass for health.

It stands beside the other probes, not on them: it still counts where these are off.
"""

from __future__ import annotations

import multiprocessing.process
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from ddpdebug import torch_internals as internals
from ddpdebug.isolation.guard import CAPTURES
from ddpdebug.probes.ddp_wrapper import Wrapper
from ddpdebug.probes.entries import Entries
from ddpdebug.probes.training_events import Bus, CopyTrained

#: Who makes processes of its own, that train nothing: the workers of loaders, compilers and pools, managers.
_LIBRARIES = ("torch.utils.data", "torch._inductor", "concurrent.", "multiprocessing.", "joblib.")
_MAX_KINDS = 8
_COPIES = "they are of copies that each rank trains by itself, as an inner loop does"


class CoverageProbe:
    """Counts optimizer steps, parameters that cannot be compared, and processes that the script starts.

    Args:
        on_child: called after the script has started a process, with whether a new interpreter was started for it.
        starts: is told of such a process before it starts, and after it has started or has failed to.
    """

    def __init__(
        self,
        bus: Bus,
        entries: Entries,
        wrappers: list[Wrapper],
        on_child: Callable[[bool], None],
        starts: tuple[Callable[[Any], None], Callable[[Any], None]] | None = None,
    ) -> None:
        self._entries, self._wrappers, self._on_child, self._starting = entries, wrappers, on_child, starts
        self.made = self.children = self.parameters = self.replayed = 0
        self.unwatched: dict[str, int] = {}
        self.left_out: dict[str, int] = {}
        self._known: dict[int, weakref.ref[Any]] = {}  # optimizers that were looked at
        bus.on("probe:coverage", CopyTrained, self._copy_trained)
        self._captured = 0  # optimizer steps that went into CUDA graphs so far
        self._graphs = weakref.WeakKeyDictionary[Any, int]()  # graph -> the steps in it, of those that hold some
        self._targets: dict[int, Any] = {}  # what processes run, by their object's id, while they start

    def install(self) -> None:
        """Start to count, in all threads."""
        after: list[Any] = [("probe:coverage", self._stepped), (CAPTURES, self._captures_step)]
        self._entries.on_step(before=(), after=after, who=lambda _: True)
        graph, why = torch.cuda.CUDAGraph, "which steps a CUDA graph takes, which nobody sees"
        self._entries.patch(graph, "capture_begin", why, before=[(CAPTURES, self._graph_begins)])
        self._entries.patch(graph, "capture_end", why, after=[(CAPTURES, self._graph_ends)])
        self._entries.patch(graph, "replay", why, after=[("probe:coverage", self._replayed)])
        before, after = [("probe:coverage", self._starts)], [("probe:coverage", self._started)]
        if self._starting is not None:
            before.append(("probe:spawned", self._lets_start))
            after.insert(0, ("close:spawned", self._has_started))
        self._entries.patch(
            multiprocessing.process.BaseProcess,
            "start",
            "processes that the script starts; ranks among them are attached to",
            before=before,
            after=after,
            failed=[("probe:coverage", self._failed)],
        )

    def _stepped(self, optimizer: Any, *_: Any) -> None:
        self.made += 1
        known = self._known.get(id(optimizer))
        if known is None or known() is not optimizer:
            self._look(optimizer)

    def _captures_step(self, *_: Any) -> None:
        self._captured += self._entries.guard.capturing > 0

    def _graph_begins(self, graph: Any, *_: Any, **__: Any) -> None:
        self._graphs[graph] = -self._captured

    def _graph_ends(self, _: Any, graph: Any, *__: Any, **___: Any) -> None:
        taken = self._captured + self._graphs.pop(graph, -self._captured)
        if taken:
            self._graphs[graph] = taken

    def _replayed(self, _: Any, graph: Any, *__: Any, **___: Any) -> None:
        self.replayed += max(0, self._graphs.get(graph, 0))

    def _copy_trained(self, event: CopyTrained) -> None:
        self.left_out = {**self.left_out, _COPIES: max(self.left_out.get(_COPIES, 0), event.parameters)}

    def _starts(self, process: Any) -> None:
        self._targets[id(process)] = getattr(process, "_target", None)  # it is gone once the process has started

    def _lets_start(self, process: Any) -> None:
        if self._starting is not None and not _is_helper(process, getattr(process, "_target", None)):
            self._starting[0](process)

    def _has_started(self, _: object, process: Any) -> None:
        if self._starting is not None:
            self._starting[1](process)

    def _failed(self, _: BaseException, process: Any) -> None:
        self._targets.pop(id(process), None)
        self._has_started(None, process)

    def _started(self, _: None, process: Any) -> None:
        if _is_helper(process, self._targets.pop(id(process), None)):
            return
        self.children += 1
        self._on_child(getattr(process, "_start_method", None) in {"spawn", "forkserver"})

    def _look(self, optimizer: Any) -> None:
        self._known[id(optimizer)] = weakref.ref(optimizer)
        ignored = {
            id(p)
            for w in self._wrappers
            if (m := w.module()) is not None
            for n, p in internals.named_parameters(m)
            if n in w.ignored
        }
        unwatched, left_out = Counter(self.unwatched), Counter(self.left_out)
        count = 0
        for parameter in internals.params(optimizer):
            count += 1
            if id(parameter) in ignored:
                left_out["on DDP's ignore list"] += 1
            elif (reason := why_unwatched(parameter)) is not None:
                unwatched[reason if reason in unwatched or len(unwatched) < _MAX_KINDS else "other types"] += 1
        if internals.is_sharded(optimizer):
            left_out["their optimizer state is sharded over the ranks"] += count
        self.parameters += count
        self.unwatched, self.left_out = dict(unwatched), dict(left_out)


def _is_helper(process: Any, target: Any) -> bool:
    """Return whether a process is a worker of a library's."""
    home = str(getattr(target, "__module__", "") or type(process).__module__)
    return home.startswith(_LIBRARIES) and not home.startswith("torch.multiprocessing")


def why_unwatched(parameter: Any) -> str | None:
    """Return why a parameter's values are not compared between ranks; None if they are."""
    if is_lazy(parameter):
        return "not initialised yet"
    kind = type(parameter)
    if parameter.device.type == "meta":
        return "on the meta device, without values"
    if not internals.is_plain(parameter) and not hasattr(parameter, "__tensor_flatten__"):
        return f"of the type {kind.__name__[:40]}"
    return None
