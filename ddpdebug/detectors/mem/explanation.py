"""Why an allocation failed, from the numbers of a summary, and what would have helped how much. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ddpdebug.detectors.mem.sizes import MIB, size_text
from ddpdebug.detectors.thresholds import Threshold
from ddpdebug.schema.announcements import AllocationFailure

#: In the path of what somebody else has written.
_INSTALLED = ("/site-packages/", "/dist-packages/")


class ExplainingRule:
    """The thresholds by which failed allocations are explained, also where the rule itself is not loaded."""

    def __init__(self, config: Mapping[str, Any] | None = None) -> None:
        self.config = config or {}

    oom_batch_larger = Threshold(
        1.15,
        "batch size, as a multiple of the largest before, that explains a failed allocation",
        source="chosen: activations grow with the batch, and a job that runs has some room",
    )
    oom_free = Threshold(
        1.0,
        "bytes free inside the allocator over those asked for that mean fragmentation",
        source="an argument: in one piece they would have been enough",
    )
    oom_grown = Threshold(
        0.25,
        "growth of the memory, as a share of the limit, that a leak needs",
        source="chosen: less does not fill a device that a job was made for",
    )
    oom_grown_half = Threshold(
        0.25,
        "share of that growth which each half of the steps must bring",
        source="chosen: growth that ends, or comes at once, is no leak",
    )
    oom_one_line = Threshold(
        0.5,
        "share of the allocated memory from one line that explains a failed allocation",
        source="an argument: it then has more than all the rest together, the model included",
    )
    oom_steps = Threshold(
        12, "steps whose memory must be known for that", source="the first ones bring optimizer state and buckets"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """The likely cause with its evidence, and what to try."""

    kind: str  # "batch", "leak", "fragmentation", "optimizer state", "line", "first step", "unknown"
    text: str
    actions: tuple[str, ...]


def explain(failure: AllocationFailure, rule: ExplainingRule | None = None) -> Explanation:
    """Return the likely cause of a failed allocation."""
    rule = rule or ExplainingRule()
    known = _larger_batch(failure, rule) or _fragmentation(failure, rule) or _leak(failure, rule)
    if (found := known or _optimizer_state(failure) or _too_big(failure) or _one_line(failure, rule)) is not None:
        return found
    text = "nothing singles out a cause: no batch was larger, nothing has grown, and the job was close to the limit"
    return Explanation(kind="unknown", text=text, actions=tuple(what_if(failure)))


def what_if(failure: AllocationFailure) -> list[str]:
    """Return what would save how many bytes, the largest saving first."""
    split, world = failure.split, max(1, failure.world)
    other, state, parameters = (split.get(kind, 0) for kind in ("other", "optimizer_state", "parameters"))
    if failure.phase in {"forward", "backward"}:
        other += failure.requested or 0  # what did not fit belongs to them
    if not state and failure.phase == "optimizer":
        state = 2 * parameters  # what Adam is about to make
    ideas = [
        (other // 2, "half the micro-batch, with two accumulation steps under `no_sync()`"),
        (other // 2, "`torch.autocast(device_type, dtype=torch.bfloat16)` around forward and loss"),
        (other * 6 // 10, "`torch.utils.checkpoint.checkpoint` around each block (about a third more compute)"),
    ]
    if world > 1 and state:
        ideas.append((state - state // world, f"`ZeroRedundancyOptimizer` over {world} ranks"))
    ideas.append((split.get("gradients", 0), "`gradient_as_bucket_view=True` in DistributedDataParallel"))
    ideas = [(saved, idea) for saved, idea in ideas if saved >= MIB]
    return [f"{idea}: saves about {size_text(saved)}" for saved, idea in sorted(ideas, key=lambda i: -i[0])]


def _larger_batch(failure: AllocationFailure, rule: ExplainingRule) -> Explanation | None:
    now, before = failure.elements, failure.largest_elements
    if not before or now < rule.oom_batch_larger * before:
        return None
    text = (
        f"a batch larger than ever: its inputs {_shapes(failure.shapes)} have {now} elements, "
        f"the largest of {failure.steps} steps before had {before}"
    )
    actions = (
        "bound the batch: truncate or bucket by length, or batch by number of tokens",
        "run the longest batch first, so that it fails at step 0",
        *what_if(failure)[:2],
    )
    return Explanation(kind="batch", text=text, actions=actions)


def _fragmentation(failure: AllocationFailure, rule: ExplainingRule) -> Explanation | None:
    requested, free = failure.requested, failure.reserved - failure.allocated
    if not requested or free < rule.oom_free * requested:
        return None
    text = (
        f"fragmentation: {size_text(free)} are free inside the allocator, but no piece has the "
        f"{size_text(requested)} that were asked for"
    )
    actions = (
        "set `PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True` in the environment of every rank",
        "pad or bucket lengths to a few sizes",
    )
    return Explanation(kind="fragmentation", text=text, actions=actions)


def _leak(failure: AllocationFailure, rule: ExplainingRule) -> Explanation | None:
    curve = failure.curve
    if len(curve) < rule.oom_steps:
        return None
    settled = curve[min(4, len(curve) - 1) :]  # the first steps bring optimizer state and buckets
    half = len(settled) // 2
    first, last = settled[0][1], settled[-1][1]
    rises = (settled[half][1] - first, last - settled[half][1])
    grown = last - first
    if grown < rule.oom_grown * (failure.limit or last) or min(rises) < rule.oom_grown_half * grown:
        return None
    steps = settled[-1][0] - settled[0][0]
    text = (
        f"a steady leak: memory grew by {size_text(grown)} over {steps} steps, "
        f"{size_text(grown / max(1, steps))} a step"
    )
    actions = ("look for findings MEM402, MEM403 and MEM406 of this run: they name who holds it",)
    return Explanation(kind="leak", text=text, actions=actions)


def _optimizer_state(failure: AllocationFailure) -> Explanation | None:
    if failure.phase != "optimizer" or failure.steps > 1:
        return None
    parameters = failure.split.get("parameters", 0)
    text = (
        "optimizer state is made in the first step: Adam keeps two more copies of the parameters, "
        f"{size_text(2 * parameters)} for these"
    )
    world = max(1, failure.world)
    saved = size_text(2 * parameters * (world - 1) / world)
    actions = (
        f"`ZeroRedundancyOptimizer` keeps 1/{world} of the state on each rank: saves about {saved}",
        "`foreach=False` in the optimizer, for a lower peak inside the step",
        "an optimizer with less state (SGD with momentum keeps one copy, Adafactor less)",
    )
    return Explanation(kind="optimizer state", text=text, actions=actions)


def _one_line(failure: AllocationFailure, rule: ExplainingRule) -> Explanation | None:
    known = {line: size for line, size in failure.lines.items() if ":" in line}
    sizes = {line: size for line, size in known.items() if not any(word in line for word in _INSTALLED)}
    line = max(sizes, key=sizes.__getitem__, default="")
    # parameters and their like come from one line, too: that of `model.to(device)`
    if not line or not rule.oom_one_line * failure.allocated < sizes[line] <= failure.split.get("other", 0):
        return None
    before = f"; the step before ended with {size_text(failure.curve[-1][1])}" if failure.curve else ""
    text = f"one line has allocated {size_text(sizes[line])} of {size_text(failure.allocated)}: {line}{before}"
    needed = (f"where the model needs all of it: {idea}" for idea in what_if(failure)[:2])
    actions = ("see whether that line should make so much, or so often", *needed)
    return Explanation(kind="line", text=text, actions=actions)


def _too_big(failure: AllocationFailure) -> Explanation | None:
    if failure.steps > 0:
        return None
    held = ", ".join(f"{name.replace('_', ' ')} {size_text(size)}" for name, size in failure.split.items() if size)
    text = "too big from the start: the first step does not fit" + (f" ({held})" if held else "")
    return Explanation(kind="first step", text=text, actions=tuple(what_if(failure)))


def _shapes(shapes: Sequence[Sequence[int]]) -> str:
    return ", ".join("x".join(map(str, shape)) or "scalar" for shape in shapes[:4]) or "unknown"
