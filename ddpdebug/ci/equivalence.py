"""Measures whether several ranks train like one process on the same global batch (SYNC209).

A factory `build() -> model, loss_fn, batch` says what is trained:

- `model`: a module, or a `DistributedDataParallel` of it when the user's own wrapping is to be tested;
- `loss_fn(model, batch)`: returns the loss; or does a whole step up to the optimizer (backward, accumulation,
  clipping) and returns None;
- `batch`: the global batch, of tensors whose first dimension counts samples, in lists, tuples or dicts; or an object
  with a method `shard(rank, world)`.

Each rank runs it twice from the same seed: alone in a world of one process on the whole batch, and with the others on
its part. Between the steps plain SGD moves the parameters.

**The bound.** Both runs compute the same numbers in exact arithmetic and add in another order, so they may differ by
rounding alone. A sum of `n` terms has, with a probability of at least 1 - 2 exp(-k*k / 2), a relative error of at most
`k * sqrt(n) * u` against the sum of the terms' magnitudes, where `u` is half the machine epsilon (Higham and Mary,
SIAM J. Sci. Comput. 41, 2019, theorem 2.4, to first order). A gradient is the end of a chain of `d` such sums, forward
and backward, whose errors add in the same way: `sqrt(d)`. With two runs, and the errors of the `t` earlier steps in the
parameters, two gradients of step `t` may differ by

    2 * k * (t + 1) * sqrt(d * n) * u * (largest element of the gradient of one process)

with k = 8 (a false alarm in 1e13), `n` the longest sum (elements of the largest tensor of the batch, or of a
parameter's slice) and `d` twice the number of parameter tensors. So that this is far below every real mistake, the
measurement runs in float64 where the model allows it: for a model of 50 tensors and sums of 4096 terms it is 1e-12. The
coarsest floating type that takes part is looked at (a loss may go through float32) and gives `u`.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddpdebug import torch_internals as internals
from ddpdebug.errors import UsageError
from ddpdebug.isolation.process_state import preserved
from ddpdebug.nested import mapped, tensors_in
from ddpdebug.schema.announcements import Equivalence
from ddpdebug.schema.finding import Finding

Build = Callable[[], tuple[nn.Module, Callable[..., Any], Any]]

_SEED = 20_031
_LR = 0.01
_CONFIDENCE = 8.0
_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
#: Where rounding alone may differ by so much, nothing can be told.
_TOO_COARSE = 0.05


@dataclass(slots=True)
class Trajectory:
    """What one run leaves behind: by step, the gradients before and the parameters after it."""

    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    parameters: list[dict[str, Tensor]] = field(default_factory=list)
    coarsest: torch.dtype = torch.float64  # of the floating types that took part
    longest_sum: int = 1
    batch_norm: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How to run."""

    steps: int
    device: torch.device
    double: bool = True
    freeze_batch_norm: bool = False


def measure(build: Build, *, steps: int = 3, device: torch.device | None = None) -> Equivalence:
    """Compare the ranks of the default group with one process; return what this rank tells SYNC209.

    While a rank runs alone, its process is a world of its own for all that runs in it. So this is for the ranks that
    `ddpdebug equivalence` starts and for tests, never for a process that trains.

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
    rank, world = dist.get_rank(), dist.get_world_size()
    with internals.alone() as group, preserved():
        with internals.as_world(group):
            try:
                one = _run(build, plan, 0, 1)
            except RuntimeError as error:
                if "dtype" not in str(error) and "Double" not in str(error):
                    raise
                plan = replace(plan, double=False)  # something in it insists on its precision
                one = _run(build, plan, 0, 1)
        facts = _compare(one, _run(build, plan, rank, world), world)
        if facts.off and one.batch_norm:  # is it that, or is there more?
            plan = replace(plan, freeze_batch_norm=True)
            with internals.as_world(group):
                one = _run(build, plan, 0, 1)
            frozen = _compare(one, _run(build, plan, rank, world), world)
            known, facts = ("differ", frozen) if frozen.off else ("agree", facts)
            facts = replace(facts, batch_norm=True, without_batch_norm=known)
        if facts.off:
            with internals.as_world(group):
                facts = replace(facts, shards=_shards(build, plan, world, one))
    return facts


def measure_job(build: Build, *, steps: int, device: torch.device) -> list[Finding]:
    """Form the group of a job whose ranks a launcher has started, and judge what all of them measure."""
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    facts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(facts, measure(build, steps=steps, device=device))
    return judge(dict(enumerate(facts)))


# --- one run ----------------------------------------------------------------------------------------------------------


def _run(build: Build, plan: Plan, rank: int, world: int) -> Trajectory:
    """Train for some steps as `rank` of the default group."""
    model, loss_fn, batch = _built(build, plan)
    own = _own_part(batch, rank, world)
    trained = _wrapped(model, plan)
    module: nn.Module = trained.module
    seen = Trajectory(batch_norm=any(isinstance(m, _BATCH_NORMS) and m.training for m in module.modules()))
    seen.longest_sum = _longest_sum(module, batch)
    optimizer = torch.optim.SGD([p for p in module.parameters() if p.requires_grad], lr=_LR)
    for step in range(plan.steps):
        before = torch.get_rng_state()
        with _watch_types(seen):
            loss = loss_fn(trained, own)
            if loss is not None:
                _check_loss(loss)
                loss.backward()
        if step == 0 and not torch.equal(before, torch.get_rng_state()):
            raise UsageError(
                "the step draws random numbers (dropout in a function, noise, sampling), so that two runs differ "
                "anyway; make `build` return a model and a loss without"
            )
        seen.gradients.append(_copies((n, p.grad) for n, p in module.named_parameters()))
        optimizer.step()
        optimizer.zero_grad()
        seen.parameters.append(_copies(module.named_parameters()))
    return seen


def _built(build: Build, plan: Plan) -> tuple[nn.Module, Callable[..., Any], Any]:
    """Call the factory from the same seed each time, and take away what would make two runs differ."""
    torch.manual_seed(_SEED)
    random.seed(_SEED)
    torch.set_default_dtype(torch.float64 if plan.double else torch.float32)
    made = build()
    if not (isinstance(made, tuple) and len(made) == 3 and isinstance(made[0], nn.Module) and callable(made[1])):
        raise UsageError(f"the factory must return (model, loss_fn, batch), not {type(made).__name__}")
    model, loss_fn, batch = made
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
    if not isinstance(model, DistributedDataParallel):
        model.to(plan.device)
        if double:
            model.double()
    moved = _moved(batch, lambda t: t.to(plan.device, double if t.is_floating_point() else None))
    return model, loss_fn, moved


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


def _shards(build: Build, plan: Plan, world: int, one: Trajectory) -> str | None:
    """Tell whether the average of the parts' losses, in one process, is the loss of the whole batch."""
    model, loss_fn, batch = _built(build, plan)
    trained = _wrapped(model, plan)
    module: nn.Module = trained.module
    for rank in range(world):
        loss = loss_fn(trained, _own_part(batch, rank, world))
        if loss is None:
            return None
        (loss / world).backward()
    parts = Trajectory([_copies((n, p.grad) for n, p in module.named_parameters())], [], one.coarsest, one.longest_sum)
    alone = Trajectory(one.gradients[:1], [], one.coarsest, one.longest_sum)
    return "ranks" if _compare(alone, parts, world).off else "batch"


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


