"""The training loop's own draws from random generators, beside those of models: line, number, state.

Generators are read and never drawn from: torch's default one, that of the current CUDA device, Python's and NumPy's
global ones, and those that the loop holds in variables. Two readings that differ say that something drew in between.
Of a Mersenne twister the position in its block says how many numbers at least; of CUDA's generator no number is known.
"""

from __future__ import annotations

import ast
import random
import re
import statistics
import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, NamedTuple

import torch

from ddpdebug import fingerprint, source_lines
from ddpdebug.isolation.foreign import is_one_of
from ddpdebug.isolation.local_variables import local_values
from ddpdebug.isolation.process_state import RandomState
from ddpdebug.isolation.user_code import is_user_file, is_users, location, user_frame
from ddpdebug.probes.async_copy import LaterOne
from ddpdebug.probes.loss_line import scope_at
from ddpdebug.probes.recorder import Forwards
from ddpdebug.probes.step_state import StepState
from ddpdebug.probes.training_events import (
    BatchAwaited,
    BatchDelivered,
    Bus,
    ForwardBegan,
    ForwardEnded,
    ForwardFailed,
    StepClosing,
    Woken,
)
from ddpdebug.probes.values import raw_bytes
from ddpdebug.schema import announcements
from ddpdebug.schema.announcements import Announce, DrawingPlace
from ddpdebug.schema.details import hex_digest
from ddpdebug.torch_internals import is_plain, mersenne_position

_BLOCK = 624  # numbers that a Mersenne twister makes at once
_MAX_HELD, _MAX_FRAMES, _MAX_VARIABLES = 8, 4, 2000
_MAX_LINES, _MAX_SOURCE, _MAX_FUNCTIONS = 8, 20_000, 16
#: Numbers in a step that are drawn for something else than its samples, of which nothing is told.
_LEAST = 4
#: Checked steps in a row that are told of, and then each time four times as many.
_FIRST_TOLD = 16
#: Functions that draw what is computed with, and those that draw what to choose.
_VALUES = re.compile(
    "rand|randn|(rand|randn)_like|normal_?|bernoulli_?|uniform_?|random|standard_normal|gauss|betavariate|beta|dirichlet"
    "|poisson|(exponential|log_normal|cauchy|geometric)_?|gamma|laplace|r?sample|dropout|triangular|lognormal|binomial"
)
_CHOICES = re.compile(
    "random_|randint|randint_like|randperm|multinomial|permutation|permuted|choices?|shuffle|integers|randrange"
    "|random_integers|getrandbits"
)
#: NumPy's default generator, PCG64, is a linear congruential one of 128 bits.
_MULTIPLIER, _MASK = 0x2360ED051FC65DA44385DF649FCCF645, (1 << 128) - 1


class _Look(NamedTuple):
    """A generator's state: its block of numbers, how many of these are used, and what seeded it as far as it tells."""

    block: Any
    used: int | None = None  # None: no number of draws is known
    seed: int | None = None
    congruential: bool = False  # `block` is the increment and `used` the state

    def numbers_to(self, later: _Look) -> int | None:
        """Return how many numbers were drawn at least; None where that is not known."""
        if self.used is None or later.used is None:
            return None
        if self.congruential:
            return _distance(self.used, later.used, self.block) if self.block == later.block else None
        if self.block == later.block:
            return later.used - self.used
        if later.used == _BLOCK:  # seeded, and nothing drawn since
            return 0
        return later.used + (_BLOCK - self.used if self.seed == later.seed else 0)

    def digest(self) -> int:
        """Return a digest of the whole state."""
        return fingerprint.of_text(repr((self.block, self.used, self.seed)))


@dataclass(slots=True)
class _Streak:
    steps: int = 0
    numbers: deque[int | None] = field(default_factory=lambda: deque(maxlen=_FIRST_TOLD))

    def usual(self) -> int | None:
        """Return the median of the newest numbers, None where one is not known."""
        known = [number for number in self.numbers if number is not None]
        return int(statistics.median(known)) if len(known) == len(self.numbers) else None


