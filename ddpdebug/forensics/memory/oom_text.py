"""An out-of-memory summary as a page that people read. Torch-free."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ddpdebug.detectors.mem.explanation import Explanation
from ddpdebug.detectors.mem.growth import size_text
from ddpdebug.sinks.text import clean

_CURVE_STEPS = 12


def render(summary: Mapping[str, Any], explanation: Explanation | None, table: str) -> str:
    """Return the page: cause and remedies first, then the numbers, torch's own table last."""
    lines = [_head(summary), ""]
    if explanation is not None:
        lines += [f"likely cause: {explanation.text}", *(f"  - {action}" for action in explanation.actions), ""]
    lines += _numbers(summary)
    for title, key in (("by kind", "split"), ("by module", "modules"), ("by line", "lines")):
        sizes = {name: size for name, size in (summary.get(key) or {}).items() if size}
        if sizes:
            lines += ["", f"{title}:"]
            lines += [f"  {size_text(size):>10}  {clean(name.replace('_', ' '), 120)}" for name, size in sizes.items()]
    if summary.get("largest"):
        lines += ["", "parameters, gradients and optimizer state by module:"]
        lines += [f"  {size:>10}  {clean(name, 120)}" for name, size in summary["largest"].items()]
    lines += ["", *_curve(summary)]
    return "\n".join([*lines, "", table]).rstrip() + "\n"


def _head(summary: Mapping[str, Any]) -> str:
    what = "an allocation failed" if summary.get("failed") else "an allocation failed on another rank"
    place = [f"rank {summary['rank']}", f"step {summary['step']}", str(summary.get("phase") or "")]
    place += [f"module {clean(summary['module'], 160)}"] if summary.get("module") else []
    place += [clean(summary[key], 160) for key in ("operation", "location") if summary.get(key)]
    return f"{what}: {' · '.join(part for part in place if part)}"


def _numbers(summary: Mapping[str, Any]) -> Iterator[str]:
    kind = "allocated on the device" if summary.get("device") else "private memory of the process"
    yield f"{kind}: {size_text(summary['allocated'])}"
    for key, label in (("requested", "asked for"), ("reserved", "reserved"), ("peak", "peak"), ("limit", "limit")):
        if summary.get(key):
            yield f"{label}: {size_text(summary[key])}"
    shapes = ", ".join("x".join(map(str, shape)) for shape in summary.get("shapes") or ()) or "none yet"
    yield (
        f"batch: inputs {shapes}, {summary.get('elements', 0)} elements in this step; "
        f"the largest step before had {summary.get('largest_elements', 0)}"
    )


def _curve(summary: Mapping[str, Any]) -> Iterator[str]:
    curve = (summary.get("curve") or [])[-_CURVE_STEPS:]
    if curve:
        yield "at the end of the last steps:"
        for step, used, elements in curve:
            yield f"  step {step:>6}  {size_text(used):>10}  {elements} elements"
