"""The Grafana dashboards: as code for who changes them, as JSON for who uses them. Importing this loads nothing."""

from __future__ import annotations

import importlib
import json
import warnings
from pathlib import Path
from typing import Any

#: One module for each dashboard; its file is called after it.
NAMES = ("overview", "agreement", "numerics", "memory", "ranks", "fleet")
_PACKAGED = Path(__file__).parent / "json"  # of an installed package
_CHECKOUT = Path(__file__).parent.parent.parent.parent / "dashboards"


def texts() -> dict[str, str]:
    """Return the dashboards as they are shipped: name of the file -> text."""
    directory = _PACKAGED if _PACKAGED.is_dir() else _CHECKOUT
    return {f"{name}.json": (directory / f"{name}.json").read_text(encoding="utf-8") for name in NAMES}


def shipped() -> dict[str, dict[str, Any]]:
    """Return the dashboards as they are shipped: name -> JSON."""
    return {file.removesuffix(".json"): json.loads(text) for file, text in texts().items()}


def built() -> dict[str, str]:
    """Make the dashboards anew: name of the file -> text. Needs grafana-foundation-sdk, a development dependency."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # the newer form is one that Grafana before 12 cannot read
        from grafana_foundation_sdk.cog.encoder import JSONEncoder  # noqa: PLC0415 - only for developers

        modules = {name: importlib.import_module(f"ddpdebug.grafana.dashboards.{name}") for name in NAMES}
    made = {}
    for name, module in modules.items():
        board = module.board()
        made[f"{name}.json"] = JSONEncoder(sort_keys=True, indent=2).encode(board.build()) + "\n"
    return made
