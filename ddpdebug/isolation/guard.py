"""Isolation and timing of probes: a probe that fails is switched off and reported once, and the job goes on."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

from ddpdebug import torch_internals as internals
from ddpdebug.clock import time
from ddpdebug.devices import failure
from ddpdebug.errors import NEEDS, text_of
from ddpdebug.isolation.user_code import is_users, users_error

#: Of this thread; a look at each takes 30 ns.
_dispatch_modes, _function_modes = internals.dispatch_modes, internals.function_modes
_transforms = internals.transform
_gradients = torch.is_grad_enabled
#: Of this thread; to enter and leave it takes 200 ns.
_as_plain, _tell_profilers = internals.as_plain, internals.tell_profilers


class _Inside:
    """What runs in a thread: how many probes within each other, and since when the outermost."""

    __slots__ = ("depth", "entered")

    def __init__(self) -> None:
        self.depth, self.entered = 0, 0.0


class _Threads(threading.local):
    """An `_Inside` of each thread; one look here is cheaper than one for each number."""

    def __init__(self) -> None:
        self.inside = _Inside()


class _Recorded(threading.local):
    """Whether profilers are told what a thread does outside of probes."""

    outside = True


_recorded = _Recorded()


def keep_unrecorded() -> None:
    """Hide this background thread from the script's profilers and execution traces."""
    _recorded.outside = False
    _tell_profilers(False)


#: The part that sees captures of CUDA graphs begin and end.
CAPTURES = "probe:captures"
#: Parts of the close that compute on devices. All others close while a graph is captured, too: its end may never come.
_ON_DEVICES = frozenset({"close:by-hand", "close:last-state", "close:optimizers", "close:memory"})
#: Parts that look at tensors, or let go of them: those of a device that has failed are left alone for ever.
_OF_TENSORS = ("probe:", "event:", "forensics:", "close:hooks", *_ON_DEVICES)
#: Parts that look at what the job does. What becomes a graph trains nothing, and must not have our questions in it.
_OF_STEPS = ("probe:", "event:", "forensics:")

#: Parts that put a mode of ours on the stack, or take it off. All others stand aside of it, as of the user's: a number
#: that torch holds as a tensor comes out of a mode as a number, which no operation takes.
_OF_OWN_MODES = ("close:", "forensics:memory")