@dataclass(slots=True)
class _Step:
    """The draws of the step in progress, by place and generator."""

    drawn: dict[tuple[DrawingPlace, str], int | None] = field(default_factory=dict)
    sizes: list[tuple[int, int]] = field(default_factory=list)  # of the tensors that the model is given: rows, elements
    loaded: bool = False  # a DataLoader has delivered a batch


class RandomDraws:
    """Reads the generators around the parts of checked steps, and announces draws that recur in many steps.

    Args:
        announce: tells all ranks.
        due: tells for (optimizer, step) whether the sampled tier runs.
    """

    def __init__(self, bus: Bus, state: StepState, announce: Announce, due: Callable[[int, int], bool]) -> None:
        self._state, self._announce, self._due = state, announce, due
        self._before: dict[str, _Look] | None = None  # the newest reading, where the loop was followed since then
        self._step = _Step()
        self._streaks: dict[tuple[DrawingPlace, str], _Streak] = {}
        self._batch: list[LaterOne] = []  # digests of what the model was given in the step before
        self._held: dict[str, Callable[[], Any]] | None = None  # by name; a call gives None for one that is gone
        self._told = 0
        for event, look in (
            (BatchAwaited, self._awaits),
            (BatchDelivered, self._gets),
            (ForwardBegan, self._begins),
            (ForwardEnded, self._ends),
            (ForwardFailed, self._fails),
            (StepClosing, self._closes),
            (Woken, self._woken),
        ):
            bus.on("probe:draws", event, look)

    def release(self) -> None:
        """Drop the generators that were found in variables."""
        self._held, self._before = {}, None

    def _follows(self) -> bool:
        return self._state.world > 1 and self._state.checking

    def _awaits(self, _: BatchAwaited) -> None:
        if self._follows():
            self._read("loop")

    def _gets(self, _: BatchDelivered) -> None:
        if self._follows():
            self._read("loading")
            self._step.loaded = True

    def _begins(self, event: ForwardBegan) -> None:
        if not self._follows() or not torch.is_grad_enabled():
            return
        if self._held is None:
            self._held = {name: _weakly(generator) for name, generator in _held(user_frame())}
        self._read("loop")
        self._step.sizes += [_size(tensor) for tensor in event.tensors()]

    def _ends(self, _: ForwardEnded) -> None:
        if self._follows() and torch.is_grad_enabled():
            self._read("forward")

    def _fails(self, _: ForwardFailed) -> None:
        self._before = None

    def _woken(self, _: Woken) -> None:
        self._step, self._before = _Step(), self._now() if self._follows() else None

    def _read(self, place: DrawingPlace) -> None:
        now, before = self._now(), self._before
        self._before = now
        for name, look in now.items():
            old = (before or {}).get(name)
            if old is None or old == look:
                continue
            numbers, known = old.numbers_to(look), self._step.drawn.get((place, name), 0)
            self._step.drawn[place, name] = None if numbers is None or known is None else numbers + known

    def _closes(self, event: StepClosing) -> None:
        """Count the steps in a row, and announce many; begin the next step."""
        record, step = event.record, self._step
        self._step = _Step()
        next_is_checked = self._due(event.watch.index, record.step + 1)
        if not self._follows():
            self._before = self._now() if next_is_checked and self._state.world > 1 else None
            return
        self._read_into(step)
        if not next_is_checked:
            self._before = None
        forwards = record.since.parts.get(Forwards)
        batch = [] if forwards is None else list(forwards.batch)
        drawn = {key: n for key, n in step.drawn.items() if n is None or n >= _LEAST}
        if record.since.cut or not batch or len(batch) != len(step.sizes):
            return
        self._streaks = {key: self._streaks.get(key) or _Streak() for key in drawn}
        for key, streak in self._streaks.items():
            streak.steps += 1
            streak.numbers.append(drawn[key])
        longest = max((streak.steps for streak in self._streaks.values()), default=0)
        before, self._batch = self._batch, batch
        if longest == _FIRST_TOLD * 4**self._told:  # a few times in a run: what is on a device is waited for then
            self._told += 1
            values = [read() for read in batch]
            pairs = zip(before, values, strict=False)
            changed = [len(before) == len(batch) and read() != new for read, new in pairs]
            self._tell(record.step, step, values, changed)

    def _read_into(self, step: _Step) -> None:
        ahead, self._step = self._step, step
        self._read("loop")
        self._step = ahead

    def _tell(self, number: int, step: _Step, batch: list[int], changed: list[bool]) -> None:
        inputs = [
            announcements.Input(digest=hex_digest(digest), rows=rows, elements=elements, changed=new)
            for digest, (rows, elements), new in zip(batch, step.sizes, changed or [False] * len(batch), strict=False)
        ]
        states = self._before or self._now()
        draws = [
            announcements.Draws(
                place=place,
                generator=name,
                state=hex_digest(states[name].digest()),
                numbers=streak.usual(),
                steps=streak.steps,
            )
            for (place, name), streak in sorted(self._streaks.items())
            if name in states
        ]
        calls = (*_lines(user_frame()),)[:_MAX_LINES]
        told = announcements.RandomDraws(
            step=number, draws=tuple(draws), inputs=tuple(inputs), loaded=step.loaded, calls=calls
        )
        self._announce(told)

    def _now(self) -> dict[str, _Look]:
        state = RandomState.now()
        found = {}
        if state.cpu is not None:
            found["torch"] = _twister(raw_bytes(state.cpu))
        if state.cuda is not None:
            found[f"cuda:{state.device}"] = _Look(raw_bytes(state.cuda))
        version, words, _ = state.python
        found["random"] = _Look(words[:-1], words[-1]) if version == 3 else _Look(words)
        if type(state.numpy) is tuple:  # of the usual generator
            found["numpy"] = _Look(state.numpy[1].tobytes(), int(state.numpy[2]))
        for name, held in list((self._held or {}).items()):
            if (generator := held()) is None:
                del self._held[name]  # type: ignore[union-attr]  # there is one in it
            else:
                found[name] = _look_at(generator)
        return found


