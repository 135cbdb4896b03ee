"""The owners of parameters: models, optimizers, the graph. Examined in a few early steps, and where gradients end."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from difflib import get_close_matches
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from ddpdebug import torch_internals as internals
from ddpdebug.isolation.foreign import attributes_of, is_a
from ddpdebug.probes.built import Built
from ddpdebug.probes.ddp_wrapper import Wrapper
from ddpdebug.probes.plain_models import PlainModel
from ddpdebug.schema.announcements import FrozenParameters, MissingParameters
from ddpdebug.torch_internals.graph import leaf_of, saved_tensor

#: Steps of a stage's optimizer in which is looked: at both things, at who holds what again, at what is frozen again.
FIRST, AGAIN, LATER = 1, 3, 32
_MAX_NAMES = 20
#: How alike a name is to the one that was meant, of 1; with one or two slips it is so much at least.
_SLIP = 0.85
_MAX_NODES = 20_000
_MAX_DEPTH = 2
#: A model ends in an output layer of so many matrices, with at most this share of the elements of all; more is a
#: decoder, a discriminator, a body.
_MAX_OUTPUT_LAYERS, _MAX_OUTPUT_SHARE = 2, 0.3
_MAX_LAST_NODES = 64


class Audit:
    """The optimizers of the process, and the results of the audits."""

    def __init__(self, built: Built) -> None:
        self._all = built
        self._held: dict[int, int] = {}  # id of an optimizer -> elements that were trainable when it was built
        self._marked: dict[int, tuple[internals.Seen, int | None]] = {}
        self._trained: dict[int, internals.Seen] = {}  # by optimizers of earlier stages
        self._followed: dict[int, internals.Seen] = {}  # what the optimizer of this stage held at its beginning
        self._frozen = 0.0
        self._norms = 0
        self._output = OutputLayer()
        self._deserted: int | None = None  # the first step of this stage in which no parameter had a gradient

    def begin(self) -> None:
        """Begin another stage of training, which may leave out parameters that an earlier one trained."""
        self._trained.update((key, seen) for key, seen in self._followed.items() if seen.is_alive())
        self._marked, self._followed, self._frozen, self._norms, self._deserted = {}, {}, 0.0, 0, None
        self._output = OutputLayer()

    def built(self, optimizer: torch.optim.Optimizer) -> None:
        """Record the parameters that a new optimizer trains."""
        self._all.optimizer(optimizer)
        self._held[id(optimizer)] = _elements(p for p in _params([optimizer]) if p.requires_grad)

    def held(self) -> set[int]:
        """Return the ids of the parameters that an optimizer has."""
        return held_by(self._all.optimizers)

    def at_step(
        self, step: int, optimizer: torch.optim.Optimizer, wrappers: Sequence[Wrapper | PlainModel]
    ) -> MissingParameters | FrozenParameters | None:
        """Audit the parameters before an optimizer step; return the announcement that is due, if any."""
        if step == 0:
            self._followed = {id(p): internals.Seen(p) for p in _params(self._all.optimizers)}
        if step == FIRST:
            self._mark(wrappers)
            self._frozen, self._norms = self._frozen_share(optimizer), _only_norms(optimizer, wrappers)
            if attribute := _said_frozen(wrappers):
                return FrozenParameters(step=step, share=0.0, attribute=attribute)
        if step == AGAIN:
            return self._still_missing(step, wrappers)
        if step == LATER:
            return self._still_frozen(step, optimizer, wrappers)
        return self._replaced(step, wrappers) if step > AGAIN and _is_deserted(optimizer) else None

    def _replaced(self, step: int, wrappers: Sequence[Wrapper | PlainModel]) -> MissingParameters | None:
        """Look again once none of the optimizer's parameters has a gradient: others may stand in their places."""
        if self._deserted is None:
            self._deserted = step
            self._mark(wrappers)
        elif step >= self._deserted + AGAIN - FIRST and self._marked:
            found = self._still_missing(self._deserted, wrappers)
            self._marked = {}
            return found if found is not None and found.orphans else None
        return None

    def _mark(self, wrappers: Sequence[Wrapper | PlainModel]) -> None:
        self._marked = {id(p): (internals.Seen(p), internals.version_of(p)) for _, p in self._missing(wrappers)}

    def output(self, root: nn.Module, outputs: Sequence[torch.Tensor]) -> None:
        """Examine the layer that made a model's output, in a training forward, before its graph is freed."""
        self._output.look(root, outputs)

    def _still_frozen(
        self, step: int, optimizer: torch.optim.Optimizer, wrappers: Sequence[Wrapper | PlainModel]
    ) -> FrozenParameters | None:
        share = self._frozen_share(optimizer) if self._frozen > 0 else 0.0
        norms = _only_norms(optimizer, wrappers) if self._norms else 0
        others = held_by(known for known in self._all.optimizers if known is not optimizer)
        output = self._output.still_frozen(others)
        if not (share > 0 or norms or output):
            return None
        return FrozenParameters(step=step, share=share, first=self._frozen, norms=norms, output=output)

    def lacking(self, wrapper: Wrapper | PlainModel) -> list[torch.Tensor]:
        """Return the parameters of a model that optimizers hold and that have no gradient."""
        held = self.held()
        return [p for _, p in _named(wrapper) if id(p) in held and p.requires_grad and p.grad is None]

    def _still_missing(self, step: int, wrappers: Sequence[Wrapper | PlainModel]) -> MissingParameters | None:
        """Return what no optimizer holds and nobody has written since it was first looked at."""

        def untouched(p: torch.Tensor) -> bool:
            seen, version = self._marked.get(id(p), (None, None))
            return seen is not None and seen.is_of(p) and version is not None and internals.version_of(p) == version

        missing = [(name, p) for name, p in self._missing(wrappers) if untouched(p)]
        if not missing:
            return None
        owned = [p for wrapper in wrappers for _, p in _named(wrapper) if p.requires_grad]
        return MissingParameters(
            step=step,
            missing=tuple([name for name, _ in missing])[:_MAX_NAMES],
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
                if id(p) in held or name in wrapper.ignored or not p.requires_grad or p.grad is None:
                    continue
                if (seen := self._trained.get(id(p))) is None or not seen.is_of(p):
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


class OutputLayer:
    """Finds a frozen output layer in a model whose earlier layers train.

    Adapters, prompts and probes leave most weights frozen; a frozen decoder or discriminator is more than one layer; an
    output layer that shares its weight with a frozen embedding is no layer of its own.
    """

    def __init__(self) -> None:
        self._root: weakref.ref[nn.Module] | None = None
        self._found: list[tuple[str, int, int | None]] = []  # name, number and version

    def look(self, root: nn.Module, outputs: Sequence[torch.Tensor]) -> None:
        """Examine one forward with gradients."""
        weights = {p.data_ptr(): p for _, p in _weights(root)}
        frozen = {key: p for key, p in weights.items() if not p.requires_grad}
        size = _elements(frozen.values())
        if not frozen or len(frozen) > _MAX_OUTPUT_LAYERS or size > _MAX_OUTPUT_SHARE * _elements(weights.values()):
            return
        last = [weights[key] for key in _last_weights(outputs) if key in weights]
        if last and not any([p.requires_grad for p in last]):
            names = [(n, p) for n, p in internals.named_parameters(root) if any([p is own for own in frozen.values()])]
            self._root = weakref.ref(root)
            self._found = [(name, id(p), internals.version_of(p)) for name, p in names]

    def still_frozen(self, trained: set[int]) -> tuple[str, ...]:
        """Return the layer's parameters if they were not written or unfrozen since, and no other optimizer has them."""
        root = None if self._root is None else self._root()
        now = {} if root is None else dict(internals.named_parameters(root))
        same = all(
            [
                (p := now.get(name)) is not None
                and id(p) == key
                and not p.requires_grad
                and internals.version_of(p) == version
                and key not in trained
                for name, key, version in self._found
            ]
        )
        return tuple([name for name, _, _ in self._found]) if same else ()


def _weights(root: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the matrices of a model that mix their inputs: what is looked up, or used in two places, is none."""
    places = Counter(id(p) for _, p in internals.named_parameters(root, remove_duplicate=False))
    for path, module in internals.named_modules(root):
        if isinstance(module, nn.Embedding | nn.EmbeddingBag):
            continue
        for p in internals.own_parameters(module):
            if p.dim() > 1 and places[id(p)] == 1 and not is_lazy(p):
                yield path, p


def _last_weights(outputs: Sequence[torch.Tensor]) -> Iterator[int]:
    """Yield the addresses of the weights that outputs were computed with last."""
    waiting = [t.grad_fn for t in outputs if t.grad_fn is not None]
    seen: set[Any] = set()
    while waiting and len(seen) < _MAX_LAST_NODES:
        node = waiting.pop(0)
        if node in seen:
            continue
        seen.add(node)
        weight = next(iter([t for name in ("mat2", "weight") if (t := saved_tensor(node, name)) is not None]), None)
        if weight is not None and weight.dim() > 1:
            yield weight.data_ptr()
        else:
            waiting += [below for below, _ in node.next_functions if below is not None]


def _only_norms(optimizer: torch.optim.Optimizer, wrappers: Sequence[Wrapper | PlainModel]) -> int:
    """Return how many parameters an optimizer trains, if all belong to normalisation layers, and not all there are."""
    norms: set[int] = set()
    others = 0
    for module in (m for wrapper in wrappers if (m := wrapper.module()) is not None):
        for part in internals.modules(module):
            own = [p for p in internals.own_parameters(part) if not is_lazy(p)]
            if "Norm" in type(part).__name__:
                norms.update(map(id, own))
            else:
                others += sum(p.dim() > 1 and not p.requires_grad for p in own)
    trained = [p for p in _params([optimizer]) if p.requires_grad]
    return len(trained) if trained and others > 1 and all([id(p) in norms for p in trained]) else 0


def _said_frozen(wrappers: Sequence[Wrapper | PlainModel]) -> tuple[str, ...]:
    """Name what trains and has got an attribute that torch does not read: of a module, or with a slip in its name."""
    found: list[str] = []
    for module in (m for wrapper in wrappers if (m := wrapper.module()) is not None):
        for name, part in internals.named_modules(module):
            if _is_set(part, "requires_grad") and any([_trains(p) for p in internals.parameters(part)]):
                found.append(name or "the model")
        found += [name for name, p in internals.named_parameters(module) if _is_set(p) and _trains(p)]
    return tuple(found[:_MAX_NAMES])


def _trains(parameter: torch.Tensor) -> bool:
    return parameter.requires_grad and parameter.grad is not None


def _is_set(owner: Any, *more: str) -> bool:
    """Return whether an attribute of a name is false; without one, a name with a slip in `requires_grad`."""
    names = [name for name, value in attributes_of(owner).items() if value is False]
    if more:
        return any([name in more for name in names])
    near = [name for name in names if name.count("_") == 1 and not name.startswith("_")]
    return get_close_matches("requires_grad", near, 1, _SLIP) != []


def unregistered(
    output: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], root: nn.Module, known: set[int]
) -> list[str]:
    """Return the names of parameters behind a model's output that belong to no model and no optimizer."""
    # numbers are used again: nodes must live while they are known by theirs
    kept: list[Any] = [t.grad_fn for t in inputs if t.grad_fn is not None]
    seen = {id(node) for node in kept}
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


def _is_deserted(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether no parameter of an optimizer has a gradient; in each step, which ends at the first that has."""
    for p in internals.params(optimizer):  # noqa: SIM110 - as a generator it would be the collector's to count
        if p.grad is not None:
            return False
    return True


def held_by(optimizers: Iterable[torch.optim.Optimizer]) -> set[int]:
    """Return the ids of the parameters of optimizers."""
    return {id(p) for p in _params(optimizers)}


def _place(root: nn.Module, leaf: torch.Tensor) -> str:
    """Say in which plain container of which module a parameter hides."""
    for path, module in [*internals.named_modules(root)]:
        for name, value in vars(module).items():
            if name.startswith("_"):
                continue
            for inner, part in [*_inside(value, 0)]:
                if is_a(part, nn.Module):
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
        yield from internals.params(optimizer)


def _elements(params: Iterable[torch.Tensor]) -> int:
    return sum(p.numel() for p in params if not is_lazy(p))  # lazy ones have no shape yet
