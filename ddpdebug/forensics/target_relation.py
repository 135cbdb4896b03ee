"""How the targets of a language model's loss follow from its inputs: they are these, or these moved by a position."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ddpdebug import torch_internals as internals
from ddpdebug.isolation.foreign import is_a
from ddpdebug.nested import leaves
from ddpdebug.probes.forward_capture import ForwardCapture

#: Positions that must be compared, and different tokens among them: fewer are equal by chance.
_LEAST, _KINDS = 8, 3
_MAX_TOKENS = 1 << 22


@dataclass(frozen=True, slots=True, kw_only=True)
class Relation:
    """The relation by which the targets follow from the inputs."""

    tokens: torch.Tensor  # (batch, positions), an argument of the forward
    moved: bool  # by one position; otherwise they are the inputs themselves
    sample: int
    position: int  # of a token that is the target of the position before it, or a token in the middle


def relation(capture: ForwardCapture, target: torch.Tensor, ignored: int) -> Relation | None:
    """Return how a loss's targets follow from the only related inputs; None if unclear. Waits for a device."""
    found = [r for text in _inputs(capture, target) if (r := _relation(text, target, ignored)) is not None]
    moved = [known for known in found if known.moved]  # an argument that is the target itself is the labels
    chosen = moved or found
    # the target text is also an encoder's input, which is legitimate (sequence to sequence)
    if not chosen or any(not torch.equal(chosen[0].tokens, known.tokens) for known in chosen[1:]):
        return None
    return chosen[0]


def texts(capture: ForwardCapture, target: torch.Tensor) -> list[torch.Tensor]:
    """Return the forward's arguments that are token tensors as large as the target, or longer by one position."""
    arguments = dict.fromkeys(v for _, v in leaves((capture.args, capture.kwargs)) if is_a(v, torch.Tensor))
    return [v for v in arguments if _is_text(v) and target.numel() in {v.numel(), v.numel() - v.shape[0]}]


def _inputs(capture: ForwardCapture, target: torch.Tensor) -> list[torch.Tensor]:
    """Return those of them that are no labels, which leave places out by a number below 0; waits for a device."""
    return [v for v in texts(capture, target) if v.device == target.device and not bool((v < 0).any())]


def _is_text(value: torch.Tensor) -> bool:
    whole = value.dtype in {torch.int64, torch.int32, torch.int16} and internals.is_plain(value)
    return whole and value.dim() == 2 and value.shape[1] > 2 and 0 < value.numel() <= _MAX_TOKENS


def _relation(tokens: torch.Tensor, target: torch.Tensor, ignored: int) -> Relation | None:
    batch, length = tokens.shape
    table = target.detach().reshape(batch, -1)
    for moved in (True, False):
        if not moved and table.shape[1] != length:
            continue
        inputs = tokens[:, 1:] if moved else tokens
        wanted = table[:, : inputs.shape[1]]
        counted = wanted != ignored
        if int(counted.sum()) < _LEAST or bool((counted & (wanted != inputs)).any()):
            continue
        if len(inputs[counted].unique()) < _KINDS:
            return None
        per_sample = counted.sum(1)
        sample = int(per_sample.argmax())
        places = counted[sample].nonzero().flatten().tolist()
        position = places[-min(2, len(places))] + 1 if moved else places[len(places) // 2]
        return Relation(tokens=tokens, moved=moved, sample=sample, position=position)
    return None


def is_moved_twice(capture: ForwardCapture, target: torch.Tensor, ignored: int) -> bool:
    """Whether the targets are the tokens of a forward shifted by two positions; waits for a device.

    Another argument may be what they are moved by one: labels that were moved before the model moves them again.
    """
    for tokens in _inputs(capture, target):
        once = _relation(tokens, target, ignored)
        if once is not None and once.moved:  # rows of one token
            continue
        wanted = target.detach().reshape(len(tokens), -1)[:, : tokens.shape[1] - 2]
        inputs = tokens[:, 2 : 2 + wanted.shape[1]]
        counted = wanted != ignored
        if int(counted.sum()) >= _LEAST and not bool((counted & (wanted != inputs)).any()):
            return len(inputs[counted].unique()) >= _KINDS
    return False
