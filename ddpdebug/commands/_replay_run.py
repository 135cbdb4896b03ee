"""Runs `ddpdebug replay` once the command line is right."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import torch

from ddpdebug.commands._replay_model import build_model
from ddpdebug.commands._replay_request import Request
from ddpdebug.commands._replay_text import show
from ddpdebug.errors import UsageError
from ddpdebug.forensics.replay.bundle_reading import Bundle, read_bundle
from ddpdebug.forensics.replay.replay import Trace, replay
from ddpdebug.forensics.replay.shrink import Shrunk, shrink
from ddpdebug.isolation.process_state import Autocast
from ddpdebug.nested import mapped
from ddpdebug.probes.forward_capture import Scene
from ddpdebug.schema.finding import strict

_SECONDS = 3600.0


def run(request: Request) -> int:
    """Replay the bundle, print the result and return the exit code."""
    bundle = read_bundle(request.bundle)
    device = _device(request, bundle)
    dtype = None if request.dtype is None else getattr(torch, request.dtype)
    model = build_model(request, bundle)
    model.to(device=device, dtype=dtype)
    scene = _scene(bundle, model, device, dtype)
    notes = _notes(bundle, device)

    def once(part: Scene) -> Trace:
        return replay(part, seconds=_SECONDS, autocast=request.amp and dtype is None, alone=True)

    trace = once(scene)
    shrunk = shrink(scene, trace, once) if request.shrink else None
    show(request, bundle, trace, shrunk, notes)
    if request.json is not None:
        _write(request, bundle, trace, shrunk, notes)
    if trace.reproduced:
        return 1
    return 0 if trace.complete else 3


def _device(request: Request, bundle: Bundle) -> torch.device:
    if request.device is None:
        usable = bundle.autocast.device == "cuda" and torch.cuda.is_available()
        return torch.device("cuda" if usable else "cpu")
    try:
        device = torch.device(request.device)
        torch.zeros((), device=device)
    except (RuntimeError, AssertionError, ValueError) as error:
        raise UsageError(f"--device {request.device!r} cannot be used: {str(error).splitlines()[0]}") from None
    return device


def _scene(bundle: Bundle, model: torch.nn.Module, device: torch.device, dtype: torch.dtype | None) -> Scene:
    def move(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        kind = dtype if dtype is not None and value.is_floating_point() else value.dtype
        return value.detach().to(device, kind).requires_grad_(value.requires_grad)

    scene = bundle.scene(model)
    gradients = {} if _has_bad_forward(bundle) else scene.gradients
    cast = bundle.autocast
    rng = bundle.rng if device.type == "cuda" else replace(bundle.rng, cuda=None)
    return replace(
        scene,
        given=mapped((scene.args, scene.kwargs), move),
        gradients={position: move(gradient) for position, gradient in gradients.items()},
        rng=rng,
        autocast=Autocast(device=device.type, enabled=cast.enabled, dtype=cast.dtype),
    )


def _has_bad_forward(bundle: Bundle) -> bool:
    """Tell whether the forward went wrong in the run: then the recorded gradients say nothing of another forward."""
    found = bundle.facts.get("replay")
    culprit = found.get("culprit") if isinstance(found, dict) else None
    return isinstance(culprit, dict) and culprit.get("phase") == "forward"


def _notes(bundle: Bundle, device: torch.device) -> list[str]:
    notes = [f"left out of the bundle: {text}" for text in bundle.left_out]
    if bundle.parameters is None:
        notes.append("the bundle has no parameters: the model's own were used, so the result may differ")
    if device.type != bundle.autocast.device:
        notes.append(
            f"recorded on {bundle.autocast.device}, run on {device.type}: other kernels, and other random numbers there"
        )
    changed = bundle.facts.get("changed_since_forward")
    if isinstance(changed, list) and changed:
        notes.append(f"written between the forward and the bundle: {', '.join(map(str, changed[:3]))}")
    return notes


def _write(request: Request, bundle: Bundle, trace: Trace, shrunk: Shrunk | None, notes: list[str]) -> None:
    assert request.json is not None
    result = {
        "bundle": str(bundle.path),
        **{name: bundle.facts.get(name) for name in ("code", "step", "rank")},
        **trace.to_json(),
        "bundle_notes": notes,
        "shrink": None
        if shrunk is None
        else {"batch": shrunk.batch, "subsets": shrunk.subsets, "runs": shrunk.runs, "reason": shrunk.reason},
    }
    try:
        request.json.write_text(json.dumps(strict(result), allow_nan=False, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise UsageError(f"--json {str(request.json)!r} cannot be written: {error.strerror}") from None
