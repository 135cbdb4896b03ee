"""Runs the same steps twice from the same state and finds the first operation whose results differ.

The first comparison runs without anything in between: losses, gradients and parameters after each step. Only where they
differ, the operations are followed: in the first run the fingerprint of each result is noted, in the second the first
one that is another ends the search.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from ddpdebug import torch_internals as internals
from ddpdebug.fingerprint import combine, fingerprint
from ddpdebug.forensics.replay.stack_lines import ends_stack, user_stack
from ddpdebug.isolation.process_state import RandomState
from ddpdebug.nested import tensors_in
from ddpdebug.preflight.capture.copies import copied
from ddpdebug.preflight.sandbox.trials import backward, copy_of_batch, looking
from ddpdebug.preflight.subject import Subject

#: Memory that nobody has written yet: its content is chance.
_UNWRITTEN = ("empty", "new_empty", "resize_")
#: A search that sees no difference is repeated: what depends on threads does not differ each time.
_TRIES = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """The first operation whose results differed between two equal runs."""

    operation: str
    module: str
    backward: bool
    stack: tuple[str, ...]
    instead: str = ""  # the operation of the first run, where the second did another one


class Twice:
    """The experiment of running a subject twice.

    Args:
        state: of the generators, from which every run starts.
    """

    def __init__(self, subject: Subject, state: RandomState) -> None:
        self._subject, self._state = subject, state

    def digests(self, steps: int) -> Iterator[tuple[float, int]]:
        """Yield the loss of each step, with a fingerprint of loss, gradients, parameters and buffers after it."""
        for model, loss in self._run(steps, None):
            tensors = [loss, *model.parameters(), *model.buffers()]
            tensors += [p.grad for p in model.parameters() if p.grad is not None]
            yield float(loss), combine([fingerprint(t.detach()) for t in tensors])

    def search(self, steps: int) -> Difference | None:
        """Return the first operation whose results differ; None if no difference shows in a few tries."""
        for _ in range(_TRIES):
            first = _Follower(None)
            list(self._run(steps, first))
            second = _Follower(first.seen)
            with contextlib.suppress(_Found):
                list(self._run(steps, second))
            if second.difference is not None:
                return second.difference
        return None

    def _run(self, steps: int, follower: _Follower | None) -> Iterator[tuple[torch.nn.Module, torch.Tensor]]:
        self._state.restore()
        model = copied(self._subject.model)
        make = self._subject.optimizer_for
        optimizer = None if make is None else make(model)
        for step in range(steps):
            model.zero_grad(set_to_none=True)
            batch = copy_of_batch(self._subject.batches[step % len(self._subject.batches)])
            with contextlib.nullcontext() if follower is None else follower.on(model):
                loss, _ = self._subject.loss_of(model, batch)
                backward(loss)
                if optimizer is not None:
                    optimizer.step()
            yield model, loss.detach()


ends_stack(Twice._run)  # noqa: SLF001 - our own, above


class _Found(BaseException):  # a user's `except Exception` must not swallow it
    """Ends the second run."""


class _Follower(internals.OperationMode):
    """Fingerprints what operations return; with the list of an earlier run it stops at the first difference."""

    def __init__(self, expected: list[tuple[str, int]] | None) -> None:
        super().__init__()
        self.seen: list[tuple[str, int]] = []
        self.difference: Difference | None = None
        self._expected = expected
        self._modules: list[str] = []
        self._made: dict[int, tuple[str, tuple[str, ...]]] = {}  # module and lines, by the number of the autograd node
        self._last = internals.next_sequence()

    @contextlib.contextmanager
    def on(self, model: torch.nn.Module) -> Iterator[None]:
        """Begin to record operations, and the module whose forward is running."""
        with looking(dict(model.named_modules()), before=self._entered, after=self._left), self:
            yield

    def _entered(self, name: str, *_: Any) -> None:
        self._modules.append(name)

    def _left(self, *_: Any) -> None:
        self._modules.pop()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation, look at what it made."""
        node = internals.current_node()
        if self._expected is not None and node is None:
            self._note_nodes()
        output = func(*args, **(kwargs or {}))
        name = str(func)
        base = internals.schema(func).name.rpartition("::")[2]
        if not base.startswith(_UNWRITTEN) and not func.is_view:
            self._compare(name, _digest(base, output), node)
        return output

    def _note_nodes(self) -> None:
        """Remember where the autograd nodes were made whose operations run later, without a line."""
        sequence = internals.next_sequence()
        if sequence > self._last:
            place = (self._module(), tuple(user_stack()))
            self._made.update(dict.fromkeys(range(self._last, sequence), place))
            self._last = sequence

    def _module(self) -> str:
        return self._modules[-1] if self._modules else ""

    def _compare(self, name: str, digest: int, node: Any) -> None:
        place = len(self.seen)
        self.seen.append((name, digest))
        if self._expected is None or (place < len(self._expected) and self._expected[place] == (name, digest)):
            return
        before = self._expected[place][0] if place < len(self._expected) else "nothing"
        module, stack = self._module(), tuple(user_stack())
        if node is not None:
            module, stack = self._made.get(internals.sequence_of(node), (module, stack))
        self.difference = Difference(
            operation=name,
            module=module,
            backward=node is not None,
            stack=stack,
            instead="" if before == name else before,
        )
        raise _Found


def _digest(base: str, output: Any) -> int:
    """Fingerprint what an operation returned; beside the result of a forward may lie memory for its backward only."""
    tensors = [t for t in tensors_in(output) if t.layout is torch.strided]
    shown = tensors if "backward" in base else tensors[:1]
    return combine([fingerprint(t.detach()) for t in shown])
