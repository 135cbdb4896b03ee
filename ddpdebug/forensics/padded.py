"""Tests whether a model that is given a padding mask gives other outputs where a batch has less padding.

The last columns, which are padding in every sample that is looked at, are taken away, from the mask as well; what comes
of the other positions must be the same. Rows must end in one token wherever the mask has one of its two values. A model
that takes one length only, and attends, is given other tokens there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ddpdebug import torch_internals as internals
from ddpdebug.forensics.forward_trial import Operations, again, prepared
from ddpdebug.isolation.foreign import is_a
from ddpdebug.isolation.user_code import is_users
from ddpdebug.nested import leaves, tensors_in
from ddpdebug.probes.forward_capture import ForwardCapture
from ddpdebug.schema.announcements import PaddingEffect

#: Samples with padding that are looked at, and real positions in each.
_LEAST, _POSITIONS = 2, 2


@dataclass(frozen=True, slots=True)
class _Padding:
    text: torch.Tensor
    rows: torch.Tensor  # of the batch, those that are looked at
    length: int  # positions of the batch
    kept: int  # of these
    real: torch.Tensor  # (rows, kept), True where no padding is


def look(capture: ForwardCapture) -> PaddingEffect | None:
    """Return the change of outputs by less padding; None where there is no mask of padding, or nothing to measure."""
    tensors = [value for _, value in leaves((capture.args, capture.kwargs)) if is_a(value, torch.Tensor)]
    known = next(iter([found for mask in tensors for text in tensors if (found := _padding(text, mask))]), None)
    if known is None:
        return None
    attends: list[str] = []
    whole = _run(capture, known, known.length, lambda name: attends.append(name) if _is_attention(name) else None)
    try:
        short = _run(capture, known, known.kept)
    except Exception as error:
        if is_users(error) or not attends:
            raise
        short = _run(capture, known, known.length, other=_filled(known))
    if not whole or len(whole) != len(short):
        return None
    changes = [_change(a, b, known) for a, b in zip(whole, short, strict=True)]
    return PaddingEffect(change=max(changes), length=known.length, kept=known.kept, location=capture.location)


def _is_attention(operation: str) -> bool:
    return "attention" in operation or operation == "softmax"


def _filled(known: _Padding) -> torch.Tensor:
    """Return the tokens with each row's first in place of its padding."""
    text = known.text.clone()
    places = torch.zeros_like(text, dtype=torch.bool)
    places[known.rows, : known.kept] = ~known.real
    places[known.rows, known.kept :] = True
    return torch.where(places, text[:, :1], text)


def _padding(text: torch.Tensor, mask: torch.Tensor) -> _Padding | None:
    """Return what of a batch of tokens is padding by a mask of two values; None if that is not plain to see."""
    if text.dim() != 2 or text.shape != mask.shape or text.is_floating_point() or text is mask:
        return None
    values = mask.unique()
    if len(values) != 2 or len(text.unique()) < 3:
        return None
    for value in values.tolist():
        hidden = mask == value
        if len(text[hidden].unique()) != 1 or bool((hidden[:, :-1] & ~hidden[:, 1:]).any()):  # they end each row
            continue
        lengths = (~hidden).sum(1)
        kept = int(lengths.max())
        rows = lengths >= _POSITIONS
        if kept == text.shape[1]:  # the longest have no padding: the others are looked at
            rows &= lengths < kept
            kept = int(lengths[rows].max()) if bool(rows.any()) else kept
        if kept < text.shape[1] and int(rows.sum()) >= _LEAST:
            return _Padding(text, rows.nonzero().flatten(), text.shape[1], kept, ~hidden[rows][:, :kept])
    return None


def _run(
    capture: ForwardCapture,
    known: _Padding,
    length: int,
    note: Callable[[str], object] = bool,
    other: torch.Tensor | None = None,
) -> list[torch.Tensor]:
    """Return the outputs for the rows that are looked at and so many positions, of other tokens if they are given."""
    ready = prepared(capture)
    if ready is None:
        return []

    def changed(value: Any) -> Any:
        if not is_a(value, torch.Tensor) or value.dim() < 2 or value.shape[1] != known.length:
            return value
        given = other if other is not None and known.text.is_set_to(value) else value
        return given.index_select(0, known.rows)[:, :length]

    output = again(capture, ready, changed, Operations(lambda name, *_: note(name)))
    tables = [t for t in tensors_in(output) if t.is_floating_point() and internals.is_plain(t) and t.dim() > 1]
    return [table for table in tables if table.shape[0] == len(known.rows)]


def _change(whole: torch.Tensor, short: torch.Tensor, known: _Padding) -> float:
    """Return the largest change, as a share of the largest output, of what has no padding."""
    if whole.dim() > 2 and whole.shape[1] == known.length and short.shape[1] in {known.length, known.kept}:
        whole, short = whole[:, : known.kept][known.real], short[:, : known.kept][known.real]
    if whole.shape != short.shape:
        return 0.0
    size = float(whole.float().nan_to_num(0, 0, 0).abs().max())
    return float((whole.float() - short.float()).nan_to_num(0, 0, 0).abs().max()) / max(size, 1e-12)
