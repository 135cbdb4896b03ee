"""Makes the Grafana dashboards in `dashboards/` from code; one module for each, and its file is called after it.

A build tool, as `make dashboards` calls it: `python -m tools.dashboards dashboards`.
"""

from __future__ import annotations

import importlib

from ddpdebug.grafana.dashboards import NAMES


def built() -> dict[str, str]:
    """Return the text of each dashboard by the name of its file."""
    modules = {name: importlib.import_module(f"tools.dashboards.{name}") for name in NAMES}
    return {f"{name}.json": module.board().text() for name, module in modules.items()}
