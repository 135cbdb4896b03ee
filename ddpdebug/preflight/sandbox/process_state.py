"""What is process-wide and must be as before when the preflight is over: random numbers, modes, settings."""

from __future__ import annotations

import contextlib
import random
import signal
import sys
import threading
import types
from collections.abc import Iterator
from typing import Any

import torch

_DEVICES = ("cpu", "cuda")


class TimeUp(Exception):  # noqa: N818 - said to people as it is
    """A check took longer than it may."""


@contextlib.contextmanager
def preserved() -> Iterator[None]:
    """Put random states, default type, grad mode, autocast and the settings of determinism back bit for bit."""
    states = _random_states()
    dtype, grad = torch.get_default_dtype(), torch.is_grad_enabled()
    deterministic = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    cudnn = (torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark)
    casts = {device: (torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)) for device in _DEVICES}
    try:
        torch.set_grad_enabled(True)
        for device in casts:
            torch.set_autocast_enabled(device, False)
        yield
    finally:
        torch.set_default_dtype(dtype)
        torch.set_grad_enabled(grad)
        torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)
        torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = cudnn
        for device, (enabled, kind) in casts.items():
            torch.set_autocast_enabled(device, enabled)
            torch.set_autocast_dtype(device, kind)
        _put_back(states)


def _random_states() -> dict[str, Any]:
    numpy: Any = sys.modules.get("numpy")  # who has not loaded it has no state there
    return {
        "python": random.getstate(),
        "numpy": numpy.random.get_state() if isinstance(numpy, types.ModuleType) else None,
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() and torch.cuda.is_initialized() else [],
    }


def _put_back(states: dict[str, Any]) -> None:
    random.setstate(states["python"])
    if states["numpy"] is not None:
        sys.modules["numpy"].random.set_state(states["numpy"])
    torch.set_rng_state(states["torch"])
    if states["cuda"]:
        torch.cuda.set_rng_state_all(states["cuda"])


@contextlib.contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise TimeUp in the body after so many seconds, where that can be done without taking anybody's alarm."""
    usable = hasattr(signal, "SIGALRM") and threading.current_thread() is threading.main_thread()
    if not usable or signal.getitimer(signal.ITIMER_REAL) != (0.0, 0.0):
        yield
        return

    def stop(*_: Any) -> None:
        raise TimeUp(f"took more than {seconds:.0f} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
