"""`DebugDDP`: a DistributedDataParallel that is watched from its construction on."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from torch.nn.parallel import DistributedDataParallel

from ddpdebug.config.settings import Config
from ddpdebug.monitor.attach import current, install
from ddpdebug.monitor.monitor import Monitor
from ddpdebug.probes.importlib_bootstrap import after_that


def _watch() -> None:
    install(Config.load({}, os.environ, Path.cwd()), command=tuple(sys.argv), late=True)


class DebugDDP(DistributedDataParallel):
    """A `torch.nn.parallel.DistributedDataParallel` with the same arguments, watched by ddpdebug.

    Settings come from `DDPDEBUG_*` variables and `[tool.ddpdebug]`; the monitor is `model.monitor`.
    """

    __init__ = after_that(_watch, DistributedDataParallel)  # a warning of torch's belongs to the line that calls this

    @property
    def monitor(self) -> Monitor | None:
        """The monitor of this process; None after it was closed."""
        return current()
