"""The ranks that hold the same bytes of a parameter, if an optimizer steps DTensors.

Two ranks share a part of a parameter when they stand at the same coordinates of all dimensions of its mesh along which
it is not replicated. Parameters whose coordinates are alike are one class: its digest in the row covers all of them,
and is compared between the ranks whose key of the class is equal. A dimension that a parameter's mesh lacks, as that
of tensor parallelism for a norm under FSDP, parts nothing; a plain parameter is the same on all ranks, unless it is of
a rank's own experts or is marked as a part.

The stages of a pipeline may have other layers under the same names: there a part is shared with the ranks over which
its own mesh replicates it, and what is plain, of which nobody says who else has it, is not compared. Nor are plain
parameters of no module beside sharded ones: they may be copies of parts, as in the outer optimizer of DiLoCo.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ddpdebug import fingerprint, torch_internals as internals
from ddpdebug.schema.announcements import MeshPlace
from ddpdebug.schema.details import part_name
from ddpdebug.schema.row import CLASS_SLOTS

#: Matrices whose first values are told, and rows of each that are read.
_DRAWN, _ROWS = 4, 16
#: A class that all ranks are in, in words.
_EVERYWHERE = "all ranks"
#: Plain parameters of these names are of a rank's own experts; shared experts are on all ranks.
_EXPERTS = re.compile(r"(^|[._])(?<!shared_)experts?([._]|$)")


@dataclass(frozen=True, slots=True)
class Sharding:
    """The classes of one optimizer's parameters, by position in its table.

    Args:
        slots: of each parameter the place of its class in the row, None where nothing of it is compared here.
        keys: of the classes.
        holders: of each parameter how many ranks hold the same part, 0 where that is not known.
        names: those of the parameters, with the part where other ranks hold other ones.
        place: what is announced of them.
        text: what is compared, and what is not, for people.
    """

    slots: tuple[int | None, ...]
    keys: tuple[int, ...]
    holders: tuple[int, ...]
    names: tuple[str, ...]
    place: MeshPlace
    text: str

    def readable(self, tensors: Sequence[Any]) -> list[Any]:
        """Return the parameters (or one tensor of each) in readable form: a DTensor's shared part in its place."""
        return [
            tensor if slot is None else internals.held_here(tensor)
            for slot, tensor in zip(self.slots, tensors, strict=True)
        ]

    def readable_gradients(self, parameters: Sequence[Any]) -> list[Any]:
        """Return each parameter's gradient in readable form; one with a placement of its own is the rank's alone."""
        found: list[Any] = []
        for slot, parameter in zip(self.slots, parameters, strict=True):
            grad = parameter.grad
            if slot is not None and internals.is_distributed(grad):
                alike = internals.is_distributed(parameter) and internals.is_laid_like(grad, parameter)
                grad = internals.own_part(grad) if alike else grad
            found.append(grad)
        return found

    def alone(self, parameters: Sequence[Any]) -> list[tuple[int, Any]]:
        """Return the gradients of parts that no other rank has, each with the position of its parameter."""
        return [
            (position, internals.own_part(parameter.grad))
            for position, (slot, parameter) in enumerate(zip(self.slots, parameters, strict=True))
            if slot is None and internals.is_distributed(parameter.grad)
            if internals.is_distributed(parameter) and internals.is_laid_like(parameter.grad, parameter)
        ]

    def norms(self, of: Mapping[int, float], present: Iterable[int]) -> dict[str, float]:
        """Return the row's columns of gradient norms, by position; empty if a norm is unknown.

        Args:
            present: positions that have a gradient.
        """
        if any([not self.holders[position] or position not in of for position in present]):
            return {}
        shares = [norm / math.sqrt(self.holders[position]) for position, norm in of.items()]
        return {"part_norm": math.hypot(*of.values()), "share_norm": math.hypot(*shares)}

    def columns(self, kind: str, digests: Sequence[tuple[int, int]]) -> dict[str, int]:
        """Return the row's columns of digests, given with the positions of their parameters."""
        of: dict[int, list[int]] = {}
        for position, digest in digests:
            if (slot := self.slots[position]) is not None:
                of.setdefault(slot, []).append(digest)
        found = {f"class_{slot}_{kind}": fingerprint.combine(own) for slot, own in of.items()}
        return {**found, **{f"class_{slot}_key": key for slot, key in enumerate(self.keys)}}


def uncompared(names: Sequence[str]) -> Sharding:
    """Return what there is to say of parameters of which nobody says who else has them."""
    number = len(names)
    text = "parameters of no module, which may be copies of parts, are not compared"
    nothing = (0,) * number
    return Sharding((None,) * number, keys=(), holders=nothing, names=tuple(names), place=MeshPlace(), text=text)


