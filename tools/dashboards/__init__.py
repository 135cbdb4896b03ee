"""Makes the Grafana dashboards in `dashboards/` from code; one module for each, and its file is called after it.

A build tool, as `make dashboards` calls it: `python -m tools.dashboards dashboards`. Needs grafana-foundation-sdk.
"""

from __future__ import annotations

import importlib
import warnings

from ddpdebug.grafana.dashboards import NAMES


def built() -> dict[str, str]:
    """Return the text of each dashboard by the name of its file."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # the newer form is one that Grafana before 12 cannot read
        from grafana_foundation_sdk.cog.encoder import JSONEncoder  # noqa: PLC0415 - it warns

        modules = {name: importlib.import_module(f"tools.dashboards.{name}") for name in NAMES}
    encoder = JSONEncoder(sort_keys=True, indent=2)
    return {f"{name}.json": encoder.encode(module.board().build()) + "\n" for name, module in modules.items()}
