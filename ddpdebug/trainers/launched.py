"""Ranks that a trainer starts by itself as `python script.py`: their settings from the first process, and attaching."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from ddpdebug.config.settings import Config, settings
from ddpdebug.errors import StopRun
from ddpdebug.monitor.attach import install
from ddpdebug.monitor.monitor import Monitor
from ddpdebug.processes.launch import RUN_ID


def invitation(monitor: Monitor, environ: Mapping[str, str]) -> str | None:
    """Return the settings for ranks that this process starts; None if it is not the first of ranks yet to come."""
    if monitor.starts is None or "LOCAL_RANK" in environ or "RANK" in environ:
        return None  # `watch` stands in the script, which all ranks run; or somebody else starts the ranks
    given = {
        field.name: str(value) if isinstance(value, Path) else value
        for field in settings()
        if (value := getattr(monitor.config, field.name)) is not None
    }
    return json.dumps({"run": monitor.run_id, "settings": given, "shows_metrics": monitor.config.shows_metrics})


def join(invited: str, environ: MutableMapping[str, str]) -> None:
    """Attach to this process, a rank that a watched process has started with an invitation.

    Raises:
        ValueError: it cannot be read.
    """
    known: dict[str, Any] = json.loads(invited)
    environ[RUN_ID] = known["run"]
    config = Config.load(known["settings"], {}, Path("/"))  # all of them: no other source has a word
    config = replace(config, shows_metrics=known["shows_metrics"])
    if config.steps is not None:
        sys.excepthook = partial(_end_well, sys.excepthook)
    install(config, command=tuple(sys.argv), late=True)


def _end_well(otherwise: Callable[..., object], kind: type[BaseException], error: BaseException, trace: object) -> None:
    """End a script that was stopped after its steps with 0, as `ddpdebug run` does where it stands around it."""
    if isinstance(error, StopRun):
        raise SystemExit(0)
    otherwise(kind, error, trace)
