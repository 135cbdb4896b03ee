"""The gradients of each optimizer through a step: cleared, accumulated by a backward, used by a step.

Of each optimizer a few parameters stand for all. A gradient is known by its object and its version counter, so nothing
is read from a device; what the counter cannot tell (an old-style `p.grad.data.zero_()`) is looked up in host memory.

Where several threads train, those optimizers are looked at that this thread has stepped and no other has: to read a
gradient that another one clears ends the process (`probes/threads.py`).
"""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from ddpdebug import torch_internals as internals
from ddpdebug.probes.threads import always_alone

_SAMPLE = 4
#: Bytes of a gradient that are looked at first, and in one go after these.
_GLANCE, _CHUNK = 1024, 1 << 16
_ZEROS = bytes(_CHUNK)

#: A gradient's object and version; None without gradient.
Mark = tuple[int, int] | None


class Cleared(NamedTuple):
    """The changes of gradients before a step."""

    carried: bool  # they hold what the step before has used
    gone: bool  # those of the last backward were cleared
    discards: int  # how often others were cleared unused
    written: bool  # something has changed them since the last backward
    mixed: bool = False  # they hold what another loss has left, before another optimizer's step


@dataclass(slots=True)
class Fed:
    """The state of one optimizer's gradients."""

    optimizer: weakref.ref[torch.optim.Optimizer]
    places: Sequence[tuple[int, int]] = ()  # group and position of the parameters that stand for all
    key: int = 0
    marks: list[Mark] = field(default_factory=list)  # after the last backward or step
    stale: bool = False  # they hold what a step has used
    carried: bool = False  # ... and a backward has added to that
    unused: bool = False  # a backward has fed them and no optimizer has stepped since
    versions: list[int | None] = field(default_factory=list)  # of the parameters at that time
    thread: weakref.ref[threading.Thread] | None = None  # in which it has stepped
    line: str | None = None  # that called the backward that fed them last
    foreign: str | None = None  # ... before another optimizer's step
    mixed: bool = False  # a backward of another line has added to that
    discards: int = 0  # times that they were cleared unused, in this step

    def sample(self) -> list[torch.Tensor]:
        """Return a few parameters that stand for all of the optimizer."""
        optimizer = self.optimizer()
        groups = [] if optimizer is None else internals.groups(optimizer)
        key = hash(tuple([(id(group["params"]), len(group["params"])) for group in groups]))
        if key != self.key:
            held = ((g, i, p) for g, group in enumerate(groups) for i, p in enumerate(group["params"]))
            every = [(g, i) for g, i, p in held if p.requires_grad]
            self.places = every[:: max(1, len(every) // _SAMPLE)][:_SAMPLE]
            self.key = key if self.places else 0  # what is switched off for another one's turn comes back
            self.stale = self.carried = self.unused = False
            self.marks = []
        return [groups[g]["params"][i] for g, i in self.places]

    def look(self) -> list[Mark]:
        """Return the present marks of the gradients."""
        found: list[Mark] = []
        for p in self.sample():
            grad = p.grad
            version = None if grad is None else internals.version_of(grad)
            found.append(None if grad is None or version is None else (id(grad), version))
        return found

    def is_zero(self) -> bool:
        """Return whether the gradients are zero, as far as known without waiting for a device."""
        grads = [internals.held_here(grad) for p in self.sample() if (grad := p.grad) is not None]
        if any([grad.device.type != "cpu" or not internals.is_plain(grad) for grad in grads]):
            return False
        # no `map`: a StopIteration of the user's would be taken for the end of the gradients
        for grad in grads:
            if not _is_zero(grad, _GLANCE):
                return False
        for grad in grads:  # noqa: SIM110 - what a trace function raises as Python ends a generator is lost
            if not _is_zero(grad, grad.nbytes):  # rows that are not trained have zeros alone
                return False
        return True


def evaluations(optimizer: torch.optim.Optimizer) -> int:
    """Return how often an optimizer has evaluated its closure; 0 if it does not count that."""
    if type(optimizer) is not torch.optim.LBFGS:
        return 0
    counts = [state.get("func_evals", 0) for state in list(internals.state(optimizer).values())]
    return int(counts[0]) if counts else 0


def _never(_: torch.optim.Optimizer) -> bool:
    return False


class Clearing:
    """The gradients of all optimizers.

    Args:
        alone: tells whether no other thread trains, and sees to it that none begins to meanwhile.
        is_given_up: tells of an optimizer whether other threads step its parameters too.
    """

    def __init__(
        self,
        alone: Callable[[], AbstractContextManager[bool]] = always_alone,
        is_given_up: Callable[[torch.optim.Optimizer], bool] = _never,
    ) -> None:
        self._fed: dict[int, Fed] = {}
        self._alone, self._is_given_up = alone, is_given_up

    def of(self, optimizer: torch.optim.Optimizer) -> Fed:
        """Return the state of an optimizer's gradients; usable in any thread, as no gradient is read."""
        known = self._fed.get(id(optimizer))
        if known is None or known.optimizer() is not optimizer:
            known = self._fed[id(optimizer)] = Fed(weakref.ref(optimizer))
        return known

    def number(self) -> int:
        """Return the number of living optimizers."""
        return len(self._living())

    def begin_backward(self) -> None:
        """Detect gradients that were cleared since the last backward or step."""
        with self._alone() as alone:
            for fed in self._readable(alone=alone):
                now = fed.look()
                cleared = now != fed.marks or not any(now)
                if fed.stale and (cleared or fed.is_zero()):
                    fed.stale = fed.carried = False
                if fed.foreign is not None and (cleared or fed.is_zero()):
                    fed.foreign, fed.mixed = None, False
                if fed.unused and cleared and (not any(now) or fed.is_zero()):
                    fed.discards += fed.versions == _versions(fed)
                    fed.unused = False
                fed.marks = now

    def end_backward(self, line: str | None = None) -> None:
        """Detect gradients that received values in the backward called by `line`."""
        with self._alone() as alone:
            for fed in self._readable(alone=alone):
                now = fed.look()
                if now != fed.marks:
                    fed.carried = fed.carried or fed.stale
                    fed.mixed = fed.mixed or fed.foreign not in {None, line}
                    fed.line = line
                    fed.unused, fed.versions = not fed.is_zero(), _versions(fed)
                fed.marks = now

    def used(self, optimizer: torch.optim.Optimizer) -> None:
        """Note that an optimizer has used its gradients within its step, and calls its closure for new ones."""
        fed = self.of(optimizer)
        fed.stale = fed.stale or any(fed.marks)

    def carries(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return whether a backward has added to gradients that the optimizer has already used."""
        fed = self.of(optimizer)
        return fed.carried and fed.stale

    def before_step(self, optimizer: torch.optim.Optimizer) -> Cleared:
        """Return the changes of an optimizer's gradients since its last step, before its next one."""
        fed = self.of(optimizer)
        with self._alone() as alone:
            seen = fed.key and (alone or self._is_own(fed))
        now = fed.look()
        if not seen:
            fed.marks, fed.carried, fed.unused, fed.mixed = now, False, False, False
        if fed.thread is None or fed.thread() is not threading.current_thread():
            fed.thread = weakref.ref(threading.current_thread())
        gone = fed.unused and now != fed.marks and (not any(now) or fed.is_zero()) and fed.versions == _versions(fed)
        written = now != fed.marks
        return Cleared(fed.carried and fed.stale and not gone, gone, fed.discards, written, fed.mixed and not gone)

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Note that a step has used the gradients."""
        for other in self._living():  # nothing of theirs is read
            other.foreign = other.line if other.unused and other.foreign is None else other.foreign
            other.unused = False
        fed = self.of(optimizer)
        fed.foreign, fed.mixed = None, False
        fed.marks, fed.versions = fed.look(), _versions(fed)
        fed.stale, fed.carried, fed.discards = any(fed.marks), False, 0

    def writes(self, params: Collection[int]) -> set[int]:
        """Return how often each of these parameters was written since its optimizer's step; sampled ones only.

        Args:
            params: by their ids.
        """
        known = [
            (p, v) for fed in self._living() if fed.stale for p, v in zip(fed.sample(), fed.versions, strict=False)
        ]
        return {(internals.version_of(p) or 0) - v for p, v in known if v is not None and id(p) in params}

    def _readable(self, *, alone: bool) -> list[Fed]:
        """Return those whose gradients may be read now."""
        return [fed for fed in self._living() if alone or self._is_own(fed)]

    def _is_own(self, fed: Fed) -> bool:
        """Return whether this thread alone trains an optimizer."""
        if fed.thread is None or fed.thread() is not threading.current_thread():
            return False
        optimizer = fed.optimizer()
        return optimizer is not None and not self._is_given_up(optimizer)

    def _living(self) -> list[Fed]:
        known = list(self._fed.items())  # another thread may build an optimizer meanwhile
        for key, fed in known:
            if fed.optimizer() is None and self._fed.get(key) is fed:
                del self._fed[key]
        return [fed for _, fed in known if fed.optimizer() is not None]


def _is_zero(grad: torch.Tensor, size: int) -> bool:
    """Return whether the first and the last `size` bytes are 0 or -0: by memory, one call where torch takes five."""
    dense = grad.is_contiguous() or grad.is_contiguous(memory_format=torch.channels_last)
    if not (grad.is_floating_point() and dense) or type(grad) is not torch.Tensor or not grad.data_ptr():
        return not bool(grad.detach().flatten()[: size // grad.itemsize].any())
    begin, end = grad.data_ptr(), grad.data_ptr() + grad.nbytes
    if grad.nbytes + grad.storage_offset() * grad.itemsize > grad.untyped_storage().nbytes():  # it was freed
        return True
    for first in {begin, max(begin, end - size)}:
        for at in range(first, min(first + size, end), _CHUNK):
            piece = ctypes.string_at(at, min(_CHUNK, first + size - at, end - at))
            if piece != _ZEROS[: len(piece)] and piece.strip(b"\0\x80"):
                return False
    return True


def _versions(fed: Fed) -> list[int | None]:
    return [internals.version_of(p) for p in fed.sample()]
