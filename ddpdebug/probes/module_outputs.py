"""Examines the module outputs of a checked forward: one pass over each tensor, no wait for a device.

One look at the calls of modules (`module_calls.py`), on only while a checked training forward runs: nothing
is left on the user's modules, modules that are added later or called twice are seen like any other, and neither an
evaluation nor the recomputation of activation checkpointing meets it. Of a model of many modules each check looks at
some, in turn (`Turns`). Once `torch.compile` is in use it is not put in place at all, because it would get into the
graph; then only what the model returns is looked at.

On the CPU a call is judged at once, while its inputs are still there; on a device the ranges stay where they are, to be
read later in the background thread.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import torch

from ddpdebug import torch_internals as internals
from ddpdebug.isolation.foreign import is_a
from ddpdebug.isolation.guard import Guard
from ddpdebug.nested import tensors_in
from ddpdebug.probes import async_copy as device, ranges
from ddpdebug.probes.entries import entries_of
from ddpdebug.probes.module_turns import Turns
from ddpdebug.probes.nonfinite_notes import Looks
from ddpdebug.schema.details import ModuleCall, NearLimit

#: The first non-finite calls of a step are enough to tell what came first.
_MAX_BAD = 8
_HISTORY = 16
_MAX_HISTORIES = 512
_FLOATS = frozenset({torch.float32, torch.float64})
ROOT = "(model)"

Look = Callable[[torch.nn.Module, Any, Any], None]


class ForwardProbe:
    """Observes the module calls of one forward at a time.

    Args:
        guard: what the hook runs under.
        looks_at_all: tells whether each check looks at all modules, however many there are.
    """

    def __init__(self, guard: Guard, looks_at_all: Callable[[], bool] = lambda: False) -> None:
        self._looks_at_all = looks_at_all
        self._turns: Turns | None = None
        self._last: tuple[int, int, int | None] | None = None  # which result of which node was looked at last
        self._guard = guard
        self._also: Look | None = None
        self._hook = entries_of(guard).after_modules("probe:modules", self._on_call)
        self._looks = Looks()
        self._order = 0
        self._micro_batch = 0
        self._step = 0
        self._calls: dict[int, int] = {}
        self._seen: dict[int, tuple[internals.Seen, int | None]] = {}  # id -> (tensor, version) looked at
        self._bad: list[tuple[list[torch.nn.Module], dict[str, Any]]] = []  # with the modules around, as they end
        self._near: list[tuple[torch.nn.Module, dict[str, Any]]] = []
        self._pending: list[tuple[torch.nn.Module, dict[str, Any], torch.Tensor, torch.Tensor]] = []
        self._history: dict[str, deque[tuple[int, float]]] = {}
        self._halves: dict[int, tuple[torch.nn.Module, float]] = {}

    def turns(self, root: torch.nn.Module) -> Turns | None:
        """Return the order in which checks examine a model's modules; None if each check examines all of them."""
        if self._looks_at_all():
            return None
        if self._turns is None or not self._turns.is_of(root):
            self._turns = Turns(root)
        return self._turns if self._turns.needed else None

    def begin(
        self,
        looks: Looks,
        step: int,
        also: Look | None = None,
        modules: Iterable[torch.nn.Module] | None = None,
    ) -> None:
        """Observe module calls from now until `end`.

        Args:
            also: sees this forward's calls too.
            modules: the calls of these alone are looked at.
        """
        self.abort()
        self._also = also
        self._looks, self._micro_batch, self._step = looks, looks.forwards, step
        self._order, self._last = 0, None
        self._hook.on(modules=modules)

    def abort(self) -> None:
        """Stop observing, and discard what was seen."""
        self._hook.off()
        for table in (self._calls, self._seen, self._bad, self._near, self._pending, self._halves):
            table.clear()

    def end(self, root: torch.nn.Module, prefix: str) -> None:
        """Stop observing, and record the results under the paths of the modules in `root`."""
        if not self._hook.is_on:
            return
        if self._bad or self._near or self._pending or self._halves:
            paths = {id(module): prefix + (name or ROOT) for name, module in internals.named_modules(root)}

            def path(module: torch.nn.Module) -> str:
                return paths.get(id(module), f"({type(module).__name__}, not part of the model)")

            self._remember(path)
            looks = self._looks
            bad = [(chain if any([m is root for m in chain]) else [root, *chain], entry) for chain, entry in self._bad]
            calls = [ModuleCall(**_place(root, prefix, chain, path) | entry) for chain, entry in bad]
            looks.forward += calls[: _MAX_BAD - len(looks.forward)]
            if self._turns is not None and self._turns.is_of(root):
                self._turns.suspect([chain[-1] for chain, _ in bad])
            if self._pending:
                looks.later.append(_later([({"module": path(m), **e}, a, b) for m, e, a, b in self._pending]))
        self.abort()

    def _remember(self, path: Callable[[torch.nn.Module], str]) -> None:
        """Keep the history of modules that return 16-bit numbers, and note those that near the limit."""
        for module, largest in self._halves.values():
            name = path(module)
            if name not in self._history and len(self._history) >= _MAX_HISTORIES:
                continue
            self._history.setdefault(name, deque(maxlen=_HISTORY)).append((self._step, largest))
        for module, entry in self._near[:_MAX_BAD]:
            name = path(module)
            self._looks.near.append(NearLimit(module=name, **entry, history=tuple(self._history.get(name, ()))))

    def _on_call(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        if self._bad and not internals.is_leaf(module):
            self._enclose(module)
        key = id(module)
        call = self._calls[key] = self._calls.get(key, -1) + 1
        self._order += 1
        if not self._is_known_or_finite(output):
            self._look(module, args, output, call)
        if self._also is not None:
            self._guard.run("probe:layers", self._also, module, args, output)

    def _is_known_or_finite(self, output: Any) -> bool:
        """Return whether an output of the usual kind is finite, or the one that was looked at last: makes no object.

        A container hands on what its last child gave: the same result of the same node.
        """
        if type(output) is not torch.Tensor or output.dtype not in _FLOATS or not output.is_cpu:
            return False
        node = output.grad_fn
        if node is None:
            return False
        last = (internals.sequence_of(node), output.output_nr, internals.version_of(output))
        if last == self._last:
            return True
        if not ranges.is_surely_finite(output):
            return False
        self._last = last
        return True

    def _look(self, module: torch.nn.Module, args: Any, output: Any, call: int) -> None:
        tensors = (output,) if is_a(output, torch.Tensor) else tensors_in(output)
        for position, tensor in enumerate(tensors):
            if self._known(tensor):
                continue
            if tensor.device.type == "cpu" and tensor.dtype in _FLOATS and ranges.is_surely_finite(tensor):
                continue  # the range matters in 16 bits, where it comes near the limit
            seen = ranges.look(tensor)
            if seen is None:
                continue
            if tensor.device.type != "cpu":
                self._postpone(module, args, call, position, tensor, seen)
                continue
            low, high = float(seen[0]), float(seen[1])
            if not (math.isfinite(low) and math.isfinite(high)):
                self._bad_call(module, args, call, position, tensor)
            elif tensor.dtype not in _FLOATS:
                self._half(module, tensor, low, high)

    def _known(self, tensor: torch.Tensor) -> bool:
        """Whether the very same tensor was looked at, unchanged: a container hands on what its last child gave."""
        key, version = id(tensor), internals.version_of(tensor)
        known = self._seen.get(key)
        if known is not None and known[1] == version and known[0].is_of(tensor):
            return True
        self._seen[key] = (internals.Seen(tensor), version)
        return False

    def _entry(self, module: torch.nn.Module, call: int, position: int) -> dict[str, Any]:
        place = {"call": call, "micro_batch": self._micro_batch, "order": self._order, "output": position}
        return {"class_name": type(module).__name__, **place}

    def _bad_call(self, module: torch.nn.Module, args: Any, call: int, position: int, tensor: torch.Tensor) -> None:
        if len(self._bad) >= _MAX_BAD:
            return
        inputs = [t for t in tensors_in(args) if t is not tensor]
        seen = [found for t in inputs if (found := ranges.read(t)) is not None]
        kinds = {kind for found in seen for kind in ranges.kinds_of(*found)}
        finite = [number for found in seen for number in found if math.isfinite(number)]
        entry = {
            **self._entry(module, call, position),
            **ranges.describe(tensor),
            "input_range": (min(finite), max(finite)) if finite else None,
            "input_nonfinite": bool(kinds - {ranges.MINUS_INF}) if seen else None,
        }
        self._bad.append(([module], entry))

    def _enclose(self, module: torch.nn.Module) -> None:
        """Note that the forward of a module has ended: it was around the bad calls of what it holds.

        A module that is registered in two places has two paths: who ends next tells which one it is.
        """
        held = {id(part) for part in internals.modules(module)}
        for chain, _ in self._bad:
            if chain[0] is not module and id(chain[0]) in held:
                chain.insert(0, module)

    def _half(self, module: torch.nn.Module, tensor: torch.Tensor, low: float, high: float) -> None:
        largest = max(high, -low)
        known = self._halves.get(id(module))
        if known is None or known[1] < largest:
            self._halves[id(module)] = (module, largest)
        near = ranges.near_limit(tensor.dtype, low, high)
        if near is not None:
            limit = torch.finfo(tensor.dtype).max
            self._near.append((module, {"dtype": ranges.dtype_name(tensor), "largest": near, "limit": limit}))

    def _postpone(
        self,
        module: torch.nn.Module,
        args: Any,
        call: int,
        position: int,
        tensor: torch.Tensor,
        seen: tuple[torch.Tensor, torch.Tensor],
    ) -> None:
        about = {"dtype": ranges.dtype_name(tensor), "shape": tuple(tensor.shape), "role": "output"}
        entry = {**self._entry(module, call, position), **about}
        for value in tensors_in(args):  # cannot be looked at again once the answer is known
            if value is not tensor and not self._known(value) and (found := ranges.look(value)) is not None:
                self._pending.append((module, {**entry, "role": "input"}, *found))
        self._pending.append((module, entry, *seen))


def _place(
    root: torch.nn.Module, prefix: str, chain: list[torch.nn.Module], path: Callable[[torch.nn.Module], str]
) -> dict[str, Any]:
    """Return the path of the last module of a chain of callers, and that of the one that called it."""
    places = [i for i, module in enumerate(chain) if module is root]
    if not places:
        return {"module": path(chain[-1]), "caller": None}
    names = [ROOT]
    steps: list[str] = []
    for caller, called in itertools.pairwise(chain[places[-1] :]):
        inside = next(iter([name for name, module in internals.named_modules(caller) if module is called]), None)
        if inside is None:
            return {"module": path(called), "caller": prefix + names[-1]}
        steps.append(inside)
        names.append(".".join(steps))
    return {"module": prefix + names[-1], "caller": prefix + names[-2] if len(names) > 1 else None}


def _later(
    pending: list[tuple[dict[str, Any], torch.Tensor, torch.Tensor]],
) -> Callable[[], list[ModuleCall | NearLimit]]:
    """Copy the ranges out without waiting; what is returned judges them, in the background thread."""
    entries = [entry for entry, _, _ in pending]
    numbers = device.numbers([number for _, low, high in pending for number in (low, high)])

    def read() -> list[ModuleCall | NearLimit]:
        values = numbers()
        found: list[ModuleCall | NearLimit] = []
        inputs: dict[tuple[str, int], list[float]] = {}
        for entry, low, high in zip(entries, values[::2], values[1::2], strict=True):
            place = (entry["module"], entry["call"])
            if entry["role"] == "input":
                inputs.setdefault(place, []).extend((low, high))
                continue
            kinds = ranges.kinds_of(low, high)
            own = inputs.get(place, [])
            finite = [number for number in own if math.isfinite(number)]
            bad_input = any([math.isnan(n) or n == math.inf for n in own]) if own else None
            near = None if kinds else ranges.near_limit(getattr(torch, entry["dtype"]), low, high)
            if near is not None:
                limit = torch.finfo(getattr(torch, entry["dtype"])).max
                found.append(NearLimit(module=entry["module"], dtype=entry["dtype"], largest=near, limit=limit))
            elif kinds:
                about = {name: value for name, value in entry.items() if name != "role"}
                span = (min(finite), max(finite)) if finite else None
                call = ModuleCall(**about, kinds=tuple(kinds), input_range=span, input_nonfinite=bad_input)
                found.append(call)
        return found[: 4 * _MAX_BAD]

    return read
