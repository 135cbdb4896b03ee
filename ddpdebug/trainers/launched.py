"""Ranks that a trainer starts by itself, each as `python script.py`: what they are told, and how they attach."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import MutableMapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from ddpdebug.config.settings import Config
from ddpdebug.monitor.attach import install
from ddpdebug.monitor.monitor import Monitor
from ddpdebug.processes.launch import RUN_ID
from ddpdebug.trainers.lightning_plugin import LAUNCHED


def invite(monitor: Monitor, environ: MutableMapping[str, str]) -> None:
    """Note for processes that this one starts what they must know, where it is the first of ranks yet to be started."""
    if monitor.starts is None or "LOCAL_RANK" in environ or "RANK" in environ:
        return  # `watch` stands in the script, which all ranks run; or somebody else starts the ranks
    given = {
        field.name: str(value) if isinstance(value, Path) else value
        for field in fields(Config)
        if (value := getattr(monitor.config, field.name)) != field.default
    }
    environ[LAUNCHED] = f"{os.getpid()} {json.dumps({'run': monitor.run_id, 'settings': given})}"


def join(environ: MutableMapping[str, str]) -> None:
    """Attach to this process, a rank that a watched one has started.

    Raises:
        ValueError: what was noted cannot be read.
    """
    known: dict[str, Any] = json.loads(environ[LAUNCHED].partition(" ")[2])
    environ[RUN_ID] = known["run"]
    install(Config.load(known["settings"], environ, Path.cwd()), command=tuple(sys.argv), late=True)
