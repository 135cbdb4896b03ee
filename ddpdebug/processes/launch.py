"""Command lines and environment of the ranks that ddpdebug starts, from its own checked command line."""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddpdebug.config.settings import Config, to_flags
from ddpdebug.processes.script import Target

RUN_ID = "DDPDEBUG_RUN_ID"


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A checked command line of `run`, `check` or `preflight`: settings, and the script to run."""

    config: Config
    given: Mapping[str, Any]  # the options of this line
    target: Target
    in_rank: bool  # this process is a rank that torchrun, srun or ddpdebug started


def rank_words(request: Request, *, out: Path | None = None, as_check: bool = False) -> list[str]:
    """Return the words after `python -m ddpdebug` by which one rank runs the request's script."""
    given = {key: value for key, value in request.given.items() if key != "nproc_per_node"}
    if out is not None:
        given["out"] = out
    if as_check:
        given.setdefault("every_step", request.config.every_step)  # the rank knows of `run` only
    mark = ["--as-check"] if as_check else []
    return ["run", *mark, *to_flags(given, "run"), *request.target.command]


def torchrun_words(ranks: int, words: Sequence[str], statuses: Path | None = None) -> list[str]:
    """Return the command that starts `python -m ddpdebug <words>` as `ranks` ranks through torch's launcher.

    Args:
        statuses: the file for the exit statuses of the ranks.
    """
    options = [] if statuses is None else ["--statuses", str(statuses)]
    options += ["--standalone", "--nproc-per-node", str(ranks)]
    return [sys.executable, "-m", "ddpdebug.processes.torchrun", *options, "-m", "ddpdebug", *words]


def ranks_environment(run_id: str | None = None) -> dict[str, str]:
    """Return the environment for new ranks: that of this process, with one run id for all of them."""
    return {**os.environ, RUN_ID: run_id or secrets.token_hex(3)}
