"""Process-wide state to be restored: random generators, grad mode, autocast, default dtype.

Used around what runs beside the training: replays, probes with a batch of their own, checks on copies, tests.
"""

from __future__ import annotations

import contextlib
import importlib
import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from ddpdebug.torch_internals import unlisted

_DEVICES = ("cpu", "cuda")


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomState:
    """The state of the generators that a forward may use; None for those that were not kept.

    Args:
        cpu: torch's default generator's, as `torch.get_rng_state` returns it (bytes).
        cuda: that of the CUDA device number `device`, which was the current one.
        others: those of further CUDA devices, by number.
        python: as `random.getstate` returns it.
        numpy: as `numpy.random.get_state` returns it.
    """

    cpu: torch.Tensor | None = None
    cuda: torch.Tensor | None = None
    device: int = 0
    others: tuple[tuple[int, torch.Tensor], ...] = ()
    python: Any = None
    numpy: Any = None

    @classmethod
    def now(cls, *, all_devices: bool = False) -> RandomState:
        """Copy the present states, of CUDA's current device or of all devices; draws nothing."""
        numpy = sys.modules.get("numpy.random")  # who has not loaded it has no state there
        cuda, device, others = None, 0, []
        if torch.cuda.is_available() and torch.cuda.is_initialized() and not torch.cuda.is_current_stream_capturing():
            device = torch.cuda.current_device()
            cuda = unlisted(torch.cuda.get_rng_state(device))
            numbers = range(torch.cuda.device_count()) if all_devices else ()
            others = [(number, unlisted(torch.cuda.get_rng_state(number))) for number in numbers if number != device]
        return cls(
            cpu=unlisted(torch.default_generator.get_state()),
            cuda=cuda,
            device=device,
            others=tuple(others),
            python=random.getstate(),
            numpy=None if numpy is None else _numpy_state(numpy),
        )

    def restore(self) -> None:
        """Restore the kept states; a generator that was not used since is left alone."""
        if self.cpu is not None and not torch.equal(torch.default_generator.get_state(), self.cpu):
            torch.default_generator.set_state(self.cpu)
        if self.cuda is not None and torch.cuda.is_available():
            for number, state in ((self.device, self.cuda), *self.others):
                torch.cuda.set_rng_state(state, number)
        if self.python is not None and random.getstate() != self.python:
            random.setstate(self.python)
        if self.numpy is not None:
            numpy = importlib.import_module("numpy.random")
            now = _numpy_state(numpy)  # of another generator, if the script has set one meanwhile
            if type(now) is type(self.numpy) and _comparable(now) != _comparable(self.numpy):
                numpy.set_state(self.numpy)


def _numpy_state(numpy: Any) -> Any:
    """Return the state of NumPy's generator: a tuple of the usual one, a table of another one, which cannot be such."""
    state = numpy.get_state(legacy=False)
    if state["bit_generator"] != "MT19937":
        return state
    return "MT19937", state["state"]["key"], state["state"]["pos"], state["has_gauss"], state["gauss"]


def _comparable(state: Any) -> Any:
    """Return a state of NumPy's generator whose parts can be compared."""
    if type(state) is dict:
        return repr(state)
    return tuple([part.tobytes() if hasattr(part, "tobytes") else part for part in state])


@dataclass(frozen=True, slots=True, kw_only=True)
class Autocast:
    """The autocast state around a forward for a device type: enabled or not, and the dtype."""

    device: str
    enabled: bool
    dtype: torch.dtype

    @classmethod
    def now(cls, device: str) -> Autocast:
        """Read the present autocast state for a device type (`cpu`, `cuda`)."""
        enabled = torch.is_autocast_enabled(device)
        return cls(device=device, enabled=enabled, dtype=torch.get_autocast_dtype(device))

    def again(self, *, cache: bool = False) -> contextlib.AbstractContextManager[None]:
        """Return a context with the recorded autocast state; `cache` keeps cast weights, as autocast does."""
        if not self.enabled:
            return contextlib.nullcontext()
        return torch.autocast(self.device, dtype=self.dtype, cache_enabled=cache)


@contextlib.contextmanager
def kept_random_state() -> Iterator[RandomState]:
    """Restore the states of all generators after the body; yields the states before it."""
    state = RandomState.now(all_devices=True)
    try:
        yield state
    finally:
        state.restore()


@contextlib.contextmanager
def preserved(*, plain: bool = False) -> Iterator[None]:
    """Restore random states, default dtype, grad mode, autocast and determinism settings after the body, bit for bit.

    Args:
        plain: have gradients on and autocast off in between, as a new process has them.
    """
    dtype, grad = torch.get_default_dtype(), torch.is_grad_enabled()
    deterministic = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    cudnn = (torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark)
    casts = {device: (torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)) for device in _DEVICES}
    with kept_random_state():
        try:
            if plain:
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
