"""Properties of DTensors and FSDP2, read without importing `torch.distributed.tensor` if the job has not.

Its properties alone: `to_local` would make an edge of the graph, or a view, which the job's dispatch modes see.
"""

from __future__ import annotations

import inspect
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from types import ModuleType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ddpdebug.torch_internals.names import (
    FSDP_COLLECTIVES,
    FSDP_GATHER,
    FSDP_GROUP,
    FSDP_REDUCE,
    FSDP_STATE,
    inherits,
)
from ddpdebug.torch_internals.trees import modules

_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})
_KINDS = ("DTensor",)


class Place(NamedTuple):
    """The coordinate of this rank in one dimension of a mesh."""

    dimension: str
    coordinate: int
    size: int


class Layout(NamedTuple):
    """The placement of a tensor on its mesh, without mesh dimensions of size 1."""

    apart: tuple[Place, ...]  # dimensions along which ranks hold different elements, by name
    places: tuple[Place, ...]  # all dimensions, in the mesh's order
    shape: tuple[int, ...]  # of the whole tensor
    text: str  # of its placements
    replicas: tuple[int, ...] = ()  # in a pipeline: the ranks of the one dimension over which it is replicated


def is_distributed(tensor: object) -> bool:
    """Whether a tensor is a DTensor."""
    kind = type(tensor)
    return kind not in _PLAIN and inherits(kind, _KINDS)


def any_distributed(tensors: Iterable[object]) -> bool:
    """Whether some of the tensors are DTensors; costs one set if none are."""
    kinds = {*map(type, tensors)} - _PLAIN
    return any([inherits(kind, _KINDS) for kind in kinds])


def layout_of(tensor: Any) -> Layout | None:
    """Return the placement of a DTensor on its mesh; None if this rank is not in the mesh."""
    mesh, placements = tensor.device_mesh, tensor.placements
    coordinates = mesh.get_coordinate()
    if coordinates is None:
        return None
    names = mesh.mesh_dim_names or tuple([f"dimension {i}" for i in range(mesh.ndim)])
    places = [Place(str(names[i]), int(coordinates[i]), int(mesh.size(i))) for i in range(mesh.ndim)]
    apart = [place for place, placed in zip(places, placements, strict=True) if not placed.is_replicate()]
    over = [i for i, placed in enumerate(placements) if placed.is_replicate() and places[i].size > 1]
    known = has_stages() and len(over) == 1
    return Layout(
        apart=tuple(sorted(place for place in apart if place.size > 1)),
        places=tuple([place for place in places if place.size > 1]),
        shape=tuple(tensor.shape),
        text=repr(tuple(placements)),
        replicas=tuple(dist.get_process_group_ranks(mesh.get_group(over[0]))) if known else (),
    )


def own_part(tensor: Any) -> torch.Tensor:
    """Return the elements of a DTensor that this rank holds, without a copy and without a graph."""
    inner = [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]
    return next(iter([value for value in inner if isinstance(value, torch.Tensor)]))


