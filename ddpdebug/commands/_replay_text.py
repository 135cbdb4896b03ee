"""Prints what a replay has found. Everything that comes from the bundle or the model is escaped."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

from ddpdebug.commands._replay_request import Request
from ddpdebug.forensics.replay.bundle_reading import Bundle
from ddpdebug.forensics.replay.replay import Trace
from ddpdebug.forensics.replay.shrink import Shrunk
from ddpdebug.forensics.replay.tracer import Origin
from ddpdebug.sinks.text import SEPARATOR, clean, tensor_text

_WIDTH = 120
_LABEL = 10
_MAX_SUBSETS = 8
_MAX_MASKED = 4
_MAX_SAMPLES = 16
_KINDS = {
    "input": "the input was bad already",
    "parameter": "the parameter was bad before the forward",
    "buffer": "the buffer was bad before the forward",
    "output-gradient": "the gradient that entered the model was bad already: the loss made it",
    "tensor": "it came in from outside of the model",
    "uninitialised": "memory that nobody has written was read",
    "unknown": "where it came from could not be followed",
}


def show(request: Request, bundle: Bundle, trace: Trace, shrunk: Shrunk | None, notes: Sequence[str]) -> None:
    """Print the result."""
    console = _console()
    facts = bundle.facts
    head = [clean(facts.get("code", "")), f"step {clean(facts.get('step'))}", f"rank {clean(facts.get('rank'))}"]
    console.print(Text(SEPARATOR.join(filter(None, head)), "bold"), soft_wrap=True)
    _line(console, "bundle", clean(bundle.path))
    _line(console, "run", _conditions(request, bundle, trace))
    console.print()
    console.print(
        Text(_verdict(request, bundle, trace), "bold red" if trace.reproduced else "bold green"), soft_wrap=True
    )
    if trace.culprit is not None:
        _culprit(console, trace, trace.culprit)
    for origin in trace.masked[:_MAX_MASKED]:
        text = f"{clean(origin.name, 100)} makes {origin.value}, {clean(origin.ended_at, 100)} hides it"
        _line(console, "masked", SEPARATOR.join([text, *(clean(line, 300) for line in origin.stack[:1])]))
    if trace.culprit is None or trace.culprit.kind == "output-gradient":
        _loss(console, facts.get("loss"))
    if trace.calls:
        _calls(console, trace)
    if shrunk is not None:
        _shrunk(console, shrunk)
    for note in (*notes, *trace.notes):
        _line(console, "note", clean(note))
    if not trace.complete:
        _line(console, "note", f"the replay is not complete: {clean(trace.reason)}")


def _conditions(request: Request, bundle: Bundle, trace: Trace) -> str:
    cast = bundle.autocast
    amp = request.amp and request.dtype is None and cast.enabled
    autocast = f"autocast {str(cast.dtype).removeprefix('torch.')}" if amp else "no autocast"
    parts = [f"{trace.operations} operations", "forward and backward" if trace.backward else "forward only"]
    return SEPARATOR.join([*parts, request.dtype or "dtypes as recorded", autocast, f"{trace.seconds:.1f} s"])


def _verdict(request: Request, bundle: Bundle, trace: Trace) -> str:
    if trace.culprit is not None:
        origin = trace.culprit
        if origin.kind in _KINDS:
            return f"{origin.value}: {clean(origin.name, 100)}: {_KINDS[origin.kind]}"
        made = "nan of the infinities that were written as a mask" if origin.made_of else f"{origin.value}"
        return f"{clean(origin.name, 100)} makes {made}, in {origin.phase}"
    if not trace.complete:
        return "nothing non-finite was seen, but the replay did not get to its end"
    if request.dtype is not None:
        return f"it survives in {request.dtype}: nothing non-finite came out"
    if not request.amp and bundle.autocast.enabled:
        return "it survives without autocast: nothing non-finite came out"
    return f"nothing non-finite came out{': what arose was masked' if trace.masked else ''}"


def _culprit(console: Console, trace: Trace, origin: Origin) -> None:
    if origin.module is not None:
        name = clean(origin.module, 160) or "the model itself"
        _line(console, "module", f"{name} ({clean(origin.module_class, 80)}, call {origin.call})")
    if origin.node is not None:
        of = f", the backward of {clean(origin.forward_op, 100)}" if origin.forward_op and origin.is_builtin else ""
        _line(console, "node", f"{clean(origin.node, 100)}{of}")
    if trace.location is not None:
        _line(console, "line", clean(trace.location, 300))
    for i, entry in enumerate(origin.stack):
        _line(console, "stack" if i == 0 else "", clean(entry, 300))
    for operand in origin.operands:
        _line(console, "operand", contents(operand))
    if origin.result is not None:
        _line(console, "result", contents(origin.result))
    if origin.made_of is not None:
        place = SEPARATOR.join(origin.made_of.stack[:1])
        _line(console, "made of", clean(f"{origin.made_of.name}{SEPARATOR}{place}", 300))
    if origin.became_nan is not None:
        _line(console, "then", f"{clean(origin.became_nan, 300)} makes nan of it")


def _loss(console: Console, found: object) -> None:
    """Print what was found of the loss during the run: it is not part of the bundle."""
    known: Mapping[str, Any] = found if isinstance(found, dict) else {}
    words = [known.get("operation"), known.get("location") or known.get("expression")]
    if any(words):
        found_then = SEPARATOR.join(str(word) for word in words if word)
        _line(console, "loss", f"{clean(found_then, 300)} (found in the run; the loss is not part of a bundle)")


def contents(value: Mapping[str, Any]) -> str:
    """Return a tensor's description on one line: `float32 [3, 4] · 0 to 2.5 · 7 zeros`."""
    if "value" in value:
        return f"the number {clean(value['value'], 60)}"
    return tensor_text(value, SEPARATOR)


