"""Tests once whether a language model's output depends on the token to be predicted: one forward with another token.

Nothing happens before the loss is a small share of what it was at first and the targets turn out to be the inputs,
moved by one position, or before they are the inputs themselves in two early steps; where every step is checked the
fourth step is early enough for both. Then the inner module runs twice in
eval mode on the inputs of the last forward, on one rank, without gradients and in the way of a replay: in a disposable
copy of the process, and ended by any operation that would communicate.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from ddpdebug import torch_internals as internals
from ddpdebug.devices import arrival, captures
from ddpdebug.forensics.target_relation import Relation, is_moved_twice, relation, texts
from ddpdebug.isolation.child import TRIAL_SECONDS, Children
from ddpdebug.isolation.guard import Guard
from ddpdebug.isolation.user_code import user_location
from ddpdebug.probes.forward_capture import ForwardCapture
from ddpdebug.schema.announcements import Announce, TokenChange
from ddpdebug.schema.wire import from_json, to_json

#: A number that may still be on a device.
Value = Callable[[], float]


class Leaks:
    """Decides when to test each model, at most once. On the training thread.

    Args:
        children: copies of the process in which a model runs for us; None asks nothing.
        guard: its probes are silent there.
        announce: tells all ranks, from another thread.
        asks_all: returns whether models are asked in their first steps, however high their loss is.
    """

    def __init__(
        self, children: Children | None, guard: Guard, announce: Announce, asks_all: Callable[[], bool] = lambda: False
    ) -> None:
        self._children, self._guard, self._announce, self._asks_all = children, guard, announce, asks_all
        self._levels: dict[int, _Level] = {}
        self._case: tuple[ForwardCapture, Relation, float, float] | None = None
        self._line: str | None = None  # that gave the case's loss to backward

    def loss(
        self, capture: ForwardCapture, target: torch.Tensor | None, ignored: int, reader: Callable[[], Value]
    ) -> None:
        """Take the target of a step's loss; its value is read in a later step, when the device has it ready."""
        module = capture.module()
        if module is None or target is None or not texts(capture, target):
            return
        level = self._levels.setdefault(id(module), _Level())
        if level.over or level.step == capture.step:
            return
        level.step = capture.step
        if not level.ready():
            return
        low = level.take(reader(), _arrival(target.device))
        early = low is None and level.is_early()
        if (low is None and not early) or self._case is not None:
            return
        known = relation(capture, target, ignored)
        if early:
            twice = is_moved_twice(capture, target, ignored)
            known = None if twice else known
            level.unmoved = level.unmoved + 1 if twice or not (known is None or known.moved) else 0
            if level.unmoved < _EARLY_LOOKS and not (known is not None and known.moved and self._asks_all()):
                return
            if twice:
                step, length = capture.step, target.numel() // len(texts(capture, target)[0])
                self._announce(TokenChange(step=step, targets="twice", length=length, location=user_location()))
        level.over = not (early and known is not None and known.moved)  # else it is asked again once its loss is low
        if known is not None:
            self._case = capture, known, level.first, level.last if low is None else low
            self._line = user_location()

    def work(self, step: int) -> None:
        """Start the test in a copy of the process, if there is a case; its result is announced later."""
        if self._case is None:
            return
        (capture, known, first, low), self._case, line = self._case, None, self._line
        if self._children is None or torch.cuda.is_initialized():
            return

        def work() -> Any:
            from ddpdebug.forensics.token_trial import look  # noqa: PLC0415 - in the copy alone

            internals.use_one_thread()
            self._guard.quiet = True
            return to_json(look(capture, known))

        def take(answer: Any, _: str | None) -> None:
            found = from_json(TokenChange, answer) if answer else None
            if found is not None:
                self._announce(replace(found, step=step, first_loss=first, loss=low, location=line))

        self._children.run("probe:leaks", work, 2 * TRIAL_SECONDS, take)

    def drop(self) -> None:
        """Release the forward that is kept."""
        self._case = None


def _arrival(device: torch.device) -> Callable[[], bool]:
    """Return what tells, without waiting, whether a device has done what it was given until now."""
    if device.type == "cpu":
        return lambda: True
    return partial(captures.is_reached, arrival(device))


#: It is asked below this share of the loss's first value, which must have been one of several classes: asking costs
#: two forwards, and of a loss that is higher nobody knows what the model has learned to look at.
_SHARE, _FIRST = 0.1, 0.5
#: So many looks at the loss; what comes that low later has been learned.
_LOOKS = 4000
#: After so many looks the targets are compared with the inputs, in so many steps one after the other: where nobody has
#: moved them, the loss falls for a reason of its own, and how far does not matter.
_EARLY, _EARLY_LOOKS = 3, 2


class _Level:
    """The fall of one model's loss since its first value."""

    def __init__(self) -> None:
        self.first = 0.0
        self.over = False
        self.step = -1
        self.ready: Callable[[], bool] = lambda: True  # the loss before can be read without waiting
        self.unmoved = 0  # looks in a row in which the targets were the inputs themselves
        self.last = 0.0
        self._looks = 0
        self._pending: Value | None = None

    def is_early(self) -> bool:
        """Whether targets that were not moved are looked for now."""
        return not self.over and self._looks == _EARLY + self.unmoved

    def take(self, value: Value, ready: Callable[[], bool]) -> float | None:
        """Return the loss before this one if it is low enough to ask."""
        self.ready = ready
        pending, self._pending = self._pending, value
        if pending is None:
            return None
        last = self.last = pending()
        self._looks += 1
        self.first = self.first if self._looks > 1 else last
        self.over = self._looks >= _LOOKS or not self.first > _FIRST
        return last if not self.over and last < _SHARE * self.first else None