def held_here(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor itself; of a DTensor the elements that this rank holds."""
    known = is_distributed(tensor) and hasattr(tensor, "__tensor_flatten__")  # others have classes of that name too
    return own_part(tensor) if known else tensor


def is_laid_like(tensor: Any, other: Any) -> bool:
    """Whether two DTensors have the same mesh and placements, so that ranks share both or neither."""
    return bool(tensor.placements == other.placements and tensor.device_mesh == other.device_mesh)


def is_whole(tensor: Any) -> bool:
    """Whether every rank of a DTensor's mesh holds all of it."""
    return all([placed.is_replicate() for placed in tensor.placements])


def is_over_all_ranks(tensor: Any) -> bool:
    """Whether the mesh of a DTensor has all ranks of the job, so that each of them holds and steps a part."""
    return bool(dist.is_initialized() and tensor.device_mesh.size() == dist.get_world_size())


def ranks_of_averages(models: Iterable[torch.nn.Module]) -> tuple[tuple[int, ...], set[tuple[int, ...]]]:
    """Return the ranks over which FSDP2 averages the gradients of most of its parts; none without FSDP2.

    With them come the groups along the dimensions of their mesh, of which HSDP has two.
    """
    if "torch.distributed.fsdp" not in sys.modules:
        return (), set()
    meshes: Counter[tuple[int, ...]] = Counter()
    along: dict[tuple[int, ...], set[tuple[int, ...]]] = {}
    for module in [part for model in models for part in modules(model) if inherits(type(part), ("FSDPModule",))]:
        with suppress(ValueError):  # a part with several groups of parameters: others say enough
            group = getattr(getattr(module, FSDP_STATE)(), FSDP_GROUP)
            if group is not None:  # the part has no parameters of its own
                places = group.mesh_info.mesh.mesh
                ranks = tuple(sorted(places.flatten().tolist()))
                meshes[ranks] += 1
                for dim in range(places.dim()):
                    rows = places.movedim(dim, -1).reshape(-1, places.shape[dim]).tolist()
                    along.setdefault(ranks, set()).update([tuple(sorted(row)) for row in rows if len(row) < len(ranks)])
    most = max(meshes, key=lambda ranks: (meshes[ranks], len(ranks)), default=())
    return most, along.get(most, set())


class Reduction(NamedTuple):
    """The gradients of one FSDP2 part as their reduction over `ranks` ranks begins."""

    parameters: Sequence[Any]  # the sharded ones
    gradients: Sequence[torch.Tensor]  # this rank's, whole
    rows: Sequence[int]  # of each gradient how many of its first dimension go to each rank; 0: they are cut otherwise
    pieces: int  # ranks that get a piece each
    place: int  # of this rank among them
    ranks: int
    divisor: float  # of their sum
    is_half: bool  # on the way gradients have 16 bits
    is_custom: bool  # what communicates is not torch's own
    kept: Sequence[tuple[Any, torch.Tensor, torch.Tensor]]  # parameters that stay gathered: own piece, and own part
    is_whole: bool = True  # all that was added up is what comes of it
    is_apart: bool = False  # replicas wait for a later backward to add up theirs


class Gathering(NamedTuple):
    """The parameters of one FSDP2 part as gathered from `ranks`."""

    parameters: Sequence[Any]  # the sharded ones
    gathered: Sequence[torch.Tensor]  # of each, all pieces one after the other
    holders: Sequence[Any]  # what FSDP2 keeps of each, for `waits`
    ranks: tuple[int, ...]


def fsdp_reductions() -> tuple[ModuleType, str] | None:
    """Return module and name of FSDP2's function that reduces gradients; None if it is not loaded."""
    return _of_fsdp(FSDP_REDUCE)


def fsdp_gathers() -> tuple[ModuleType, str] | None:
    """Return module and name of FSDP2's function that lays out gathered parameters; None if it is not loaded."""
    return _of_fsdp(FSDP_GATHER)


def _of_fsdp(name: str) -> tuple[ModuleType, str] | None:
    home = sys.modules.get(FSDP_COLLECTIVES)
    return None if home is None or not hasattr(home, name) else (home, name)


def _arguments(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    return inspect.signature(getattr(sys.modules[FSDP_COLLECTIVES], name)).bind(*args, **kwargs).arguments


def gathering_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Gathering:
    """Return the gathering from the arguments of FSDP2's layout function, after it has returned."""
    given = _arguments(FSDP_GATHER, args, kwargs)
    parameters = [parameter for parameter in given["fsdp_params"] if len(parameter.all_gather_outputs) == 1]
    return Gathering(
        parameters=[parameter.sharded_param for parameter in parameters],
        gathered=[parameter.all_gather_outputs[0] for parameter in parameters],
        holders=parameters,
        ranks=tuple(dist.get_process_group_ranks(given["group"])),
    )


def waits(holder: Any) -> bool:
    """Whether a gathered parameter has a gradient from a backward that was not reduced."""
    whole = getattr(holder, "unsharded_param", None)
    return holder.unsharded_accumulated_grad is not None or (whole is not None and whole.grad is not None)


def _kept(parameter: Any, pieces: int, place: int) -> tuple[Any, torch.Tensor, torch.Tensor] | None:
    """Return of a parameter that stays gathered what it was gathered as of this rank's part, and the part; or None."""
    gathered, part = parameter.all_gather_outputs, held_here(parameter.sharded_param)
    if parameter.sharded_state.name != "UNSHARDED" or len(gathered) != 1 or parameter.fsdp_placement.dim:
        return None
    if not pieces or gathered[0].numel() % pieces or type(part) not in _PLAIN or part.device != gathered[0].device:
        return None
    piece = gathered[0].detach().view(pieces, -1)[place, : part.numel()]
    return parameter.sharded_param, piece, part.detach().reshape(-1).to(piece.dtype)


def reduction_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Reduction | None:
    """Return the reduction from the arguments of FSDP2's reduce function; None if there is nothing to reduce."""
    given = _arguments(FSDP_REDUCE, args, kwargs)
    scatter, gather, grads = given["reduce_scatter_group"], given["all_reduce_group"], [*given["unsharded_grads"]]
    if not grads:
        return None
    apart = gather is not None and not given["all_reduce_grads"]
    pieces = 1 if scatter is None else scatter.size()
    ranks = pieces * (1 if gather is None else gather.size())
    factor = given["gradient_divide_factor"]
    by_rows = [parameter.fsdp_placement.dim == 0 for parameter in given["fsdp_params"]]
    place = 0 if scatter is None else scatter.rank()
    return Reduction(
        parameters=[parameter.sharded_param for parameter in given["fsdp_params"]],
        gradients=grads,
        rows=[-(-g.shape[0] // pieces) if first and g.dim() else 0 for first, g in zip(by_rows, grads, strict=True)],
        pieces=pieces,
        place=place,
        ranks=ranks,
        divisor=float(ranks if factor is None else factor),
        is_half=(given["reduce_dtype"] or grads[0].dtype) not in {torch.float32, torch.float64},
        is_custom=not type(given["reduce_scatter_comm"]).__module__.startswith("torch."),
        is_whole=not apart and (gather is None or given["partial_reduce_output"] is None),
        is_apart=apart,
        kept=[found for p in given["fsdp_params"] if (found := _kept(p, pieces, place)) is not None],
    )


def has_stages() -> bool:
    """Whether the job may be a pipeline, whose ranks hold different layers under the same names."""
    return "torch.distributed.pipelining" in sys.modules


def is_own(parameter: torch.Tensor) -> bool:
    """Whether a plain parameter carries the attributes by which Megatron-LM and others mark a rank's own part."""
    return getattr(parameter, "allreduce", None) is False or getattr(parameter, "tensor_model_parallel", None) is True
