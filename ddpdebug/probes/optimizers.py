"""One optimizer: its parameters with their names, its settings and its state."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ddpdebug import fingerprint, torch_internals as internals
from ddpdebug.isolation.foreign import is_a
from ddpdebug.probes.built import Built
from ddpdebug.probes.ddp_wrapper import Wrapper, slot_of
from ddpdebug.probes.entries import Entries
from ddpdebug.probes.record import Part, StepRecord
from ddpdebug.probes.sharding import Sharding
from ddpdebug.schema.row import Flag

#: Optimizer state up to this many bytes is fingerprinted as a whole, and before the step too, which tells who changed
#: it outside; larger state is split into `STATE_SHARES` shares, of which each checked step takes one in turn.
SMALL_STATE_BYTES = 1 << 20
STATE_SHARES = 8
#: The memory of parameters on the CPU, up to this size, stays after their optimizer has gone, for a last look.
_KEPT_BYTES = 4 << 20
#: Parameters that stand for all in a step that is not checked, where there are more: such a step costs the same
#: whatever the model.
_FEW = 64
#: How the name of a parameter begins that no module has.
_UNNAMED = "parameter["


class Mark(NamedTuple):
    """The marks by which a later look recognises that parameters are still those of a step."""

    step: int
    flags: Flag
    key: tuple[int, ...]  # of the table of parameters
    places: Sequence[tuple[int, int]]
    spots: int | torch.Tensor
    of: tuple[int, ...] | None = None  # the parameters of `places` and `spots` where these are few


@dataclass(slots=True)
class GroupSettings(Part, key="probe:hyper"):
    """The settings of every parameter group at a step, and the learning rate of the first group."""

    groups: Sequence[Mapping[str, Any]] = ()
    lr: float = math.nan

    def columns(self, _: StepRecord) -> dict[str, Any]:
        """Return one digest of all settings, and the learning rate."""
        return {"hyper_digest": fingerprint.of_text(repr(self.groups)) if self.groups else 0, "lr": self.lr}


def _nothing(watch: OptimizerWatch) -> None:
    """Stand in where nothing subscribes."""


class OptimizerWatch:
    """Names, ownership and history of one optimizer's parameters.

    Tables are sorted by name: ranks that registered the same parameters in another order compare like with like.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer | None,
        index: int,
        entries: Entries | None = None,
        on_end: Callable[[OptimizerWatch], None] = _nothing,
    ) -> None:
        self.index = index
        self._built = Built() if entries is None else entries.built
        self.ref: weakref.ref[torch.optim.Optimizer] | None = None
        if optimizer is not None and entries is not None:
            self.ref = entries.when_gone("probe:optimizer", optimizer, self._ended)
        elif optimizer is not None:
            self.ref = weakref.ref(optimizer)
        self.given_up = False  # several threads step its parameters
        #: There is a moment at which the gradients are as they are used, or, of the second, as backward has left them.
        self.has_gradients = self.has_raw_gradients = optimizer is not None
        self._on_end = on_end
        self.step = 0
        self.told = -1  # the newest step that has a row
        self.members: list[weakref.ref[torch.optim.Optimizer]] = []  # optimizers fused into backward
        self.names: list[str] = []
        self.params: list[torch.Tensor] = []
        self.ids: list[int] = []
        self.owned: list[bool] = []
        self.owners: list[Wrapper | None] = []
        #: All four of the above as (name, parameter, owned, owner), replaced as a whole: for the background thread.
        self.table: tuple[tuple[str, torch.Tensor, bool, Wrapper | None], ...] = ()
        self.wrappers: list[Wrapper] = []  # the owners, each once
        self.on_cpu = True
        self.halved = False  # some gradients have 16 bits, and so has the bucket in which DDP reduces them
        self.slots: dict[int, int] = {}  # id -> checksum slot: that of its DDP where one has it
        self.after: list[int] | None = None  # digests that the previous step left, if that step was checked
        self.after_step = -1
        self.state_after: int = 0
        self.state_is_small = True
        self.sharding: Sharding | None = None  # where it steps DTensors
        self.mark: Mark | None = None  # by which a change after the last step is known
        self._members: list[str] = []  # which parameters each group holds, as text
        self._key: tuple[int, ...] = ()
        self._sign: tuple[int, ...] = ()  # what shows at a few parameters whether the groups hold others
        self._without_gradient = 0
        self._forgotten: dict[int, internals.Seen] = {}  # parameters of optimizers that have ended
        self._aliased = False  # `params` are objects of ours over the job's memory

    def _ended(self) -> None:
        self._on_end(self)
        plain = all([type(p) in {torch.Tensor, torch.nn.Parameter} and p.device.type == "cpu" for p in self.params])
        if not plain or sum(_bytes(p) for p in self.params) > _KEPT_BYTES:
            self.forget()
            return
        self._forgotten |= {id(p): internals.Seen(p) for p in self.params}
        self.params = [internals.alias(p) for p in self.params]  # their memory; the job's own objects may die
        self._aliased = True
        rows = zip(self.table, self.params, strict=True)
        self.table = tuple([(name, p, owned, owner) for (name, _, owned, owner), p in rows])

    @property
    def key(self) -> tuple[int, ...]:
        """A key that changes with the table of parameters; empty while there is none."""
        return self._key

    def forget(self) -> None:
        """Drop the parameters once no optimizer has them: watching a model must not keep it alive."""
        if not self.optimizers():
            self._forgotten |= {} if self._aliased else {id(p): internals.Seen(p) for p in self.params}
            self.names, self.params, self.ids, self.owned = [], [], [], []
            self.owners, self.wrappers, self._key, self._sign, self.table = [], [], (), (), ()

    def stepped(self, params: Iterable[torch.Tensor]) -> int:
        """Return how many of the given parameters are or were stepped by this optimizer."""
        current: set[int] = set() if self._aliased else set(self.ids)
        known = self._forgotten
        return len(
            [p for p in params if id(p) in current or ((seen := known.get(id(p))) is not None and seen.is_of(p))]
        )

    def number(self) -> int:
        """Return the number of living parameters that are or were stepped by this optimizer."""
        current: set[int] = set() if self._aliased else set(self.ids)
        return len(current | {key for key, seen in self._forgotten.items() if seen.is_alive()})

    def optimizers(self) -> list[torch.optim.Optimizer]:
        """Return the living optimizers behind this watch."""
        refs = self.members or ([self.ref] if self.ref is not None else [])
        return [o for o in (ref() for ref in refs) if o is not None]

    def groups(self) -> list[dict[str, Any]]:
        """Return all parameter groups."""
        return [group for optimizer in self.optimizers() for group in internals.groups(optimizer)]

    @property
    def is_loose(self) -> bool:
        """Whether no module has one of the parameters."""
        return all([name.startswith(_UNNAMED) for name in self.names])

    def readable(self) -> list[torch.Tensor]:
        """Return the parameters in readable form: for a DTensor that other ranks hold too, this rank's part."""
        return self.params if self.sharding is None else self.sharding.readable(self.params)

    def refresh(self, wrappers: Sequence[Wrapper], *, glance: bool = False) -> bool:
        """Update the tables; return whether they changed. Parameters on DDP's ignore list are left out.

        Args:
            glance: look at the length of each group and at a few of its parameters only.
        """
        groups = self.groups()
        sign = (len(wrappers), *[number for group in groups for number in _sign(group["params"], len(groups))])
        if glance and sign == self._sign:
            return False
        params = [p for group in groups for p in group["params"]]
        key = (len(wrappers), *map(id, params))
        self._sign = sign
        if key == self._key:
            return False
        self._key = key
        self.after = None
        self._aliased = False
        table = sorted(_named(params, wrappers, self._built), key=lambda row: row[0])
        self.table = tuple(table)
        self.names = [name for name, _, _, _ in table]
        self.params = [p for _, p, _, _ in table]
        self.ids = [id(p) for p in self.params]
        self.owned = [owned for _, _, owned, _ in table]
        self.owners = [owner for _, _, _, owner in table]
        self.on_cpu = all([p.device.type == "cpu" for p in self.params])
        self.halved = any([owned and p.element_size() <= 2 for _, p, owned, _ in table])
        self.wrappers = list({id(owner): owner for owner in self.owners if owner is not None}.values())
        # a table has each name once, so that it may call a parameter otherwise than its DDP, whose turns they are
        self.slots = {
            id(p): owner.slots[id(p)] if owner is not None and id(p) in owner.slots else slot_of(name)
            for name, p, _, owner in table
        }
        by_design = bool(self.members) or self.sharded()  # the groups of a rank are then its own
        self._members = [] if by_design else [self._held(group["params"]) for group in self.groups()]
        return True

    def without_gradient(self, *, glance: bool = False) -> int:
        """Return the number of trainable parameters without a gradient.

        Args:
            glance: of many parameters return what was counted last.
        """
        if not glance or len(self.params) <= _FEW:
            self._without_gradient = sum([p.requires_grad and p.grad is None for p in self.params])
        return self._without_gradient

    def _held(self, params: Sequence[torch.Tensor]) -> str:
        """Say which parameters that all ranks have a group holds; others may differ between ranks on purpose."""
        wanted = {id(p) for p in params}
        rows = zip(self.names, self.params, self.owned, strict=True)
        names = [name for name, p, owned in rows if id(p) in wanted and (owned or _is_parted_over_all(name, p))]
        return f"{len(names)} parameters, {fingerprint.of_text(','.join(names)):016x}"

    def sharded(self) -> bool:
        """Return whether the optimizer state is sharded over ranks on purpose."""
        return any([internals.is_sharded(optimizer) for optimizer in self.optimizers()])

    def settings(self) -> GroupSettings:
        """Return the present settings."""
        return GroupSettings(self.hyper(), self.lr())

    def hyper(self) -> list[dict[str, Any]]:
        """Return the settings of every group as plain values, without device tensors, whose reading would wait."""
        groups = self.groups()
        settings = [dict(_settings(group)) for group in groups]
        if len(self._members) == len(groups):
            for own, held in zip(settings, self._members, strict=True):
                own["params"] = held
        return settings

    def lr(self) -> float:
        """Return the learning rate of the first group."""
        groups = self.groups()
        value: Any = groups[0].get("lr") if groups else None
        if is_a(value, torch.Tensor):
            return float(value) if value.device.type == "cpu" else float("nan")
        return float(_plain(value)) if is_a(value, int | float) else float("nan")

    def state(
        self, *, whole: bool = False
    ) -> tuple[list[tuple[str, str]], list[torch.Tensor], list[tuple[str, str, int]]]:
        """Return the state as (name, key) of tensors, the tensors, and (name, key, digest) of plain values.

        Of a large state only this step's share; the shares take turns by the step, so they are the same on every rank.

        Args:
            whole: all of it, however large.
        """
        keys: list[tuple[str, str]] = []
        tensors: list[torch.Tensor] = []
        plain: list[tuple[str, str, int]] = []
        optimizers = self.optimizers()
        share = self.step % STATE_SHARES
        names = self.names if self.sharding is None else self.sharding.names
        for position, (name, p) in enumerate(zip(names, self.params, strict=True)):
            if not (self.state_is_small or whole) and position % STATE_SHARES != share:
                continue
            for optimizer in optimizers:
                held = internals.state(optimizer)
                if p in held:
                    for key, value in _flatten("", held[p]):
                        if is_a(value, torch.Tensor):
                            keys.append((name, key))
                            shared = self.sharding is not None and self.sharding.slots[position] is not None
                            parted = shared and internals.is_distributed(value) and internals.is_distributed(p)
                            laid = parted and internals.is_laid_like(value, p)
                            tensors.append(internals.own_part(value) if laid else value)
                        else:
                            plain.append((name, key, fingerprint.of_text(repr(value))))
        if self.state_is_small and not whole and sum([_bytes(tensor) for tensor in tensors]) > SMALL_STATE_BYTES:
            self.state_is_small = False
            return self.state()
        return keys, tensors, plain


