"""The shipped Grafana dashboards, which `tools/dashboards` makes. Importing this module loads nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

#: A file of that name for each dashboard.
NAMES = ("overview", "agreement", "numerics", "memory", "ranks", "fleet")
_PACKAGED = Path(__file__).parent / "json"  # of an installed package
_CHECKOUT = Path(__file__).parent.parent.parent / "dashboards"


def texts() -> dict[str, str]:
    """Return the text of each dashboard by file name."""
    directory = _PACKAGED if _PACKAGED.is_dir() else _CHECKOUT
    return {f"{name}.json": (directory / f"{name}.json").read_text(encoding="utf-8") for name in NAMES}


def shipped() -> dict[str, dict[str, Any]]:
    """Return the dashboards by name, as JSON values."""
    return {file.removesuffix(".json"): json.loads(text) for file, text in texts().items()}
