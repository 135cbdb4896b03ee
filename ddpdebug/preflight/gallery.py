"""A look at raw samples: images as pictures, tokens as text."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ddpdebug.preflight.observe import Seen
from ddpdebug.preflight.output.results import Check, Picture, Status
from ddpdebug.preflight.subject import Subject

GROUP = "data"
_SHOWN = 8
_PIXELS = 64
_TOKENS = 48


def check(subject: Subject, seen: list[Seen]) -> Iterator[Check]:
    """Show the first samples of the first batch."""
    first = seen[0]
    titles = _titles(first)
    pictures: list[Picture] = []
    for tensor in first.inputs:
        images = _images(tensor)
        if images is not None:
            pictures = [Picture(title=titles(at), pixels=_pixels(images[at])) for at in range(min(_SHOWN, len(images)))]
            break
        if tensor.dim() == 2 and not tensor.is_floating_point() and tensor.dtype is not torch.bool:
            tokenizer = subject.settings.get("tokenizer")
            rows = tensor[:_SHOWN, :_TOKENS].tolist()
            pictures = [Picture(title=titles(at), text=_text(row, tokenizer)) for at, row in enumerate(rows)]
            break
    if pictures:
        summary = f"the first {len(pictures)} samples as the model gets them"
        yield Check(group=GROUP, name="gallery", status=Status.INFO, summary=summary, pictures=tuple(pictures))


def _titles(seen: Seen) -> Any:
    target = seen.calls[0].target if seen.calls else None

    def title(at: int) -> str:
        if target is None or target.dim() != 1 or at >= len(target):
            return f"sample {at}"
        return f"sample {at}, label {target[at].item():g}"

    return title


def _images(tensor: Tensor) -> Tensor | None:
    """Return N x H x W x C; None for what is no batch of images."""
    if tensor.dim() != 4 or min(tensor.shape) == 0:
        return None
    if tensor.shape[1] in {1, 3} and min(tensor.shape[2:]) >= 8:
        return tensor.permute(0, 2, 3, 1)
    return tensor if tensor.shape[3] in {1, 3} and min(tensor.shape[1:3]) >= 8 else None


def _pixels(image: Tensor) -> tuple[tuple[tuple[int, ...], ...], ...]:
    values = image.detach().float().cpu().nan_to_num()
    if max(values.shape[:2]) > _PIXELS:
        shrunk = _PIXELS / max(values.shape[:2])
        size = [max(1, round(side * shrunk)) for side in values.shape[:2]]
        planes = functional.interpolate(values.permute(2, 0, 1)[None], size=size, mode="area")
        values = planes[0].permute(1, 2, 0)
    low, high = values.min(), values.max()
    scaled = ((values - low) / (high - low).clamp_min(1e-12) * 255).round().to(torch.int64)
    return tuple(tuple(tuple(pixel) for pixel in row) for row in scaled.tolist())


def _text(row: list[int], tokenizer: Any) -> str:
    if hasattr(tokenizer, "decode"):
        return str(tokenizer.decode(row))
    return " ".join(map(str, row))
