"""The shared part of all trainers' callbacks: a monitor for one training, and its validation loss."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ddpdebug.config.settings import Config
from ddpdebug.errors import text_of
from ddpdebug.isolation.user_code import is_users
from ddpdebug.monitor.attach import current, install
from ddpdebug.monitor.monitor import Monitor
from ddpdebug.printing import say

#: The names that a validation loss is logged under, most often.
_VALIDATION_LOSS = re.compile(r"(val|valid|validation|eval|dev)[_/. -]?loss(_epoch)?", re.IGNORECASE)


class Attachment:
    """A monitor for the duration of one training; an existing one is used, and left open.

    Args:
        val_loss: the name of the metric that is the validation loss; None takes the first whose name says that it is.
        options: the settings of the monitor by their Python names; None for one that never opens a monitor.

    Raises:
        ddpdebug.UsageError: an option's name or value is wrong.
    """

    def __init__(self, val_loss: str | None, options: Mapping[str, Any] | None) -> None:
        # read now: a wrong one is an error before the model is built, and nothing that the script does later matters
        self._config = None if options is None else Config.load(options, os.environ, Path.cwd())
        self._val_loss = val_loss
        self._own: Monitor | None = None
        self._missed = False

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy of the trainer has; the monitor stays here."""
        return {**vars(self), "_own": None}

    def open(self) -> None:
        """Attach, unless a monitor exists; training goes on if attaching fails."""
        if self._config is None or current() is not None:
            return
        try:
            self._own = install(self._config, command=tuple(sys.argv), late=True)
        except Exception as error:
            if is_users(error):  # a signal handler's is the job's
                raise
            say(f"ddpdebug: could not attach, training runs without it: {text_of(error)}\n")

    def tell(self, metrics: Mapping[str, Any] | None) -> None:
        """Observe the validation loss among the metrics of an evaluation, by name."""
        monitor = current()
        if monitor is not None and metrics:
            monitor.guard.run("probe:observe", self._tell, monitor, metrics)

    def _tell(self, monitor: Monitor, metrics: Mapping[str, Any]) -> None:
        named = {str(name): value for name, value in metrics.items()}
        name = self._val_loss
        if name is None:
            name = next((name for name in named if _VALIDATION_LOSS.fullmatch(name)), None)
        if name is None:
            return
        if name in named:
            monitor.observe(val_loss=named[name])
        elif not self._missed:
            self._missed = True
            there = ", ".join(map(repr, sorted(named)))
            say(f"ddpdebug: no metric {name!r} for the validation loss; logged were: {there}\n")

    def close(self, error: BaseException | None = None) -> None:
        """Close the monitor that was opened here, if any; `error` is the exception that ended the training."""
        monitor, self._own = self._own, None
        if monitor is not None:
            monitor.close_by(error)
