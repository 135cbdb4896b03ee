"""An out-of-memory summary as readable text. Torch-free."""

from __future__ import annotations

from collections.abc import Iterator

from ddpdebug.detectors.mem.explanation import Explanation
from ddpdebug.detectors.mem.sizes import size_text
from ddpdebug.schema.announcements import AllocationFailure, MemoryState
from ddpdebug.sinks.words import clean

_CURVE_STEPS = 12


def render(summary: MemoryState, explanation: Explanation | None, table: str) -> str:
    """Return the text: cause and remedies first, then the numbers, torch's own table last."""
    lines = [_head(summary), ""]
    if explanation is not None:
        lines += [f"likely cause: {explanation.text}", *(f"  - {action}" for action in explanation.actions), ""]
    lines += _numbers(summary)
    kinds = {name.replace("_", " "): size for name, size in summary.split.items()}
    for title, table_of in (("by kind", kinds), ("by module", summary.modules), ("by line", summary.lines)):
        sizes = {name: size for name, size in table_of.items() if size}
        if sizes:
            lines += ["", f"{title}:"]
            lines += [f"  {size_text(size):>10}  {clean(name, 120)}" for name, size in sizes.items()]
    if summary.largest:
        lines += ["", "parameters, gradients and optimizer state by module:"]
        lines += [f"  {size:>10}  {clean(name, 120)}" for name, size in summary.largest.items()]
    lines += ["", *_curve(summary)]
    return "\n".join([*lines, "", table]).rstrip() + "\n"


def _head(summary: MemoryState) -> str:
    failure = summary if isinstance(summary, AllocationFailure) else None
    what = "an allocation failed on another rank" if failure is None else "an allocation failed"
    place = [f"rank {summary.rank}", f"step {summary.step}", summary.phase or ""]
    place += [f"module {clean(failure.module, 160)}"] if failure is not None and failure.module else []
    known = (summary.operation, None if failure is None else failure.location)
    place += [clean(text, 160) for text in known if text]
    return f"{what}: {' · '.join(part for part in place if part)}"


def _numbers(summary: MemoryState) -> Iterator[str]:
    kind = "allocated on the device" if summary.device else "private memory of the process"
    yield f"{kind}: {size_text(summary.allocated)}"
    requested = summary.requested if isinstance(summary, AllocationFailure) else None
    sizes = {"asked for": requested, "reserved": summary.reserved, "peak": summary.peak, "limit": summary.limit}
    yield from (f"{label}: {size_text(size)}" for label, size in sizes.items() if size)
    shapes = ", ".join("x".join(map(str, shape)) for shape in summary.shapes) or "none yet"
    yield (
        f"batch: inputs {shapes}, {summary.elements} elements in this step; "
        f"the largest step before had {summary.largest_elements}"
    )


def _curve(summary: MemoryState) -> Iterator[str]:
    curve = summary.curve[-_CURVE_STEPS:]
    if curve:
        yield "at the end of the last steps:"
        for step, used, elements in curve:
            yield f"  step {step:>6}  {size_text(used):>10}  {elements} elements"