class HandWatch(OptimizerWatch):
    """The parameters of models that the script updates by hand, without a torch optimizer."""

    def __init__(self, index: int, entries: Entries) -> None:
        super().__init__(None, index, entries)
        self._entries = entries
        self._models: list[weakref.ref[torch.nn.Module]] = []

    def take(self, models: Sequence[torch.nn.Module]) -> None:
        """Watch the trainable parameters of these models."""
        me = weakref.ref(self)
        gone = lambda: None if (watch := me()) is None else watch.forget()  # noqa: E731
        self._models = [self._entries.when_gone("probe:by-hand", model, gone) for model in models]

    def groups(self) -> list[dict[str, Any]]:
        """Return one group without settings."""
        models = [model for ref in self._models if (model := ref()) is not None]
        held = {id(p): p for model in models for p in internals.parameters(model) if p.requires_grad}
        return [{"params": list(held.values())}] if held else []

    def forget(self) -> None:
        """Drop the parameters once their models are gone."""
        if all([ref() is None for ref in self._models]):
            super().forget()

    def contents(self) -> int | None:
        """Return a value that changes with an update, from a few bytes of each parameter; None if that would wait."""
        if not self.params or any([p.device.type != "cpu" or not internals.is_plain(p) for p in self.params]):
            return None
        return fingerprint.spots(self.params)


