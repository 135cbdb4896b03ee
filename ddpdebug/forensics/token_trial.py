"""Runs a language model on its inputs and on these with another token, and compares what comes of the places before it.

Loaded and run in a disposable copy of the process; see `target_leak.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from ddpdebug import torch_internals as internals
from ddpdebug.forensics.forward_trial import Operations, again, prepared
from ddpdebug.forensics.replay.tracer import Stopped
from ddpdebug.forensics.target_relation import Relation
from ddpdebug.isolation.foreign import is_a
from ddpdebug.isolation.user_code import is_users
from ddpdebug.nested import tensors_in
from ddpdebug.probes.forward_capture import ForwardCapture
from ddpdebug.schema.announcements import TokenChange

_KEPT_BYTES = 64 << 20


@dataclass(slots=True)
class _Pass:
    """Inputs and outputs of modules for one sample: with positions, without them, and at the end."""

    calls: list[tuple[str, list[torch.Tensor], list[torch.Tensor]]] = field(default_factory=list)
    pooled: list[torch.Tensor] = field(default_factory=list)
    outputs: list[torch.Tensor] = field(default_factory=list)
    room: int = _KEPT_BYTES


def look(capture: ForwardCapture, known: Relation) -> TokenChange | None:
    """Return the effect of another token on the outputs; None if it cannot be measured."""
    other = known.tokens.clone()
    row = other[known.sample]
    values = known.tokens.flatten()
    row[known.position] = values[values != row[known.position]][0]
    try:
        runs = [_run(capture, known, tokens) for tokens in (known.tokens, other)]
        return _compared(known, *runs)
    except (Exception, Stopped) as error:
        if is_users(error):
            raise
        return None


def _run(capture: ForwardCapture, known: Relation, tokens: torch.Tensor) -> _Pass:
    seen, ready = _Pass(), prepared(capture)
    if ready is None:
        raise Stopped
    scores: list[torch.Tensor] = []  # of a model that returns its loss alone

    def note(name: str, args: tuple[Any, ...], _: Any) -> None:
        if name == "log_softmax":
            scores.extend(_outputs(args[0], known))

    def changed(value: Any) -> Any:
        """Return the other tokens in place of those that are known, which lie on the same memory."""
        return tokens if is_a(value, torch.Tensor) and known.tokens.is_set_to(value) else value

    mode = Operations(note)
    handles = [
        part.register_forward_hook(_keeper(seen, name, known, mode), with_kwargs=True)
        for name, part in internals.named_modules(ready.module)
        if name
    ]
    try:
        output = again(capture, ready, changed, mode)
    finally:
        for handle in handles:
            handle.remove()
    for tensor in tensors_in(output):
        seen.outputs.extend(_outputs(tensor, known))
    seen.outputs = seen.outputs or scores
    return seen


def _outputs(tensor: torch.Tensor, known: Relation) -> list[torch.Tensor]:
    """Return what a tensor of outputs for all positions has for the sample; an empty list for another tensor."""
    if not tensor.is_floating_point() or not internals.is_plain(tensor) or tensor.dim() < 2:
        return []
    batch, length = known.tokens.shape
    positions = tensor.shape[0] // batch if tensor.dim() == 2 else tensor.shape[1]
    rows = batch * positions if tensor.dim() == 2 else batch
    if positions not in {length, length - 1} or tensor.shape[0] != rows:  # whole, or without the last
        return []
    row = tensor.reshape(batch, positions, -1)[known.sample]
    # of a large vocabulary every so many words tell as much
    return [row[..., :: 1 + row.nbytes // _KEPT_BYTES].clone()]


def _keeper(seen: _Pass, name: str, known: Relation, mode: Operations) -> Callable[..., None]:
    """Return a hook that keeps one sample of what a module is given and returns."""

    def keep(_: Any, args: Any, kwargs: Any, output: Any) -> None:
        mode.muted = True
        try:
            given, made = (
                [t for t in map(part, tensors_in(value)) if t is not None] for value in ((args, kwargs), output)
            )
            seen.calls.append((name, given, made))
        finally:
            mode.muted = False

    def part(tensor: torch.Tensor) -> torch.Tensor | None:
        if not tensor.is_floating_point() or tensor.dim() < 2 or not internals.is_plain(tensor):
            return None
        batch, length = known.tokens.shape
        if tensor.shape[:2] == (batch, length) and tensor.dim() > 2:
            kept = tensor[known.sample]
        elif batch in tensor.shape and not {length - 1, length, length + 1} & set(tensor.shape):
            seen.pooled.append(tensor.select(tensor.shape.index(batch), known.sample).clone())
            return None
        else:
            return None
        seen.room -= kept.nbytes
        return kept.clone() if seen.room > 0 else None

    return keep


def _compared(known: Relation, one: _Pass, other: _Pass) -> TokenChange | None:
    at = known.position
    if not one.outputs or len(one.outputs) != len(other.outputs):
        return None
    before, here, behind = (
        max(_change(a[part], b[part], a) for a, b in zip(one.outputs, other.outputs, strict=True))
        for part in (slice(at), slice(at, at + 1), slice(at + 1, None))
    )
    return TokenChange(
        targets="moved" if known.moved else "same",
        before=before,
        here=here,
        behind=behind,
        summary=max((_change(a, b, a) for a, b in zip(one.pooled, other.pooled, strict=False)), default=0.0),
        module=_mixer(at, one, other) if before else None,
        position=at,
        length=known.tokens.shape[1],
    )


def _mixer(at: int, one: _Pass, other: _Pass) -> str | None:
    """Return the first module that was given nothing of the token before its place, and returned something of it."""

    def early(some: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
        return any(_change(a[:at], b[:at], a) > 0 for a, b in zip(some, others, strict=False))

    for (name, given, made), (name_then, given_then, made_then) in zip(one.calls, other.calls, strict=False):
        if name == name_then and early(made, made_then) and not early(given, given_then):
            return name
    return None


def _change(one: torch.Tensor, other: torch.Tensor, whole: torch.Tensor) -> float:
    """Return the largest change as a share of the largest value."""
    if one.shape != other.shape or not one.numel():
        return 0.0
    size = float(whole.float().nan_to_num(0, 0, 0).abs().max())
    return float((one.float() - other.float()).nan_to_num(0, 0, 0).abs().max()) / max(size, 1e-12)