def _copies(tensors: Iterator[tuple[str, Tensor | None]]) -> dict[str, Tensor]:
    return {name: tensor.detach().double().cpu().clone() for name, tensor in tensors if tensor is not None}


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


def _longest_sum(module: nn.Module, batch: Any) -> int:
    shapes = [p.shape for p in module.parameters() if p.dim()]
    slices = [max(shape[0], math.prod(shape[1:])) for shape in shapes]
    return max([1, *slices, *(t.numel() for t in tensors_in(batch))])


def bound(tensors: int, longest_sum: int, step: int, dtype: torch.dtype) -> float:
    """Return how far two gradients of step `step` may be apart by rounding alone, relative to the largest element."""
    unit = torch.finfo(dtype).eps / 2
    return 2 * _CONFIDENCE * (step + 1) * math.sqrt(2 * tensors * longest_sum) * unit


def _compare(one: Trajectory, many: Trajectory, world: int) -> Equivalence:
    """Return what SYNC209 is told: the first step in which the two runs are further apart than rounding explains."""
    dtype = max(one.coarsest, many.coarsest, key=lambda kind: torch.finfo(kind).eps)
    facts = Equivalence(world=world, dtype=str(dtype).removeprefix("torch."), batch_norm=one.batch_norm)
    for step in range(len(one.gradients)):
        pairs = [("gradient", one.gradients[step], many.gradients[step])]
        if step < len(one.parameters):
            pairs.append(("parameter", one.parameters[step], many.parameters[step]))
        for quantity, alone, together in pairs:
            names = {**alone, **together}
            limit = bound(max(1, len(names)), one.longest_sum, step, dtype)
            if limit > _TOO_COARSE:
                raise UsageError(
                    f"the model computes in {facts.dtype}, where rounding alone explains differences of "
                    f"{100 * limit:.0f} %; build it without autocast, in float32 or float64"
                )
            facts = replace(facts, bound=limit, compared=len(names), quantity=quantity)
            if off := _beyond(alone, together, limit):
                return replace(facts, step=step, off=off)
    return facts


def _beyond(
    alone: Mapping[str, Tensor], together: Mapping[str, Tensor], limit: float
) -> dict[str, tuple[float, float, float]]:
    """Return name -> ratio, rest, difference of what is further apart than `limit`, relative to the largest element."""
    scale = max((float(t.abs().max()) for t in alone.values() if t.numel()), default=0.0)
    if not math.isfinite(scale):
        raise UsageError("the gradients of one process on the whole batch are not finite; nothing can be compared")
    off = {}
    for name in {**alone, **together}:
        some = alone.get(name, together.get(name))
        assert some is not None
        a, b = (table.get(name, torch.zeros_like(some)) for table in (alone, together))
        difference = float((b - a).abs().max()) if some.numel() else 0.0
        if difference > limit * scale or not math.isfinite(difference):
            ratio = float((a * b).sum() / (a * a).sum()) if bool(a.any()) else math.inf
            rest = float((b - ratio * a).norm() / b.norm()) if math.isfinite(ratio) and bool(b.any()) else 0.0
            off[name] = (ratio, rest, difference / scale if scale else math.inf)
    return off


def judge(facts: Mapping[int, Equivalence]) -> list[Finding]:
    """Return SYNC209 if the facts of the ranks say so."""
    from ddpdebug.detectors.sync.sync209_not_equivalent import NotEquivalent  # noqa: PLC0415 - one rule, not the package

    return list(NotEquivalent().compare("equivalence", facts))
