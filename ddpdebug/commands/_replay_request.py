"""The checked line of `ddpdebug replay`, without torch: `replay` makes it, and loads `_replay` only afterwards."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A checked command line of `ddpdebug replay`."""

    bundle: Path
    model: str | None
    script: Path | None
    import_class: bool
    module: Path | None
    device: str | None
    dtype: str | None
    amp: bool
    json: Path | None
