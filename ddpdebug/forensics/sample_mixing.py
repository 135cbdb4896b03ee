"""Tests once whether a model's outputs for a sample depend on the other samples of its batch, or on its place there.

In eval mode nothing may hand one sample's values to another: a position that is counted along the batch, a softmax over
it, attention with `batch_first` the wrong way round, a view where a transpose was meant. One rank runs the inner module
twice on the inputs of the last forward, in a disposable copy of the process: as they were, and with half of the samples
in other places and all others replaced by one of them.

Which dimension counts the samples is not written anywhere. It is the first where a loader's batch is as large, or
where the outputs have no positions any more; else only a model that mixes along both of the first two is reported.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from ddpdebug import torch_internals as internals
from ddpdebug.fingerprint import sampled_fingerprint
from ddpdebug.forensics.counted_batch import Batch, batch_of
from ddpdebug.isolation.child import TRIAL_SECONDS, Children
from ddpdebug.isolation.guard import Guard
from ddpdebug.nested import tensors_in
from ddpdebug.probes.forward_capture import ForwardCapture
from ddpdebug.schema.announcements import Announce, PaddingEffect, SampleMixing
from ddpdebug.schema.wire import from_json

#: Steps in which a model's inputs are looked at: full batches may come later, and inputs that never change may be the
#: nodes of one graph.
_STEPS = range(2, 12)


class Mixing:
    """Decides when to test each model, at most once, and its padding with it; see forensics/padded.py.

    On the training thread; `work` and `drop` as in `Leaks`.

    Args:
        children: copies of the process in which a model runs for us; None asks nothing.
        guard: its probes are silent there.
        announce: tells all ranks, from another thread.
        asks: returns whether models are asked.
    """

    def __init__(self, children: Children | None, guard: Guard, announce: Announce, asks: Callable[[], bool]) -> None:
        self._children, self._guard, self._announce, self._asks = children, guard, announce, asks
        self._given: dict[int, tuple[int, list[int]]] = {}  # by model: step, and fingerprints of its inputs
        self._over: set[int] = set()
        self._case: tuple[ForwardCapture, Batch] | None = None

    def loss(self, capture: ForwardCapture, loaded: int | None) -> None:
        """Take a step's loss; `loaded`: samples of a batch of the loader that is read."""
        module = capture.module()
        if module is None or self._case is not None or id(module) in self._over or not self._asks():
            return
        if capture.step >= _STEPS.stop:
            self._over.add(id(module))
        batch = batch_of(capture, loaded) if capture.step in _STEPS else None
        if batch is None:
            return
        given = [sampled_fingerprint(t)[0] for t in tensors_in((capture.args, capture.kwargs)) if t.dim() > 1]
        step, known = self._given.get(id(module), (capture.step, given))
        self._given[id(module)] = capture.step, given
        if step < capture.step and known != given:
            self._over.add(id(module))
            self._case = capture, batch

    def work(self, step: int) -> None:
        """Start the test in a copy of the process, if there is a case; its result is announced later."""
        if self._case is None:
            return
        (capture, batch), self._case = self._case, None
        if self._children is None or torch.cuda.is_initialized():
            return

        def work() -> Any:
            from ddpdebug.forensics.mixing_trial import look_at  # noqa: PLC0415 - in the copy alone

            internals.use_one_thread()
            self._guard.quiet = True
            return look_at(capture, batch)

        def take(answer: Any, _: str | None) -> None:
            mixing, padding = answer or (None, None)
            if mixing is not None and (told := from_json(SampleMixing, mixing)) is not None:
                self._announce(replace(told, step=step))
            if padding is not None and (seen := from_json(PaddingEffect, padding)) is not None:
                self._announce(replace(seen, step=step))

        self._children.run("probe:leaks", work, 4 * TRIAL_SECONDS, take)

    def drop(self) -> None:
        """Release the forward that is kept."""
        self._case = None
