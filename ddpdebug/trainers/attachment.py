"""What the callbacks of all trainers have in common: a monitor for one training, told what the trainer knows."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ddpdebug.config.settings import Config
from ddpdebug.errors import StopRun, text_of
from ddpdebug.monitor.attach import current, watch
from ddpdebug.monitor.monitor import Monitor

#: The names that a validation loss is logged under, most often.
_VALIDATION_LOSS = re.compile(r"(val|valid|validation|eval|dev)[_/. -]?loss(_epoch)?", re.IGNORECASE)


class Attachment:
    """A monitor for as long as one training takes; where one is there already, that is used, and left open.

    Args:
        val_loss: the name of the metric that is the validation loss; None takes the first whose name says that it is.
        options: the settings of the monitor by their Python names.

    Raises:
        ddpdebug.UsageError: an option's name or value is wrong.
    """

    def __init__(self, val_loss: str | None, options: Mapping[str, Any]) -> None:
        Config.load(options, os.environ, Path.cwd())  # a wrong one is an error now, and not once the model is built
        self._val_loss, self._options = val_loss, dict(options)
        self._own: Monitor | None = None
        self._missed = False

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy of the trainer has; the monitor stays here."""
        return {**vars(self), "_own": None}

    @property
    def monitor(self) -> Monitor | None:
        """The monitor of this process, as long as it is open."""
        return current()

    def open(self) -> None:
        """Attach, unless this process is attached to."""
        if current() is None:
            self._own = watch(**self._options)

    def adopt(self) -> None:
        """Take the monitor that is there for one that was opened here."""
        self._own = current()

    def tell(self, metrics: Mapping[str, Any]) -> None:
        """Tell the validation loss out of what an evaluation has measured, by name."""
        monitor, name = current(), self._val_loss
        if monitor is None:
            return
        if name is None:
            name = next((name for name in metrics if _VALIDATION_LOSS.fullmatch(name)), None)
        if name is None:
            return
        if name in metrics:
            monitor.observe(val_loss=metrics[name])
        elif not self._missed:
            self._missed = True
            there = ", ".join(map(repr, sorted(metrics))) or "none"
            print(f"ddpdebug: no metric {name!r} for the validation loss; logged were: {there}", file=sys.stderr)

    def close(self, error: BaseException | None = None) -> None:
        """End the monitor that was opened here, and no other; `error` is what has ended the training."""
        monitor, self._own = self._own, None
        if monitor is None:
            return
        if error is None:
            monitor.close()
        elif isinstance(error, StopRun):
            monitor.close("stopped")
        elif isinstance(error, KeyboardInterrupt):
            monitor.close("interrupted", 130, error)
        else:
            monitor.close(f"exception: {text_of(error)}", 1, error)
