"""Measures whether several ranks train like one process on the same global batch (SYNC209).

A factory `build() -> model, loss_fn, batch` says what is trained:

- `model`: a module, or a `DistributedDataParallel` of it when the user's own wrapping is to be tested;
- `loss_fn(model, batch)`: returns the loss; or does a whole step up to the optimizer (backward, accumulation,
  clipping) and returns None;
- `batch`: the global batch, of tensors whose first dimension counts samples, in lists, tuples or dicts; or an object
  with a method `shard(rank, world)`.

A factory with a parameter, `build(mesh)`, shards the model itself and returns this rank's part of the batch. Both
may return a fourth thing: the optimizer, whose updates are then compared; else it is plain SGD.

Each rank runs it from the same seed: alone in a world of one process (`mesh` has one rank in each dimension then), and
with the others. What a rank holds is a part of what one process holds; which one follows from the placements of a
DTensor, or from the values at the start (`shard_places.py`).

**The tolerance.** Both runs compute the same numbers in exact arithmetic and add in another order. What that may change
is measured: one process trains twice more, with parameters and inputs that differ by one rounding of the coarsest type
that takes part, and a gradient, update or output may be as far apart as `_FACTOR` times the largest change that this
has made of it, or of one rounding of the largest element of all. Unlike a bound by the lengths of sums, it knows how
the model carries small errors on. The measurement runs in float64 where the model allows it, so that the tolerance is
far below every real mistake.
"""

from __future__ import annotations

import inspect
import math
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddpdebug import torch_internals as internals
from ddpdebug.ci.shard_places import Place, is_block_of, places_in
from ddpdebug.errors import UsageError
from ddpdebug.isolation.process_state import preserved
from ddpdebug.nested import mapped, tensors_in
from ddpdebug.schema.announcements import Equivalence
from ddpdebug.schema.finding import Finding

Build = Callable[..., tuple[Any, ...]]

_SEED = 20_031
_LR = 0.01
_FACTOR = 8
_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
#: Where rounding alone may differ by so much of the largest element, nothing can be told.
_TOO_COARSE = 0.5
#: Of what differs, so many are looked at for sums over the ranks.
_MAX_SUMMED = 16