def _size(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the rows and elements of a tensor; (0, 0) of one whose memory has another layout."""
    if not is_plain(tensor):
        return 0, 0
    return len(tensor) if tensor.dim() else 1, tensor.numel()


def _twister(raw: bytes) -> _Look:
    """Return the state of a generator of torch on the CPU."""
    known = mersenne_position(raw)
    return _Look(raw) if known is None else _Look(*known)


def _look_at(generator: Any) -> _Look:
    """Return the state of a generator that a variable holds."""
    if isinstance(generator, torch.Generator):
        raw = raw_bytes(generator.get_state())
        return _twister(raw) if generator.device.type == "cpu" else _Look(raw)
    if isinstance(generator, random.Random):
        words = generator.getstate()[1]
        return _Look(words[:-1], words[-1])
    state = generator.bit_generator.state
    if state.get("bit_generator") == "PCG64":
        return _Look(state["state"]["inc"], state["state"]["state"], congruential=True)
    return _Look(repr(state))


def _distance(state: int, later: int, increment: int) -> int:
    """Return after how many steps of a linear congruential generator its state is another one."""
    multiplier, bit, steps = _MULTIPLIER, 1, 0
    while state != later:
        if (state ^ later) & bit:
            state = (state * multiplier + increment) & _MASK
            steps |= bit
        bit <<= 1
        multiplier, increment = (multiplier * multiplier) & _MASK, ((multiplier + 1) * increment) & _MASK
    return steps


class _Last:
    """Holds a generator that cannot be referred to weakly, as NumPy's, until nobody else does."""

    __slots__ = ("_generator",)

    def __init__(self, generator: Any) -> None:
        self._generator = generator

    def __call__(self) -> Any:
        """Return the generator, None once it is let go."""
        if self.references() <= _OWN_REFERENCES:
            self._generator = None
        return self._generator

    def references(self) -> int:
        """Return how many there are to it, by the count of this Python."""
        return sys.getrefcount(self._generator)


_OWN_REFERENCES = _Last(object()).references()


def _weakly(generator: Any) -> Callable[[], Any]:
    try:
        return weakref.ref(generator)
    except TypeError:
        return _Last(generator)


def _kinds() -> tuple[type, ...]:
    numpy = sys.modules.get("numpy.random")
    return (torch.Generator, random.Random, *(() if numpy is None else (numpy.Generator,)))


def _held(frame: FrameType | None) -> Iterator[tuple[str, Any]]:
    """Yield the generators in the variables of the user's functions that run, by name."""
    kinds, seen, count = _kinds(), set[int](), 0
    while frame is not None and count < _MAX_FRAMES:
        if is_user_file(frame.f_code.co_filename):
            count += 1
            variables: Mapping[str, Any] = {**frame.f_globals, **local_values(frame)}
            for name, value in list(variables.items())[:_MAX_VARIABLES]:
                if is_one_of(value, kinds) and id(value) not in seen and len(seen) < _MAX_HELD:
                    seen.add(id(value))
                    yield f"{name} ({type(value).__module__.partition('.')[0]})", value
        frame = frame.f_back


# --- the lines --------------------------------------------------------------------------------------------------------


def _lines(frame: FrameType | None) -> Iterator[announcements.DrawingLine]:
    """Yield the calls in the training loop, and in what it calls in the same file, that draw numbers by their name.

    The loop is the innermost one around the running line of one of the user's functions; that it stands in none, as
    with a trainer of a library, tells nothing of what the function does beside it.
    """
    waiting: list[tuple[str, ast.AST]] = []
    trees: dict[str, ast.Module] = {}
    for _ in range(_MAX_FRAMES):
        if frame is None or (tree := _source(file := frame.f_code.co_filename)) is None:
            return
        trees[file] = tree
        inside = scope_at(tree, frame.f_lineno)
        loops = [n for n in ast.walk(inside) if isinstance(n, ast.For | ast.While) and _spans(n, frame.f_lineno)]
        waiting.append((file, max(loops, key=lambda loop: loop.lineno, default=inside)))
        if loops:
            break
        frame = None if frame.f_back is None else user_frame(frame.f_back)
    else:
        return
    for file, part in waiting:
        functions = {n.name: n for n in ast.walk(trees[file]) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)}
        for call in ast.walk(part):
            if not isinstance(call, ast.Call):
                continue
            name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
            if name in functions:
                if (file, functions[name]) not in waiting and len(waiting) < _MAX_FUNCTIONS:
                    waiting.append((file, functions[name]))
            elif (chooses := _chooses(call, name)) is not None:
                place, family = location(file, call.lineno), _family(call)
                yield announcements.DrawingLine(location=place, function=name, family=family, chooses=chooses)


def _chooses(call: ast.Call, name: str) -> bool | None:
    """Return whether a call draws what to choose; None where it draws nothing, or from a generator of its own."""
    if any([word.arg == "generator" for word in call.keywords]):
        return None
    if name == "sample" and getattr(getattr(call.func, "value", None), "id", "") == "random":
        return True
    return False if _VALUES.fullmatch(name) else True if _CHOICES.fullmatch(name) else None


def _family(call: ast.Call) -> str:
    """Say from which generator a call draws: "numpy", "random", the variable that holds it, or else "torch"."""
    owner = ast.unparse(call.func.value) if isinstance(call.func, ast.Attribute) else ""
    if owner.endswith(("np.random", "numpy.random")):
        return "numpy"
    return owner if owner.isidentifier() and owner != "torch" else "torch"


def _source(file: str) -> ast.Module | None:
    source = source_lines.getlines(file)
    if not source or len(source) > _MAX_SOURCE:
        return None
    try:
        return ast.parse("".join(source))
    except (SyntaxError, ValueError) as error:
        if is_users(error):
            raise
        return None


def _spans(node: ast.For | ast.While, line: int) -> bool:
    return node.lineno <= line <= int(node.end_lineno or node.lineno)
