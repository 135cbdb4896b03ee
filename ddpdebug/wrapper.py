"""`DebugDDP`: a DistributedDataParallel that is watched from its construction on."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from torch.nn.parallel import DistributedDataParallel

from ddpdebug.attach import current, install
from ddpdebug.config import Config
from ddpdebug.monitor import Monitor


class DebugDDP(DistributedDataParallel):
    """A `torch.nn.parallel.DistributedDataParallel` with the same arguments, watched by ddpdebug.

    Settings come from `DDPDEBUG_*` variables and `[tool.ddpdebug]`; the monitor is `model.monitor`.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        install(Config.load({}, os.environ, Path.cwd()), command=tuple(sys.argv))
        super().__init__(*args, **kwargs)

    @property
    def monitor(self) -> Monitor | None:
        """The monitor of this process; None after it was closed."""
        return current()
