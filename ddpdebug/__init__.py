"""ddpdebug: a debugger for PyTorch DistributedDataParallel training.

Importing the package loads neither torch nor anything heavy; the public names do when they are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ddpdebug.attach import expect_growth, observe, watch
    from ddpdebug.errors import DdpdebugError, FindingError, UsageError
    from ddpdebug.findings import Finding, Severity
    from ddpdebug.monitor import Monitor
    from ddpdebug.preflight.api import preflight
    from ddpdebug.preflight.lr_finder import find_lr
    from ddpdebug.seeding import seed_everything
    from ddpdebug.wrapper import DebugDDP

__version__ = "0.1.0"

_HOMES = {
    "DdpdebugError": "ddpdebug.errors",
    "DebugDDP": "ddpdebug.wrapper",
    "Finding": "ddpdebug.findings",
    "FindingError": "ddpdebug.errors",
    "Monitor": "ddpdebug.monitor",
    "Severity": "ddpdebug.findings",
    "UsageError": "ddpdebug.errors",
    "expect_growth": "ddpdebug.attach",
    "find_lr": "ddpdebug.preflight.lr_finder",
    "observe": "ddpdebug.attach",
    "preflight": "ddpdebug.preflight.api",
    "seed_everything": "ddpdebug.seeding",
    "watch": "ddpdebug.attach",
}

__all__ = [
    "DdpdebugError",
    "DebugDDP",
    "Finding",
    "FindingError",
    "Monitor",
    "Severity",
    "UsageError",
    "expect_growth",
    "find_lr",
    "observe",
    "preflight",
    "seed_everything",
    "watch",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'ddpdebug' has no attribute {name!r}")
    module = importlib.import_module(home)
    return globals().get(name) or getattr(module, name)  # a package of that name is there now, and can be called


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
