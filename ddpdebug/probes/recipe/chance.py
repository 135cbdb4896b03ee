"""Finds dropout functions that run in eval mode: looked for once an evaluation has drawn random numbers.

The functions themselves are never replaced: `torch.jit.script` would compile no model with dropout, what holds the
original could not be pickled, and a table of overrides would not find it. The generators before and after the first
forwards in eval mode say whether there is anything to look for; only then one forward is followed by a profile
function, which sees every call whatever name it goes by, and changes none.
"""

from __future__ import annotations

import inspect
import sys
import weakref
from types import CodeType, FrameType
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from ddpdebug import fingerprint, torch_internals as internals
from ddpdebug.isolation.guard import Guard
from ddpdebug.isolation.user_code import user_location
from ddpdebug.probes.values import rng_digest

#: Forwards in eval mode of one model whose draws are looked at, and those that are followed.
FORWARDS, FOLLOWED = 16, 2
_MAX_CALLS = 8
_MAX_FRAMES = 16
_FUNCTIONS = ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout")
_ATTENTION = functional.scaled_dot_product_attention


def _profiled() -> bool:
    """Tell whether somebody else profiles this thread, and would no longer after us."""
    yappi = sys.modules.get("yappi")  # puts its function where `sys.getprofile` does not see it
    return sys.getprofile() is not None or (yappi is not None and bool(yappi.is_running()))


class _Model:
    """What is known of one model's evaluations."""

    def __init__(self, root: nn.Module) -> None:
        self.ref = weakref.ref(root)
        self.forwards = self.followed = 0
        self.drew = False

    @property
    def done(self) -> bool:
        return self.followed >= FOLLOWED or (not self.drew and self.forwards >= FORWARDS)


class Chance:
    """Watches the forwards of models in eval mode; one at a time."""

    def __init__(self, guard: Guard) -> None:
        self._guard = guard
        self._models: dict[int, _Model] = {}
        self._now: _Model | None = None
        self._before: tuple[int, ...] = ()
        self._follower: _Follower | None = None

    def begin(self, root: nn.Module) -> None:
        """Look at the forward that begins now, of a model in eval mode."""
        known = self._models.get(id(root))
        if known is None or known.ref() is not root:
            known = self._models[id(root)] = _Model(root)
        if self._now is not None or known.done or internals.anything_compiled():
            return
        self._now = known
        known.forwards += 1
        if not known.drew:
            self._before = _state(root)
        elif not _profiled():
            known.followed += 1
            self._follower = _Follower(root, self._guard)
            sys.setprofile(self._follower)

    def end(self, root: nn.Module) -> list[dict[str, Any]]:
        """Return the calls of dropout functions that were active in modules in eval mode."""
        now, follower = self._now, self._follower
        if now is None or now.ref() is not root:
            return []
        self.release()
        if follower is not None:
            calls = follower.calls()
            now.followed = FOLLOWED if calls else now.followed
            return calls
        now.drew = now.drew or (bool(self._before) and _state(root) != self._before)
        return []

    def release(self) -> None:
        """Take the profile function away."""
        if self._follower is not None and sys.getprofile() is self._follower:
            sys.setprofile(None)
        self._now, self._follower = None, None


class _Follower:
    """A profile function: sees calls, and changes nothing."""

    def __init__(self, root: nn.Module, guard: Guard) -> None:
        self._root, self._guard = root, guard
        self._found: dict[tuple[str, str | None], tuple[nn.Module, float | None]] = {}
        self._before: tuple[int, ...] = ()
        functions = [inspect.unwrap(getattr(functional, name)) for name in _FUNCTIONS]
        codes = (getattr(function, "__code__", None) for function in functions)
        self._codes: dict[CodeType, str] = {c: n for c, n in zip(codes, _FUNCTIONS, strict=True) if c is not None}
        self._whole = inspect.unwrap(DistributedDataParallel.forward).__code__
        self._broken = False

    def __call__(self, frame: FrameType, event: str, arg: Any) -> None:
        """Look at one event; an error of ours must not reach the model, and ends the search."""
        if self._broken:
            sys.setprofile(None)
            return
        if (event == "call" and frame.f_code in self._codes) or arg is _ATTENTION:
            self._broken = not self._guard.run("probe:chance", self._look, frame, event, arg)
        elif frame.f_code is self._whole and event == "return":
            sys.setprofile(None)  # whatever happens to the rest of ddpdebug meanwhile

    def _look(self, frame: FrameType, event: str, arg: Any) -> bool:
        if event == "call":
            self._function(self._codes[frame.f_code], frame)
        elif arg is _ATTENTION and event == "c_call":
            self._before = _state(self._root)
        elif arg is _ATTENTION and event == "c_return" and self._before != _state(self._root):
            self._note("scaled_dot_product_attention", None, frame)
        return True

    def calls(self) -> list[dict[str, Any]]:
        """Return what was found, where the module belongs to the model."""
        paths = {id(module): path or "(model)" for path, module in internals.named_modules(self._root)}
        return [
            {
                "function": name,
                "p": share,
                "location": line,
                "module": paths[id(module)],
                "class": type(module).__name__,
            }
            for (name, line), (module, share) in self._found.items()
            if id(module) in paths
        ]

    def _function(self, name: str, frame: FrameType) -> None:
        values = frame.f_locals  # not to be emptied: the interpreter writes them back after the call
        share = values.get("p")
        if values.get("training") and isinstance(share, int | float) and share > 0 and frame.f_back is not None:
            self._note(name, float(share), frame.f_back)

    def _note(self, name: str, share: float | None, frame: FrameType) -> None:
        module = _module_of(frame)
        # a part that was put into train mode by itself draws on purpose (Monte Carlo dropout)
        if module is not None and not module.training and len(self._found) < _MAX_CALLS:
            self._found.setdefault((name, user_location(frame)), (module, share))


def _module_of(frame: FrameType | None) -> nn.Module | None:
    """Return the innermost module whose method a frame, or one that it was called from, runs."""
    for _ in range(_MAX_FRAMES):
        if frame is None:
            return None
        code = frame.f_code
        if code.co_argcount and code.co_varnames[0] == "self":
            owner = frame.f_locals.get("self")
            if isinstance(owner, nn.Module):
                return owner
        frame = frame.f_back
    return None


def _state(root: nn.Module) -> tuple[int, ...]:
    """Return fingerprints of the generators that a forward draws from; waits for nothing, draws nothing."""
    device = next((p.device for p in internals.parameters(root)), None)
    if device is None or device.type != "cuda":
        return (rng_digest(),)
    if torch.cuda.is_current_stream_capturing():
        return ()
    return rng_digest(), fingerprint.fingerprint(torch.cuda.get_rng_state(device))
