"""ddpdebug: a debugger for PyTorch DistributedDataParallel training.

Importing the package loads neither torch nor anything heavy; the public names do when they are first used.
"""

from __future__ import annotations

from ddpdebug._version import __version__ as __version__

TYPE_CHECKING = False  # that of `typing`, which a script need not load
if TYPE_CHECKING:
    from typing import Any

    from ddpdebug.checkpoints.live import compare_states, digests_of
    from ddpdebug.checkpoints.outcome import StateComparison
    from ddpdebug.errors import DdpdebugError, FindingError, UsageError
    from ddpdebug.monitor.attach import DebugDDP, expect_growth, observe, watch
    from ddpdebug.monitor.monitor import Monitor
    from ddpdebug.preflight.api import preflight
    from ddpdebug.preflight.checks.lr_finder import find_lr
    from ddpdebug.schema.finding import Finding, Severity

_HOMES = {
    "DdpdebugError": "ddpdebug.errors",
    "DebugDDP": "ddpdebug.monitor.attach",
    "Finding": "ddpdebug.schema.finding",
    "FindingError": "ddpdebug.errors",
    "Monitor": "ddpdebug.monitor.monitor",
    "Severity": "ddpdebug.schema.finding",
    "StateComparison": "ddpdebug.checkpoints.outcome",
    "UsageError": "ddpdebug.errors",
    "compare_states": "ddpdebug.checkpoints.live",
    "digests_of": "ddpdebug.checkpoints.live",
    "expect_growth": "ddpdebug.monitor.attach",
    "find_lr": "ddpdebug.preflight.checks.lr_finder",
    "observe": "ddpdebug.monitor.attach",
    "preflight": "ddpdebug.preflight.api",
    "watch": "ddpdebug.monitor.attach",
}

__all__ = [
    "DdpdebugError",
    "DebugDDP",
    "Finding",
    "FindingError",
    "Monitor",
    "Severity",
    "StateComparison",
    "UsageError",
    "compare_states",
    "digests_of",
    "expect_growth",
    "find_lr",
    "observe",
    "preflight",
    "watch",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'ddpdebug' has no attribute {name!r}")
    import importlib  # noqa: PLC0415 - not before it is needed

    module = importlib.import_module(home)
    return globals().get(name) or getattr(module, name)  # a package of that name is there now, and can be called


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
