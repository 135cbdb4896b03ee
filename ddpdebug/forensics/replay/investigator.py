"""Investigates a step in which this rank produced a non-finite value: replays it in a child, and writes the bundle.

The numbers of the bundle are written at once, before the optimizer changes the parameters. The forward runs once more
in a disposable copy of the process (see `isolation/child.py`), which the training thread does not wait for; what it
finds comes later, in a thread.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import CodeType
from typing import Any

import torch

from ddpdebug import torch_internals as internals
from ddpdebug.disk import Disk
from ddpdebug.forensics.loss.loss_graph import explain_loss, watch_backward
from ddpdebug.forensics.loss.loss_source import place_of
from ddpdebug.forensics.memory.oom import checkpoint_bytes
from ddpdebug.forensics.replay.bundle import LIMIT, BundleError, UnnamedBundle
from ddpdebug.isolation.child import REPLAY_SECONDS, Children
from ddpdebug.isolation.guard import Guard
from ddpdebug.isolation.user_code import is_users, shorten, user_frame
from ddpdebug.probes.forward_capture import ForwardCapture, ForwardCaptures
from ddpdebug.probes.loop_calls import Losses
from ddpdebug.probes.nonfinite_notes import Judgement, Looks, Replaying
from ddpdebug.probes.record import StepRecord
from ddpdebug.probes.step_state import StepState
from ddpdebug.probes.training_events import Bus, LossExamined, NonfiniteMade
from ddpdebug.redaction import Redactor
from ddpdebug.run_directory.reader import BUNDLES, RANKS
from ddpdebug.schema.details import LossBackward
from ddpdebug.schema.finding import strict
from ddpdebug.schema.wire import to_json

_MAX_BUNDLES = 4
_MAX_PLACES = 64
#: The copy ends by itself after `REPLAY_SECONDS`, where an operation comes to its end.
_MORE_SECONDS = 2.0


def investigate(  # noqa: PLR0913 - what a finding is known by
    captures: ForwardCaptures,
    take: Callable[[dict[str, Any]], object],
    children: Children | None,
    *,
    step: int,
    rank: int,
    directory: Path | None = None,
    code: str | None = None,
    facts: Mapping[str, Any] | None = None,
    limit: int = LIMIT,
    seconds: float = REPLAY_SECONDS,
    guard: Guard | None = None,
    redactor: Redactor | None = None,
    disk: Disk | None = None,
) -> None:
    """Replay the forwards of a step until one shows the fault.

    Called on the training thread, before the optimizer changes the parameters. Never raises.

    Args:
        take: called once with a small JSON value about the first culprit: now, or later in another thread.
        children: copies of the process for it; None runs nothing again.
        directory: the run directory; None writes no bundle, and neither does a limit of 0 bytes.
        code: of the finding, if it is known by now; it names the bundle. None takes what the replay suggests.
        facts: goes into the bundle (finding, scaler, command).
    """
    kept = captures.of_step(step) or list(captures.current)
    if not kept:
        take({"complete": False, "reason": "no forward of this step was kept"})
        return
    about = {**(facts or {}), "step": step, "rank": rank}
    bundle: UnnamedBundle | dict[str, Any] | None = None
    if directory is not None and limit > 0:
        previous = next((s for s in reversed(captures.previous) if s not in kept), None)
        options = {"limit": limit, "previous": previous, "redactor": redactor, "disk": disk}
        bundle = _begin_bundle(bundle_directory(directory, rank), _likeliest(kept), options)
    dropped = captures.dropped

    def look() -> dict[str, Any]:
        from ddpdebug.forensics.replay.first_bad import look_at  # noqa: PLC0415 - in the copy alone

        internals.use_one_thread()
        return look_at(kept, seconds, guard, code, facts or {}, dropped)

    def end(answer: dict[str, Any] | None, reason: str | None) -> None:
        found = {"complete": False, "reason": reason} if answer is None else answer["found"]
        document = {"code": code or "NUM", "replay": found} if answer is None else answer["document"]
        take(dict(strict(found | _publish(bundle, {**about, **document}))))

    reason = "--replay off" if children is None else _refusal()
    if children is not None and reason is None:
        reason = children.run("forensics:replay", look, seconds + _MORE_SECONDS, end)
    if reason is not None:
        end(None, reason)


def _refusal() -> str | None:
    """Return why this process cannot be copied."""
    if torch.cuda.is_initialized():
        return "nothing runs a second time in a process that uses CUDA, of which there can be no copy"
    return None


def _likeliest(kept: Sequence[ForwardCapture]) -> ForwardCapture:
    return next((capture for capture in kept if capture.suspected), kept[-1])


class Investigator:
    """Investigates a bad step on the rank that caused it, called by the probes on the training thread.

    Args:
        captures: keeps the forwards of the step.
        place: returns this rank's number and the run directory, as far as it is known.
        children: copies of the process in which a step runs again; None runs nothing again.
        found: called in another thread with the record of a step of which more has become known.
        limit: bytes of a bundle; 0 writes none.
        facts: what every bundle says of the run.
        redactor: hides what is secret in a bundle.
        disk: says whether there is room for one.
    """

    def __init__(  # noqa: PLR0913 - what it depends on
        self,
        bus: Bus,
        state: StepState,
        captures: ForwardCaptures,
        guard: Guard,
        place: Callable[[], tuple[int, Path | None]],
        children: Children | None,
        found: Callable[[StepRecord], object],
        *,
        limit: int = LIMIT,
        facts: Mapping[str, Any] | None = None,
        redactor: Redactor | None = None,
        disk: Disk | None = None,
    ) -> None:
        self._redactor, self._disk = redactor, disk or Disk()
        self._children, self._found = children, found
        self._state, self._captures, self._guard = state, captures, guard
        self._place, self._limit, self._facts = place, limit, dict(facts or {})
        self._places: dict[Any, dict[str, Any]] = {}
        bus.on("forensics:replay", NonfiniteMade, self.step)
        bus.on("forensics:loss", LossExamined, self.loss)

    def step(self, event: NonfiniteMade) -> None:
        """Replay a step whose forward or own gradients are non-finite."""
        record = event.record
        rank, directory = self._place()
        self._disk.needed = max(self._disk.needed, checkpoint_bytes(self._state))
        read = record.since.parts[Losses].scale
        scale = read() if read is not None else None
        replaying = record.parts[Judgement].replaying = Replaying()
        now = True

        def take(found: dict[str, Any]) -> None:
            replaying.found = found
            if not now:
                self._found(record)

        investigate(
            self._captures,
            take,
            self._children,
            step=record.step,
            rank=rank,
            directory=directory if self._limit else None,
            facts={**self._facts, "loss_scale": scale, "loss": _loss_alone(record)},
            limit=self._limit or LIMIT,
            guard=self._guard,
            redactor=self._redactor,
            disk=self._disk,
        )
        now = False

    def loss(self, event: LossExamined) -> None:
        """Name the operation of the loss expression that made a loss non-finite; called before its backward.

        Of a finite loss watch the backward instead, and note in `looks` the operation that spoils its gradient.
        """
        captures, loss, looks = self._captures.current, event.loss, event.looks
        if not captures or not captures[-1].ended:
            return
        capture = captures[-1]
        model, called = capture.module, (capture.called_at, capture.caller)
        if event.finite:

            def tell(found: dict[str, Any]) -> None:  # belongs to the graph, which may live long: holds no input
                looks.loss_backward = LossBackward(**self._placed(found, model(), *called))

            watch_backward(loss, capture.after, self._guard, tell)
        elif looks.loss is not None and (found := explain_loss(loss, capture.after)) is not None:
            looks.loss = replace(looks.loss, **self._placed(found, model(), *called))

    def _placed(
        self,
        found: dict[str, Any],
        module: torch.nn.Module | None,
        at: tuple[str, int] | None,
        caller: tuple[CodeType, Mapping[str, Any]] | None,
    ) -> dict[str, Any]:
        """Add the line of an operation of the loss expression, as far as the source shows it."""
        frame, kinds, index = user_frame(), found.pop("nodes"), found.pop("index")
        key = (None if frame is None else (frame.f_code, frame.f_lineno), at, tuple(kinds), index)
        if key not in self._places and len(self._places) < _MAX_PLACES:
            models = [m for m in (module, *(w.ref() for w in self._state.wrappers)) if m is not None]
            place = self._guard.run("forensics:loss_source", place_of, frame, kinds, index, models, at, caller)
            self._places[key] = place.fields() if place is not None else {}
        operands = tuple(found.pop("operands"))
        return {"operation": found.pop("node"), **found, "operands": operands, **self._places.get(key, {})}


def bundle_directory(directory: Path, rank: int) -> Path:
    """Return the directory of a rank's bundles: rank 0 writes to the shared folder, others to their own."""
    return directory / BUNDLES if rank == 0 else directory / RANKS / str(rank) / BUNDLES