class Guard:
    """Runs probe code, counts the time spent in it (`seconds`), and remembers the parts that are off.

    What the user's own code raises while a probe happens to run (a signal handler, an exception that another thread
    sent) is the user's, and goes on its way. Modes that the user has put over torch's operations, profilers and classes
    of tensors do not see those of a probe, and nothing is looked at while `torch.func` transforms what runs,
    or while it is made a graph.

    Args:
        on_trouble: called once per failing part with (part, message).
    """

    def __init__(self, on_trouble: Callable[[str, str], None]) -> None:
        self.seconds = 0.0
        self.off: set[str] = set()
        self.quiet = False  # a replay is running: what it does is no part of the training
        self.capturing = 0  # CUDA graphs: what would run now, in autograd's threads too, would go along or spoil one
        self.own_modes = 0  # dispatch modes of ours that lie on the stack
        self.entries: Any = None  # what runs under it, see `entries.py`
        self._on_trouble = on_trouble
        self._when_cut: list[Callable[[], None]] = []
        self._when_off: dict[str, list[Callable[[], None]]] = {}
        self._threads = _Threads()

    @property
    def active(self) -> bool:
        """Whether a probe runs in this thread."""
        return self._threads.inside.depth > 0

    def elapsed(self) -> float:
        """Return the seconds spent in probes so far, the current one included."""
        inside = self._threads.inside
        return self.seconds + (time.perf_counter() - inside.entered if inside.depth else 0.0)

    def run(self, part: str, probe: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Return `probe(*args, **kwargs)`, or None when the part is off or fails."""
        if part in self.off or (self.quiet and part.startswith("probe:")):
            return None
        if (self.capturing or failure.failed) and self._is_of_device(part):
            return None
        own = self.own_modes if part.startswith(_OF_OWN_MODES) else 0
        if _dispatch_modes() > own or _function_modes() or _transforms() is not None:
            if not internals.can_step_aside() or (part.startswith(_OF_STEPS) and internals.is_made_a_graph()):
                return None
            args, probe = (probe, *args), internals.aside_of_modes
        inside, gradients = self._threads.inside, _gradients()
        outermost = inside.depth == 0
        inside.depth += 1  # a signal is handled after a call at the earliest: nothing stands between this and `try`
        try:
            if not outermost:
                return probe(*args, **kwargs)
            inside.entered = time.perf_counter()
            _tell_profilers(False)
            with _as_plain():
                return probe(*args, **kwargs)
        except Exception as error:
            _put_back(gradients)
            users = users_error(error)
            if users is error:
                self.cut()
                raise
            self._fail_or_pass_on(part, error, users)
            return None
        except BaseException:  # Ctrl-C, the end of the process: never ours
            _put_back(gradients)
            self.cut()
            raise
        finally:
            inside.depth -= 1
            if outermost:
                _tell_profilers(_recorded.outside)
                self.seconds += time.perf_counter() - inside.entered

    def _is_of_device(self, part: str) -> bool:
        """Whether a part must not run while a graph is captured, or once a device has failed."""
        if failure.failed and part.startswith(_OF_TENSORS):
            return True
        of_devices = part in _ON_DEVICES or not part.startswith("close")
        return self.capturing > 0 and part != CAPTURES and of_devices

    def contain(self, part: str, call: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Run a call that is no probe, in any thread; return its result, or None when the part is off or fails.

        Its time does not count, and torch is not asked for modes.
        """
        if part in self.off:
            return None
        try:
            return call(*args, **kwargs)
        except Exception as error:
            users = users_error(error)
            if users is error:
                raise
            self._fail_or_pass_on(part, error, users)
            return None

    def _fail_or_pass_on(self, part: str, error: Exception, users: BaseException | None) -> None:
        """Switch a part off, or raise the user's error in whose place ours has come."""
        if users is None:
            self.fail(part, error)
            return
        self.cut()
        context, suppressed = users.__context__, users.__suppress_context__
        try:
            raise users
        finally:
            users.__context__, users.__suppress_context__ = context, suppressed

    def cut(self) -> None:
        """Have half-finished notes discarded."""
        for call in self._when_cut:
            try:
                call()
            except Exception as error:
                if is_users(error):
                    raise
                self.fail("probe:cut", error)

    def when_cut(self, call: Callable[[], None]) -> None:
        """Register a call for the moment when a user's exception interrupts a probe: to discard half-finished notes."""
        self._when_cut.append(call)

    def forgive(self, seconds: float) -> None:
        """Subtract time spent waiting for other ranks: it is no cost of probing."""
        self.seconds -= seconds

    def tell(self, part: str, message: str) -> None:
        """Report something that is not observed."""
        try:
            self._on_trouble(part, message)
        except Exception as error:
            if is_users(error):
                raise

    def fail(self, part: str, error: BaseException) -> None:
        """Switch a part off and report it once; parts that need it are switched off with it.

        A device that has failed is reported by itself, and once for all that reads it; nothing is taken away then.
        """
        if failure.note(error):
            self.off.add(part)
        else:
            self._switch_off(part, text_of(error))

    def when_off(self, part: str, call: Callable[[], None]) -> None:
        """Register a call for the moment when a part is switched off: to remove its hooks and half-finished notes."""
        self._when_off.setdefault(part, []).append(call)

    def needs(self, part: str, *others: str) -> None:
        """Have a part switched off with any of the others: without their data it would judge half of it."""
        for other in others:
            text = NEEDS.format(other)
            self.when_off(other, lambda text=text: self._switch_off(part, text))  # type: ignore[misc]  # its own text

    def _switch_off(self, part: str, text: str) -> None:
        if part not in self.off:
            self.off.add(part)
            self.tell(part, text)
            for call in self._when_off.get(part, ()):
                self.run(f"close:{part}", call)


def _put_back(gradients: bool) -> None:  # noqa: FBT001 - the state itself
    """Let autograd record, or not, as before: an exception may come between the two halves of a `torch.no_grad()`."""
    if _gradients() is not gradients:
        torch.set_grad_enabled(gradients)


def contained(call: Callable[..., Any]) -> Callable[..., Any]:
    """Return a call for a background thread whose failures are all ordinary exceptions with a text.

    `SystemExit` would end the thread without a word.
    """

    def run(*args: Any) -> Any:
        try:
            return call(*args)
        except BaseException as error:
            if isinstance(error, Exception) and text_of(error) != type(error).__name__:
                raise
            raise RuntimeError(text_of(error)) from error

    return run
