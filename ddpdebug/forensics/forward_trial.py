"""Runs a captured forward again with other inputs, in eval mode and without gradients.

Only in a disposable copy of the process: the module's tables are changed, and whatever its forward does is gone with
the copy. An operation that would communicate ends the run.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ddpdebug import torch_internals as internals
from ddpdebug.clock import time
from ddpdebug.forensics.replay.prepared import Prepared
from ddpdebug.forensics.replay.tracer import Stopped
from ddpdebug.isolation.child import TRIAL_SECONDS
from ddpdebug.nested import mapped
from ddpdebug.probes.forward_capture import ForwardCapture

#: Takes the name of an operation without underscores around it, its arguments and what it has returned.
Seen = Callable[[str, tuple[Any, ...], Any], object]


class Operations(internals.OperationMode):
    """The dispatch mode of such a run: tells each operation, and ends the run when its time is over.

    Args:
        seen: is told each operation.
    """

    def __init__(self, seen: Seen) -> None:
        super().__init__()
        self.muted = False  # what runs now is not the model's
        self._seen, self._deadline = seen, time.monotonic() + TRIAL_SECONDS

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self.muted and (func.namespace in internals.COLLECTIVES or time.monotonic() > self._deadline):
            raise Stopped
        output = func(*args, **(kwargs or {}))
        if not self.muted:
            self._seen(internals.schema(func).name.rpartition("::")[2].strip("_"), args, output)
        return output


def refuses(module: torch.nn.Module) -> bool:
    """Return whether one rank must not run a module alone."""
    parts = list(internals.modules(module))
    return internals.anything_compiled() or any(
        internals.is_compiled(part) or internals.is_parallel(part) or isinstance(part, torch.jit.ScriptModule)
        for part in parts
    )


def prepared(capture: ForwardCapture) -> Prepared | None:
    """Return a captured forward's module as it was then, in eval mode; None where it cannot be run again."""
    module = capture.module()
    if module is None or capture.lost() or capture.changed() or refuses(module):
        return None
    return Prepared(module, capture.buffers, dict.fromkeys(capture.names, False))


def again(capture: ForwardCapture, ready: Prepared, change: Callable[[Any], Any], mode: Operations) -> Any:
    """Return what the module returns for arguments that `change` was applied to.

    Args:
        ready: what `prepared` has returned for this run.
    """
    args = tuple([ready.argument(mapped(value, change)) for value in capture.args])
    kwargs = {key: ready.argument(mapped(value, change)) for key, value in capture.kwargs.items()}
    capture.rng.restore()
    with torch.no_grad(), capture.autocast.again(), internals.as_users(), mode:
        return ready.module(*args, **kwargs)