def _loss_alone(record: StepRecord) -> dict[str, Any] | None:
    """Return what was found of a loss that is to blame itself: the model has given it finite numbers."""
    looks = record.since.parts[Looks]
    if False in {looks.output_finite, record.parts[Judgement].detail.output_finite}:
        return None
    if looks.loss_backward is not None:
        return {"expression": looks.loss_line, **to_json(looks.loss_backward)}
    return None if looks.loss is None else dict(to_json(looks.loss))


def _begin_bundle(parent: Path, capture: ForwardCapture, options: Mapping[str, Any]) -> UnnamedBundle | dict[str, Any]:
    """Write the numbers of a bundle; return it, or why there is none."""
    try:
        if parent.is_dir() and sum(1 for _ in parent.iterdir()) >= _MAX_BUNDLES:
            return _no_bundle(f"{_MAX_BUNDLES} bundles are enough")
        return UnnamedBundle(parent, capture, **options)
    except BundleError as error:
        return _no_bundle(str(error))
    except Exception as error:
        if is_users(error):
            raise
        return _no_bundle(f"{type(error).__name__}: {error}")


def _publish(bundle: UnnamedBundle | dict[str, Any] | None, document: Mapping[str, Any]) -> dict[str, Any]:
    """Complete the bundle; return its path, or why there is none."""
    if not isinstance(bundle, UnnamedBundle):
        return bundle or {}
    name = f"{document['code']}-step{document['step']}-rank{document['rank']}"
    try:
        return {"bundle": shorten(str(bundle.publish(name, document))), "bundle_reason": None}
    except BundleError as error:
        return _no_bundle(str(error))


def _no_bundle(reason: str) -> dict[str, Any]:
    return {"bundle": None, "bundle_reason": reason[:300]}