def _sign(params: Sequence[torch.Tensor], groups: int) -> list[int]:
    """Return the number of parameters, and which a few of them are, the first and the last included."""
    size = len(params)
    few = min(size, max(2, _FEW // groups))
    return [size, *[id(params[i * (size - 1) // max(1, few - 1)]) for i in range(few)]]


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _is_parted_over_all(name: str, parameter: torch.Tensor) -> bool:
    return (
        internals.is_distributed(parameter) and not name.startswith(_UNNAMED) and internals.is_over_all_ranks(parameter)
    )


def _settings(group: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for key in sorted(key for key in group if type(key) is str):  # others are notes of the user's, in no order
        value = group[key]
        if key in {"params", "param_names"} or callable(value):
            continue
        if is_a(value, torch.Tensor):
            if value.device.type == "cpu" and value.numel() == 1:
                yield key, value.item()
        elif value is None or is_a(value, bool | int | float | str):
            yield key, _plain(value)
        elif is_a(value, tuple | list) and all([is_a(v, bool | int | float | str) for v in value]):
            yield key, [_plain(v) for v in value]


def _plain(value: Any) -> Any:
    """Return a number or text of a class of the user's as Python's own, without calling its methods."""
    if is_a(value, float) and type(value) is not float:
        return float.__mul__(value, 1.0)
    if is_a(value, int) and type(value) not in {bool, int}:
        return int.__add__(value, 0)
    if is_a(value, str) and type(value) is not str:
        return str.__str__(value)
    return value


def _flatten(prefix: str, value: Any) -> Iterator[tuple[str, Any]]:
    if is_a(value, dict):
        for key in sorted(value, key=str):
            yield from _flatten(f"{prefix}.{key}" if prefix else str(key), value[key])
    elif is_a(value, list | tuple):
        for i, item in enumerate(value):
            yield from _flatten(f"{prefix}[{i}]", item)
    elif value is None or is_a(value, bool | int | float | str | torch.Tensor):
        yield prefix, _plain(value)


def _named(
    params: Sequence[torch.Tensor], wrappers: Sequence[Wrapper], built: Built
) -> Iterator[tuple[str, torch.Tensor, bool, Wrapper | None]]:
    """Yield (name, parameter, owned by a DDP at wrap time, its wrapper)."""
    current: dict[int, tuple[str, Wrapper]] = {}
    ignored: set[int] = set()
    several = len(wrappers) > 1
    for wrapper in wrappers:
        module = wrapper.module()
        if module is None:
            continue
        for name, held in internals.named_parameters(module):
            if name in wrapper.ignored:
                ignored.add(id(held))
            current.setdefault(id(held), (name, wrapper))
    taken: set[str] = set()
    strangers = [p for p in params if id(p) not in current]
    names = built.names(strangers) if strangers else {}
    for position, p in enumerate(params):
        if id(p) in ignored:
            continue
        name, wrapper_or_none = current.get(id(p), (names.get(id(p), f"{_UNNAMED}{position}]"), None))
        if wrapper_or_none is not None and several and name in taken:
            name = f"ddp{wrapper_or_none.index}.{name}"
        while name in taken:
            name += "'"
        taken.add(name)
        owned = wrapper_or_none is not None and id(p) in wrapper_or_none.wrapped
        yield name, p, owned, wrapper_or_none


def index_of(optimizer: torch.optim.Optimizer, watches: Sequence[OptimizerWatch]) -> int:
    """Return the number of a new optimizer: that of the optimizer whose parameters it takes over, or the next one.

    An optimizer that is built again on one rank only is then still compared with the others' of that number.
    """
    params = {id(p): p for p in internals.params(optimizer)}
    for watch in reversed(watches):
        if params and watch.stepped(params.values()) == watch.number() == len(params):
            return watch.index
    return len({watch.index for watch in watches})


def first_step(optimizer: torch.optim.Optimizer, watches: Sequence[OptimizerWatch]) -> int:
    """Return the number of a new optimizer's first step.

    It goes on where the one that it replaces has stopped, and is in the same round as those beside it (GAN).
    """
    params = internals.params(optimizer)
    replaced = [w.step for w in watches if w.stepped(params)]
    return max(replaced, default=max((w.step - 1 for w in watches), default=0))