@dataclass(slots=True)
class Trajectory:
    """The record of one run: initial parameters, outputs of the first step, and gradients and updates of each step."""

    start: dict[str, Tensor] = field(default_factory=dict)
    outputs: dict[str, Tensor] = field(default_factory=dict)  # in the order in which the modules are done
    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    updates: list[dict[str, Tensor]] = field(default_factory=list)
    coarsest: torch.dtype = torch.float64  # of the floating types that took part
    batch_norm: bool = False
    mesh: dict[str, tuple[int, int]] = field(default_factory=dict)  # dimension -> coordinate and size

    def tables(self) -> Iterator[tuple[int, str, dict[str, Tensor]]]:
        """Yield the tables to compare, each with its step and its kind."""
        yield 0, "initial parameter", self.start
        for step, tables in enumerate(zip(self.gradients, self.updates, strict=True)):
            yield from ((step, what, table) for what, table in zip(("gradient", "update"), tables, strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The settings of the runs: steps, device, precision, mesh."""

    steps: int
    device: torch.device
    double: bool = True
    freeze_batch_norm: bool = False
    mesh: Mapping[str, int] = field(default_factory=lambda: {"dp": -1})  # -1: all ranks
    nudge: float = 0.0  # relative change of parameters and inputs at the start
    nudge_seed: int = 0


@dataclass(frozen=True, slots=True)
class One:
    """The single-process run, and runs that show how far rounding moves it."""

    run: Trajectory
    nudged: tuple[Trajectory, ...]

    def limits(self) -> Iterator[tuple[int, str, dict[str, Tensor], dict[str, float], float]]:
        """Yield the single-process tables, each with the limit of each tensor and the largest element."""
        unit = torch.finfo(self.run.coarsest).eps
        own = max(torch.finfo(t.dtype).eps * float(t.abs().max()) for t in self.run.start.values() if t.numel())
        for (step, what, table), *others in zip(*(run.tables() for run in (self.run, *self.nudged)), strict=True):
            scale = max((float(t.abs().max()) for t in table.values() if t.numel()), default=0.0)
            if not math.isfinite(scale):
                raise UsageError(
                    f"the {what}s of one process on the whole batch are not finite; nothing can be compared"
                )
            if what == "gradient" and not table:
                raise UsageError("after a step of one process no parameter has a gradient")
            floor = max(unit * scale, own) if what == "update" else unit * scale
            limits = {
                name: _FACTOR * max([floor, *(_apart(tensor, other[2].get(name)) for other in others)])
                for name, tensor in table.items()
            }
            yield step, what, table, limits, scale


def measure(
    build: Build, *, steps: int = 3, device: torch.device | None = None, mesh: Mapping[str, int] | None = None
) -> Equivalence:
    """Compare the ranks of the default group with one process; return what this rank announces for SYNC209.

    While a rank runs alone, its process is a world of its own for all that runs in it. So this is for the ranks that
    `ddpdebug equivalence` starts and for tests, never for a process that trains.

    Args:
        mesh: dimension -> size of what a factory with a parameter gets; by default one dimension `dp`.

    Raises:
        UsageError: the factory cannot be compared, with the reason; or this is no process for it.
    """
    if not internals.is_claimed():
        raise UsageError(
            "equivalence makes its process a world of one for a moment, which a training process must not be; run "
            "`ddpdebug equivalence file.py:build`, or use the assertion in a test of pytest"
        )
    if not dist.is_initialized() or dist.get_world_size() < 2:
        raise UsageError("equivalence needs a process group of at least 2 ranks")
    plan = Plan(steps=steps, device=device or torch.device("cpu"))
    plan = replace(plan, mesh=mesh) if mesh else plan
    rank, world = dist.get_rank(), dist.get_world_size()
    with internals.alone() as group, preserved():

        def alone(plan: Plan) -> One:
            with internals.as_world(group):
                run = _run(build, plan, 0, 1)
                unit = torch.finfo(run.coarsest).eps
                return One(run, tuple(_run(build, replace(plan, nudge=unit, nudge_seed=i), 0, 1) for i in (1, 2)))

        try:
            one = alone(plan)
        except RuntimeError as error:
            if "dtype" not in str(error) and "Double" not in str(error):
                raise
            plan = replace(plan, double=False)  # something in it insists on its precision
            one = alone(plan)
        facts = _compare(one, _run(build, plan, rank, world), world)
        if _anywhere(facts) and one.run.batch_norm:  # is it that, or is there more?
            plan = replace(plan, freeze_batch_norm=True)
            frozen = _compare(alone(plan), _run(build, plan, rank, world), world)
            known, facts = ("differ", frozen) if _anywhere(frozen) else ("agree", facts)
            facts = replace(facts, batch_norm=True, without_batch_norm=known)
        if facts.off and not _takes_mesh(build):
            with internals.as_world(group):
                facts = replace(facts, shards=_shards(build, plan, world, one))
    return facts


def measure_job(build: Build, *, steps: int, device: torch.device, mesh: Mapping[str, int] | None) -> list[Finding]:
    """Initialise the process group of a launched job, and judge the measurements of all ranks."""
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    facts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(facts, measure(build, steps=steps, device=device, mesh=mesh))
    return judge(dict(enumerate(facts)))


# --- one run ----------------------------------------------------------------------------------------------------------


def _takes_mesh(build: Build) -> bool:
    return bool(inspect.signature(build).parameters)


def _anywhere(facts: Equivalence) -> bool:
    """Return whether something is off on some rank; all ranks ask."""
    told: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(told, bool(facts.off))
    return any(told)


def _run(build: Build, plan: Plan, rank: int, world: int) -> Trajectory:
    """Train for some steps as `rank` of the default group."""
    model, loss_fn, own, optimizer = _built(build, plan, rank, world)
    trained = model if _takes_mesh(build) or _is_parallel(model) else _wrapped(model, plan)
    module: nn.Module = trained.module if isinstance(trained, DistributedDataParallel) else trained
    seen = Trajectory(batch_norm=any(isinstance(m, _BATCH_NORMS) and m.training for m in module.modules()))
    seen.mesh = _mesh_of(module, plan if _takes_mesh(build) else None)
    optimizer = optimizer or torch.optim.SGD([p for p in module.parameters() if p.requires_grad], lr=_LR)
    seen.start = before = _copies(module.named_parameters())
    if plan.nudge:
        own = _nudge(module, own, plan)
        before = _copies(module.named_parameters())
    for step in range(plan.steps):
        random_state = torch.get_rng_state()
        with _watch_types(seen), _watch_outputs(module, {} if step else seen.outputs):
            loss = loss_fn(trained, own)
            if loss is not None:
                _check_loss(loss)
                loss.backward()
        if step == 0 and not torch.equal(random_state, torch.get_rng_state()):
            raise UsageError(
                "the step draws random numbers (dropout in a function, noise, sampling), so that two runs differ "
                "anyway; make `build` return a model and a loss without"
            )
        seen.gradients.append(_copies((n, p.grad) for n, p in module.named_parameters()))
        optimizer.step()
        optimizer.zero_grad()
        module.zero_grad()
        after = _copies(module.named_parameters())
        seen.updates.append({name: tensor - before[name] for name, tensor in after.items()})
        before = after
    return seen


def _built(
    build: Build, plan: Plan, rank: int, world: int
) -> tuple[nn.Module, Callable[..., Any], Any, torch.optim.Optimizer | None]:
    """Call the factory from the same seed each time, and take away what would make two runs differ."""
    torch.manual_seed(_SEED)
    random.seed(_SEED)
    torch.set_default_dtype(torch.float64 if plan.double else torch.float32)
    made = build(_mesh_for(plan, world)) if _takes_mesh(build) else build()
    known = isinstance(made, tuple) and len(made) in {3, 4} and isinstance(made[0], nn.Module) and callable(made[1])
    if not known or not all(isinstance(last, torch.optim.Optimizer) for last in made[3:]):
        raise UsageError(f"the factory must return (model, loss_fn, batch), not {type(made).__name__}")
    model, loss_fn, batch, optimizer = made if len(made) == 4 else (*made, None)
    if not any(p.requires_grad for p in model.parameters()):
        raise UsageError("the model of the factory has no trainable parameter")
    for module in model.modules():
        if isinstance(module, _DROPOUTS):
            module.p = 0.0
        elif isinstance(getattr(module, "dropout", None), float):
            vars(module)["dropout"] = 0.0  # attention and recurrent layers
        if plan.freeze_batch_norm and isinstance(module, _BATCH_NORMS):
            module.eval()
    double = torch.float64 if plan.double and not isinstance(model, DistributedDataParallel) else None
    if not (isinstance(model, DistributedDataParallel) or _takes_mesh(build) or optimizer or _is_parallel(model)):
        model.to(plan.device)
        if double:
            model.double()
    own = batch if _takes_mesh(build) else _own_part(batch, rank, world)
    moved = _moved(own, lambda t: t.to(plan.device, double if t.is_floating_point() else None))
    return model, loss_fn, moved, optimizer


def _is_parallel(model: nn.Module) -> bool:
    return internals.any_distributed(model.parameters())


def _mesh_for(plan: Plan, world: int) -> Any:
    sizes = [size if size > 0 else world for size in plan.mesh.values()] if world > 1 else [1] * len(plan.mesh)
    return cast("Any", dist).init_device_mesh(plan.device.type, tuple(sizes), mesh_dim_names=tuple(plan.mesh))


def _mesh_of(module: nn.Module, plan: Plan | None) -> dict[str, tuple[int, int]]:
    """Return where this rank stands on the dimensions of the mesh that the factory got and of those of its DTensors."""
    found: dict[str, tuple[int, int]] = {}
    world, left = dist.get_world_size(), dist.get_world_size()
    if plan is not None and world > 1:
        for name, given in plan.mesh.items():
            size = given if given > 0 else world
            left //= size
            found[name] = (dist.get_rank() // left % size, size)
    for parameter in module.parameters():
        layout = internals.layout_of(parameter) if internals.is_distributed(parameter) else None
        for at in layout.places if layout else ():
            found.setdefault(at.dimension, (at.coordinate, at.size))
    return found


def _nudge(module: nn.Module, batch: Any, plan: Plan) -> Any:
    """Change parameters and inputs by a rounding."""
    draws = torch.Generator().manual_seed(plan.nudge_seed)

    def changed(tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point():
            return tensor
        by = torch.rand(tensor.shape, generator=draws, dtype=torch.float64) * 2 - 1
        return (tensor.double() * (1 + plan.nudge * by.to(tensor.device))).to(tensor.dtype)

    with torch.no_grad():
        for parameter in module.parameters():
            own = internals.held_here(parameter)
            own.copy_(changed(own))
        return _moved(batch, changed)


def _wrapped(model: nn.Module, plan: Plan) -> DistributedDataParallel:
    """Return the model in DDP; the user's own wrapping stays."""
    if isinstance(model, DistributedDataParallel):
        return model
    devices = [plan.device] if plan.device.type != "cpu" else None
    return DistributedDataParallel(model, device_ids=devices, find_unused_parameters=True)


def _check_loss(loss: Any) -> None:
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        kind = f"a tensor of shape {list(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise UsageError(f"loss_fn must return a scalar tensor, or None after its own backward, not {kind}")


def _shards(build: Build, plan: Plan, world: int, one: One) -> str | None:
    """Return whether the average of the parts' losses, in one process, is the loss of the whole batch."""
    found: dict[str, Tensor] = {}
    for rank in range(world):
        model, loss_fn, part, _ = _built(build, plan, rank, world)
        trained = model if _is_parallel(model) else _wrapped(model, plan)
        loss = loss_fn(trained, part)
        if loss is None:
            return None
        (loss / world).backward()
        module = trained.module if isinstance(trained, DistributedDataParallel) else trained
        for name, grad in _copies((n, p.grad) for n, p in module.named_parameters()).items():
            found[name] = found[name] + grad if name in found else grad
    _, _, alone, limits, scale = next(entry for entry in one.limits() if entry[1] == "gradient")
    return "ranks" if _beyond(alone, found, limits, scale) else "batch"


def _own_part(batch: Any, rank: int, world: int) -> Any:
    if hasattr(batch, "shard"):
        return batch.shard(rank, world)
    sizes = {tensor.shape[0] for tensor in tensors_in(batch) if tensor.dim()}
    if len(sizes) != 1:
        raise UsageError(
            f"the tensors of the batch must have the same first dimension, the samples; they have {sorted(sizes)}. A "
            "batch of another kind can split itself: give it a method shard(rank, world)"
        )
    (size,) = sizes
    if size % world:
        raise UsageError(f"a batch of {size} cannot be split into {world} equal parts; make it a multiple of {world}")
    part = slice(rank * size // world, (rank + 1) * size // world)
    return _moved(batch, lambda tensor: tensor[part] if tensor.dim() else tensor)


def _moved(batch: Any, change: Callable[[Tensor], Tensor]) -> Any:
    return mapped(batch, lambda item: change(item) if isinstance(item, Tensor) else item, kinds=True)


def _copies(tensors: Iterable[tuple[str, Tensor | None]]) -> dict[str, Tensor]:
    """Return tensors as they are now, whole: shards are put together, where all ranks that hold some have theirs."""
    found: dict[str, Any] = {name: tensor.detach() for name, tensor in tensors if tensor is not None}
    sharded = {name for name, tensor in found.items() if internals.is_distributed(tensor)}
    if dist.get_world_size() > 1:
        told: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(told, {name: found[name].device_mesh.mesh.flatten().tolist() for name in sharded})
        for name in {*sharded}:
            if any(told[rank].get(name) is None for rank in told[dist.get_rank()][name]):
                sharded.discard(name)  # a gradient that some ranks lack, whose parts nobody can ask for
                del found[name]
    return {
        name: (tensor.full_tensor() if name in sharded else tensor).double().cpu().clone()
        for name, tensor in found.items()
    }


@contextmanager
def _watch_outputs(model: nn.Module, seen: dict[str, Tensor]) -> Iterator[None]:
    """Keep the first output of each module, as this rank holds it."""

    def done(name: str) -> Callable[[nn.Module, Any, Any], None]:
        def keep(_: nn.Module, __: Any, output: Any) -> None:
            first: Any = next(iter(tensors_in(output)), None)
            if name in seen or first is None or not first.is_floating_point():
                return
            if internals.is_distributed(first):
                if any(placed.is_partial() for placed in first.placements):
                    return
                first = internals.own_part(first)
            seen[name] = first.detach().double().cpu().clone()

        return keep

    handles = [module.register_forward_hook(done(name)) for name, module in model.named_modules() if name]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _watch_types(seen: Trajectory) -> Iterator[None]:
    """Note the coarsest floating type among what is saved for backward."""

    def pack(tensor: Tensor) -> Tensor:
        if tensor.is_floating_point() and torch.finfo(tensor.dtype).eps > torch.finfo(seen.coarsest).eps:
            seen.coarsest = tensor.dtype
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield


# --- the comparison ---------------------------------------------------------------------------------------------------


def _apart(a: Tensor, b: Tensor | None) -> float:
    return 0.0 if b is None or not a.numel() else float((a - b).abs().max())


def _compare(one: One, many: Trajectory, world: int) -> Equivalence:
    """Return what SYNC209 is given: the first step in which the two runs are further apart than rounding explains."""
    alone = one.run
    dtype = max(alone.coarsest, many.coarsest, key=lambda kind: torch.finfo(kind).eps)
    name = str(dtype).removeprefix("torch.")
    facts = Equivalence(world=world, dtype=name, batch_norm=alone.batch_norm, mesh=many.mesh)
    places = places_in(alone.start, many.start)
    held: list[Any] = [None] * world
    dist.all_gather_object(held, {place.name for place in places.values()})
    lost = {name: (0.0, 0.0, 1.0) for name in alone.start if not any(name in names for names in held)}
    if lost:
        return replace(facts, quantity="parameter", step=0, compared=len(alone.start), bound=0.0, off=lost)
    for (step, what, table, limits, scale), (_, _, own) in zip(one.limits(), many.tables(), strict=True):
        limit = max(limits.values(), default=0.0) / scale if scale else 0.0
        if limit > _TOO_COARSE:
            raise UsageError(
                f"the model computes in {facts.dtype}, where rounding alone explains differences of "
                f"{100 * limit:.0f} % of the {what}s; build it without autocast, in float32 or float64"
            )
        parts = {name: place.of(table[place.name]) for name, place in places.items() if place.name in table}
        allowed = {name: limits[places[name].name] for name in parts}
        off = _beyond(parts, own, allowed, scale)
        facts = replace(facts, bound=limit, compared=len(table), quantity=what)
        told: list[Any] = [None] * world
        dist.all_gather_object(told, sorted(off))
        if any(told):
            adds_up = _sums(parts, own, allowed, places, many.mesh) if what == "gradient" else {}
            renamed = {name for name, place in places.items() if place.name != name}
            output = _first_output(one, many, renamed) if what == "gradient" else None
            named = {places[name].name if name in places else name: entry for name, entry in off.items()}
            return replace(facts, step=step if off else None, off=named, adds_up=adds_up, output=output)
    return facts


def _beyond(
    alone: Mapping[str, Tensor], together: Mapping[str, Tensor], limits: Mapping[str, float], scale: float
) -> dict[str, tuple[float, float, float]]:
    """Return name -> ratio, rest, difference of what is further apart than its limit; that is relative to `scale`."""
    off = {}
    for name in {**alone, **together}:
        some = alone.get(name, together.get(name))
        assert some is not None
        a, b = (table.get(name, torch.zeros_like(some)) for table in (alone, together))
        difference = _apart(b, a)
        if difference > limits.get(name, 0.0) or not math.isfinite(difference):
            ratio = float((a * b).sum() / (a * a).sum()) if bool(a.any()) else math.inf
            rest = float((b - ratio * a).norm() / b.norm()) if math.isfinite(ratio) and bool(b.any()) else 0.0
            off[name] = (ratio, rest, difference / scale if scale else math.inf)
    return off


def _sums(
    alone: Mapping[str, Tensor],
    own: Mapping[str, Tensor],
    limits: Mapping[str, float],
    places: Mapping[str, Place],
    mesh: Mapping[str, tuple[int, int]],
) -> dict[str, str]:
    """Return whose gradients differ over a dimension and are, added up or averaged over it, those of one process."""
    off = [name for name in alone if name in own and _apart(own[name], alone[name]) > limits[name]][:_MAX_SUMMED]
    told: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(told, (dict(mesh), {places[name]: own[name] for name in off}))
    found: dict[str, str] = {}
    for name in off:
        for dimension in mesh or ("all ranks",):
            rest = {key: at for key, at in mesh.items() if key != dimension}
            parts = [
                gradients[places[name]]
                for where, gradients in told
                if places[name] in gradients and {key: at for key, at in where.items() if key != dimension} == rest
            ]
            if len(parts) < 2 or all(_apart(part, parts[0]) <= limits[name] for part in parts):
                continue
            total = torch.stack(parts).sum(0)
            for word, number in (("sum", 1), ("mean", len(parts))):
                if _apart(total / number, alone[name]) <= len(parts) * limits[name]:
                    found[places[name].name] = f"{word} over {dimension}"
    return found


def _first_output(one: One, many: Trajectory, renamed: Iterable[str]) -> tuple[int, str] | None:
    """Return the first module whose output is nowhere in that of one process, with its place in the order."""
    unit = torch.finfo(one.run.coarsest).eps
    for number, (name, output) in enumerate(one.run.outputs.items()):
        own = many.outputs.get(name)
        if own is None or not output.dim() or any(other.startswith(f"{name}.") for other in renamed):
            continue
        moved = [_apart(output, run.outputs[name]) for run in one.nudged if name in run.outputs]
        limit = _FACTOR * max([unit * float(output.abs().max()) if output.numel() else 0.0, *moved])
        if is_block_of(own, output, limit) is False:
            return number, name
    return None


def judge(facts: Mapping[int, Equivalence]) -> list[Finding]:
    """Return a SYNC209 finding if the ranks' measurements differ from the single-process run."""
    from ddpdebug.detectors.sync.sync209_not_equivalent import NotEquivalent  # noqa: PLC0415 - one rule, not the package

    return list(NotEquivalent().compare("equivalence", facts))
