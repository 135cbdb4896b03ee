"""The ways to attach to this process: `install` for the commands, `watch` and `DebugDDP` for Python."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from ddpdebug import torch_internals as internals
from ddpdebug.config.settings import Config
from ddpdebug.monitor.judging import load_for
from ddpdebug.monitor.monitor import Monitor
from ddpdebug.monitor.spawned import Origin
from ddpdebug.probes.importlib_bootstrap import after_that

_CURRENT: list[Monitor] = []  # at most one per process: the patches are process-wide


def current() -> Monitor | None:
    """Return the monitor of this process, if one is attached and open."""
    return _CURRENT[0] if _CURRENT and not _CURRENT[0].closed else None


def install(
    config: Config,
    *,
    command: Sequence[str] = (),
    late: bool = False,
    starts: bool | None = None,
    origin: Origin | None = None,
) -> Monitor:
    """Attach to this process: every DDP made from now on and every optimizer is watched. Return the monitor.

    Args:
        late: the job may have built modules and optimizers already; they are looked for among all objects, once.
        starts: also attach to ranks that the script starts by itself; whether it runs under `check`, None for not.
        origin: by what such a rank was started.
    """
    known = current()
    if known is not None:
        return known
    then = None if starts is None else partial(Origin, as_check=starts, attach=_attach_to_spawned)
    load_for(os.environ.get("WORLD_SIZE", ""))
    monitor = Monitor(config, command, starts=then, origin=origin)
    monitor.install()
    if late:
        monitor.guard.run("probe:built", monitor.probes.entries.built.look_around)
    _CURRENT[:] = [monitor]
    return monitor


def _attach_to_spawned(origin: Origin) -> Monitor | None:
    """Attach to a rank that the script has started, unless the script has attached to it by itself."""
    if current() is not None:
        return None
    return install(origin.config, command=origin.command, late=True, origin=origin)


def watch(
    model: torch.nn.Module | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    **options: Any,
) -> Monitor:
    """Attach to an existing DDP (and optimizer), for example inside a Trainer.

    Args:
        model: a DistributedDataParallel, or a plain module in a single process.
        optimizer: optional; every optimizer that steps is seen anyway.
        options: the settings of `ddpdebug run` by their Python names, for example `budget=0.01`.

    Raises:
        ddpdebug.UsageError: an option's name or value is wrong.
    """
    del optimizer  # the process-wide hooks see it when it steps
    config = Config.load(options, os.environ, Path.cwd())
    monitor = install(config, command=tuple(sys.argv), late=True)
    if isinstance(model, DistributedDataParallel):
        monitor.guard.run("probe:wrapper", monitor.probes.models.wrapped, model)
    elif isinstance(model, torch.nn.Module):
        monitor.guard.run("probe:modules", monitor.probes.patches.watch_module, internals.unwrap_compiled(model))
    return monitor


def observe(**values: Any) -> None:
    """Report `loss` or `val_loss`, as `Monitor.observe` does; do nothing if no monitor is attached."""
    monitor = current()
    if monitor is not None:
        monitor.observe(**values)


def expect_growth(what: str, size: int | None = None) -> None:
    """Declare intended memory growth, as `Monitor.expect_growth` does; do nothing if no monitor is attached."""
    monitor = current()
    if monitor is not None:
        monitor.expect_growth(what, size)


def _watch() -> None:
    install(Config.load({}, os.environ, Path.cwd()), command=tuple(sys.argv), late=True)


class DebugDDP(DistributedDataParallel):
    """A `torch.nn.parallel.DistributedDataParallel` with the same arguments, watched by ddpdebug.

    Settings come from `DDPDEBUG_*` variables and `[tool.ddpdebug]`; the monitor is `model.monitor`.
    """

    __module__ = "ddpdebug"  # what a pickle of a whole model says, wherever this file may stand

    __init__ = after_that(_watch, DistributedDataParallel)  # a warning of torch's belongs to the line that calls this

    @property
    def monitor(self) -> Monitor | None:
        """The monitor of this process; None after it was closed."""
        return current()