def _calls(console: Console, trace: Trace) -> None:
    console.print()
    console.print(Text("module calls before it" if trace.reproduced else "last module calls", "bold"), soft_wrap=True)
    rows = [("module", "class", "call", "output")]
    for call in trace.calls:
        output = contents(call["output"]) if call["output"] else ""
        name = clean(call["module"], 80) or "(model)"
        rows.append((name, clean(call["class"], 40), str(call["call"]), output))
    widths = [max(len(row[i]) for row in rows) for i in range(3)]
    for number_of_row, row in enumerate(rows):
        cells = [f"{cell:{width}}" for cell, width in zip(row[:3], widths, strict=True)]
        console.print(Text("  ".join(["", *cells, row[3]]).rstrip(), "" if number_of_row else "dim"), soft_wrap=True)


def _shrunk(console: Console, shrunk: Shrunk) -> None:
    console.print()
    sizes = {len(subset) for subset in shrunk.subsets}
    if sizes == {1}:
        samples = [str(subset[0]) for subset in shrunk.subsets]
        text = f"of {shrunk.batch} samples, {len(samples)} fail alone: {', '.join(samples[:_MAX_SAMPLES])}"
        _line(console, "samples", text + (", ..." if len(samples) > _MAX_SAMPLES else ""))
    else:
        for subset in shrunk.subsets[:_MAX_SUBSETS]:
            more = ", ..." if len(subset) > _MAX_SAMPLES else ""
            together = "alone" if len(subset) == 1 else "only together"
            text = (
                f"of {shrunk.batch} samples, these fail {together}: {', '.join(map(str, subset[:_MAX_SAMPLES]))}{more}"
            )
            _line(console, "samples", text)
    if shrunk.reason is not None:
        _line(console, "samples", shrunk.reason)
    _line(console, "", f"{shrunk.runs} runs; what is random for each sample may fall differently in a smaller batch")


def _line(console: Console, label: str, text: str) -> None:
    console.print(Text.assemble((f"  {label:{_LABEL}}", "dim"), text), soft_wrap=True)


def _console() -> Console:
    columns = shutil.get_terminal_size().columns if sys.stdout.isatty() else _WIDTH
    return Console(file=sys.stdout, width=min(columns, _WIDTH), highlight=False, markup=False, emoji=False)