def sharding_of(
    names: Sequence[str], params: Sequence[Any], owned: Sequence[bool], world: int, *, first: bool = False
) -> Sharding | None:
    """Return the classes of an optimizer's parameters; None if it has no DTensors of its own.

    Args:
        owned: which of them a DDP has, and are compared as its.
        world: number of ranks.
        first: the optimizer has stepped none of them before.
    """
    if not internals.any_distributed(params):
        return None
    layouts: list[internals.Layout | None] = []
    for parameter, is_owned in zip(params, owned, strict=True):
        distributed = not is_owned and internals.is_distributed(parameter)
        layouts.append(internals.layout_of(parameter) if distributed else None)
    if not any(layouts):
        return None
    table = [
        (name, tuple(p.shape), str(p.dtype), layout.text if layout else "")
        for name, p, layout in zip(names, params, layouts, strict=True)
    ]
    model = fingerprint.of_text(repr(table))  # ranks of another model, or of another stage, share nothing with these
    words = [_words(*of) for of in zip(names, params, owned, layouts, strict=True)]
    sizes: dict[str, int] = {}
    for text, layout in zip(words, layouts, strict=True):
        if text is not None:
            sizes[text] = sizes.get(text, 0) + _is_shared(layout, world)
    shared = sorted((text for text, count in sizes.items() if count), key=lambda text: (-sizes[text], text))
    chosen = shared[:CLASS_SLOTS]
    slots = tuple([chosen.index(text) if text in chosen else None for text in words])
    parts = tuple(
        [
            name if slot is None or text is None or text == _EVERYWHERE else part_name(name, text)
            for name, slot, text in zip(names, slots, words, strict=True)
        ]
    )
    holders = tuple(
        [
            _holders(text, parameter, is_owned, layout, world)
            for text, parameter, is_owned, layout in zip(words, params, owned, layouts, strict=True)
        ]
    )
    places = {p.dimension: (p.coordinate, p.size) for layout in layouts if layout is not None for p in layout.places}
    alone = sum(slot is None and text is not None for slot, text in zip(slots, words, strict=True))
    local = sum(text is None and not of_ddp for text, of_ddp in zip(words, owned, strict=True))
    parted = sorted({place.dimension for layout in layouts if layout is not None for place in layout.apart})
    return Sharding(
        slots=slots,
        text=_text(parted, shared=sum(sizes[text] for text in chosen), alone=alone, local=local),
        keys=tuple([fingerprint.of_text(f"{model} {text}") for text in chosen]),
        holders=holders,
        names=parts,
        place=MeshPlace(
            places=places,
            classes={text: sizes[text] for text in chosen},
            alone=alone,
            model=f"{model:016x}",
            staged=internals.has_stages(),
            drawn=_drawn(names, words, params, layouts) if first else {},
        ),
    )


def _drawn(
    names: Sequence[str], words: Sequence[str | None], params: Sequence[Any], layouts: Sequence[internals.Layout | None]
) -> dict[str, str]:
    """Return marks of the first values of the largest matrices that are cut; of those with equal rows there is none.

    On the CPU alone: nothing waits for a device.
    """
    rows = [
        (part_name(name, text), internals.held_here(parameter))
        for name, text, parameter, layout in zip(names, words, params, layouts, strict=True)
        if text is not None and layout is not None and layout.apart and len(layout.shape) > 1
        if not is_of_experts(name)
    ]
    found: dict[str, str] = {}
    for part, held in sorted(rows, key=lambda row: (-row[1].numel(), row[0]))[:_DRAWN]:
        marks = fingerprint.row_fingerprints(held, held.nbytes // max(1, held.shape[0]), _ROWS)
        if len(marks) > 1 and len({*marks}) == len(marks):
            found[part] = f"{fingerprint.combine(marks):016x}"
    return found


def is_of_experts(name: str) -> bool:
    """Return whether a plain parameter or buffer is of a rank's own experts, by its name."""
    return _EXPERTS.search(name) is not None


def _holders(text: str | None, parameter: Any, owned: bool, layout: internals.Layout | None, world: int) -> int:  # noqa: FBT001 - of a table
    """Return how many ranks hold the same part, 0 where that is not known; experts of a rank are its own."""
    if internals.has_stages() or owned or (layout is None and internals.is_distributed(parameter)):
        return 0
    return 1 if text is None else world // _parts(layout)


def _parts(layout: internals.Layout | None) -> int:
    return 1 if layout is None else math.prod(place.size for place in layout.apart)


def _text(parted: Sequence[str], *, shared: int, alone: int, local: int) -> str:
    over = f"parameters are sharded over {' and '.join(parted)}" if parted else "parameters are DTensors"
    if not shared:
        return f"{over}: nothing is replicated; settings, counts, gathers and reductions are compared"
    what = f"{over}: {shared} {'is' if shared == 1 else 'are'} compared between the ranks that hold the same part"
    what += f", {alone} {'has' if alone == 1 else 'have'} no replica" if alone else ""
    return f"{what}, {local} {'is' if local == 1 else 'are'} of single ranks (experts, stages)" if local else what


def _is_shared(layout: internals.Layout | None, world: int) -> bool:
    """Return whether other ranks hold the same part."""
    if layout is None:
        return True
    return bool(layout.replicas) if internals.has_stages() else _parts(layout) < world


def _words(name: str, parameter: Any, owned: bool, layout: internals.Layout | None) -> str | None:  # noqa: FBT001 - of a table
    """Say which part of a parameter a rank holds; None where it is compared otherwise, or cannot be."""
    if owned or (layout is None and internals.is_distributed(parameter)):
        return None
    if layout is None and (internals.has_stages() or internals.is_own(parameter) or is_of_experts(name)):
        return None
    if layout is None or not (layout.apart or layout.replicas):
        return _EVERYWHERE
    parts = [f"{place.dimension} {place.coordinate} of {place.size}" for place in layout.apart]
    return ", ".join([*parts, f"ranks {' '.join(map(str, layout.replicas))}"] if layout.replicas else parts)
