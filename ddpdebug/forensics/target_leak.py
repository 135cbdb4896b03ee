"""Tests once whether a language model's output depends on the token to be predicted: one forward with another token.

Nothing happens before the loss is a small share of what it was at first and the targets turn out to be the inputs,
moved by one position, or before they are the inputs themselves in two early steps; where every step is checked the
fourth step is early enough for both. Then the inner module runs twice in
eval mode on the inputs of the last forward, on one rank, without gradients and in the way of a replay: in a disposable
copy of the process, and ended by any operation that would communicate.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from ddpdebug import torch_internals as internals
from ddpdebug.devices import arrival, captures
from ddpdebug.forensics.forward_trial import SECONDS, Operations, again, prepared
from ddpdebug.forensics.replay.tracer import Stopped
from ddpdebug.isolation.child import Children
from ddpdebug.isolation.foreign import is_a
from ddpdebug.isolation.guard import Guard
from ddpdebug.isolation.user_code import is_users, user_location
from ddpdebug.nested import leaves, tensors_in
from ddpdebug.probes.forward_capture import ForwardCapture
from ddpdebug.schema.announcements import Announce, TokenChange
from ddpdebug.schema.wire import from_json, to_json

#: A number that may still be on a device.
Value = Callable[[], float]

#: Positions that must be compared, and different tokens among them: fewer are equal by chance.
_LEAST, _KINDS = 8, 3
_MAX_TOKENS = 1 << 22
_KEPT_BYTES = 64 << 20


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
            internals.use_one_thread()
            self._guard.quiet = True
            return to_json(look(capture, known))

        def take(answer: Any, _: str | None) -> None:
            found = from_json(TokenChange, answer) if answer else None
            if found is not None:
                self._announce(replace(found, step=step, first_loss=first, loss=low, location=line))

        self._children.run("probe:leaks", work, 2 * SECONDS, take)

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
