"""A command line that has been checked: what `run`, `check` and their like shall do."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ddpdebug.config.settings import Config
from ddpdebug.processes.script import Target


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A command line that is right."""

    config: Config
    given: Mapping[str, Any]  # the options of this line
    target: Target
    in_rank: bool  # this process is a rank that torchrun, srun or ddpdebug started
