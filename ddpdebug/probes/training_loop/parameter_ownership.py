"""Who holds which parameter: the models, the optimizers, the graph. Looked at in a few early steps only."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from ddpdebug import torch_internals as internals
from ddpdebug.probes.built import Built
from ddpdebug.probes.ddp_wrapper import Wrapper
from ddpdebug.probes.plain_models import PlainModel
from ddpdebug.schema.announcements import FrozenParameters, MissingParameters
from ddpdebug.torch_internals.graph import leaf_of

#: Steps of the first optimizer in which is looked: at both things, at who holds what again, at what is frozen again.
FIRST, AGAIN, LATER = 1, 3, 32
_MAX_NAMES = 20
_MAX_NODES = 20_000
_MAX_DEPTH = 2


class Audit:
    """The optimizers of the process, and what the audits have seen."""

    def __init__(self, built: Built) -> None:
        self._all = built
        self._held: dict[int, int] = {}  # id of an optimizer -> elements that were trainable when it was built
        self._marked: dict[int, tuple[weakref.ref[torch.Tensor], int | None]] = {}
        self._frozen = 0.0

    def built(self, optimizer: torch.optim.Optimizer) -> None:
        """Note what a new optimizer trains."""
        self._all.optimizer(optimizer)
        self._held[id(optimizer)] = _elements(p for p in _params([optimizer]) if p.requires_grad)

    def held(self) -> set[int]:
        """Return the ids of the parameters that an optimizer has."""
        return held_by(self._all.optimizers)

    def at_step(
        self, step: int, optimizer: torch.optim.Optimizer, wrappers: Sequence[Wrapper | PlainModel]
    ) -> MissingParameters | FrozenParameters | None:
        """Look around before a step of an optimizer; return what is to be announced."""
        if step == FIRST:
            self._marked = {id(p): (weakref.ref(p), internals.version_of(p)) for _, p in self._missing(wrappers)}
            self._frozen = self._frozen_share(optimizer)
        if step == AGAIN:
            return self._still_missing(step, wrappers)
        if step == LATER and self._frozen > 0 and (share := self._frozen_share(optimizer)) > 0:
            return FrozenParameters(step=step, share=share, first=self._frozen)
        return None

    def lacking(self, wrapper: Wrapper | PlainModel) -> list[torch.Tensor]:
        """Return the parameters of a model that optimizers hold and that have no gradient."""
        held = self.held()
        return [p for _, p in _named(wrapper) if id(p) in held and p.requires_grad and p.grad is None]

    def _still_missing(self, step: int, wrappers: Sequence[Wrapper | PlainModel]) -> MissingParameters | None:
        """Return what no optimizer holds and nobody has written since it was first looked at."""

        def untouched(p: torch.Tensor) -> bool:
            ref, version = self._marked.get(id(p), (None, None))
            return ref is not None and ref() is p and version is not None and internals.version_of(p) == version

        missing = [(name, p) for name, p in self._missing(wrappers) if untouched(p)]
        if not missing:
            return None
        owned = [p for wrapper in wrappers for _, p in _named(wrapper) if p.requires_grad]
        return MissingParameters(
            step=step,
            missing=tuple(name for name, _ in missing)[:_MAX_NAMES],
            number=len(missing),
            share=_elements(p for _, p in missing) / max(1, _elements(owned)),
            orphans=tuple(self._orphans(wrappers)[:_MAX_NAMES]),
        )

    def _missing(self, wrappers: Sequence[Wrapper | PlainModel]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the parameters that get gradients and that no known optimizer holds."""
        held = self.held()
        for wrapper in wrappers:
            prefix = f"{wrapper.prefix}." if len(wrappers) > 1 else ""
            for name, p in _named(wrapper):
                if id(p) not in held and p.requires_grad and p.grad is not None and name not in wrapper.ignored:
                    yield prefix + name, p

    def _orphans(self, wrappers: Sequence[Wrapper | PlainModel]) -> list[str]:
        """Name parameters of optimizers that never got a gradient and that no model has."""
        names = {key: name for wrapper in wrappers for key, name in wrapper.wrapped.items()}
        owned = {id(p) for wrapper in wrappers for _, p in _named(wrapper)}
        lost = [p for p in _params(self._all.optimizers) if p.requires_grad and p.grad is None and id(p) not in owned]
        return [names.get(id(p), f"a parameter of shape {tuple(p.shape)}") for p in lost]

    def _frozen_share(self, optimizer: torch.optim.Optimizer) -> float:
        """Return how much of what an optimizer was built to train is frozen as it steps; 0 where it is not known."""
        before = self._held.get(id(optimizer), 0)
        return 1 - _elements(p for p in _params([optimizer]) if p.requires_grad) / before if before else 0.0


def unregistered(
    output: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], root: nn.Module, known: set[int]
) -> list[str]:
    """Name the parameters that a model's output was computed with and that no model and no optimizer has."""
    seen = {id(t.grad_fn) for t in inputs if t.grad_fn is not None}
    kept: list[Any] = []  # numbers are used again: nodes must live while they are known by theirs
    waiting = [t.grad_fn for t in output if t.grad_fn is not None]
    found: list[torch.Tensor] = []
    while waiting and len(kept) < _MAX_NODES:
        node = waiting.pop()
        if id(node) in seen:
            continue
        seen.add(id(node))
        kept.append(node)
        waiting += [below for below, _ in node.next_functions if below is not None]
        leaf = leaf_of(node)
        if isinstance(leaf, nn.Parameter) and id(leaf) not in known:
            found.append(leaf)
    return sorted(_place(root, leaf) for leaf in found)[:_MAX_NAMES]


def held_by(optimizers: Iterable[torch.optim.Optimizer]) -> set[int]:
    """Return the ids of the parameters of optimizers."""
    return {id(p) for p in _params(optimizers)}


def _place(root: nn.Module, leaf: torch.Tensor) -> str:
    """Say in which plain container of which module a parameter hides."""
    for path, module in internals.named_modules(root):
        for name, value in vars(module).items():
            if name.startswith("_"):
                continue
            for inner, part in _inside(value, 0):
                if isinstance(part, nn.Module):
                    names = [n for n, p in internals.named_parameters(part) if p is leaf]
                elif part is leaf:
                    names = [""]
                else:
                    continue
                if names:
                    whole = f"{name}{inner}.{names[0]}".removesuffix(".")
                    return f"{path}.{whole}" if path else whole
    return f"a parameter of shape {tuple(leaf.shape)}"


def _inside(value: Any, depth: int) -> Iterator[tuple[str, Any]]:
    if type(value) in {list, tuple} and depth < _MAX_DEPTH:
        for i, item in enumerate(value):
            yield from ((f"[{i}]{path}", part) for path, part in _inside(item, depth + 1))
    elif type(value) is dict and depth < _MAX_DEPTH:
        for key, item in value.items():
            yield from ((f"[{key!r}]{path}", part) for path, part in _inside(item, depth + 1))
    else:
        yield "", value


def _named(wrapper: Wrapper | PlainModel) -> Iterable[tuple[str, torch.Tensor]]:
    module = wrapper.module()
    return () if module is None else internals.named_parameters(module)


def _params(optimizers: Iterable[torch.optim.Optimizer]) -> Iterator[torch.Tensor]:
    for optimizer in optimizers:
        groups: Sequence[Mapping[str, Any]] = getattr(optimizer, "param_groups", ())
        for group in groups:
            yield from group["params"]


def _elements(params: Iterable[torch.Tensor]) -> int:
    return sum(p.numel() for p in params if not is_lazy(p))  # lazy ones have no shape yet
