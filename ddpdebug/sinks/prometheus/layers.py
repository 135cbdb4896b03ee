"""The few layers that stand out, in fixed slots: the number of series does not grow with the model. Torch-free."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from prometheus_client.core import GaugeMetricFamily, Metric

from ddpdebug.sinks.text import clean

#: Places of each list, from the layer that stands out most.
SLOTS = 2
_TEXTS = {
    "update_ratio": "Change of a weight over its norm in the last sampled step: the largest, by slot.",
    "grad_norm": "2-norm of a weight's gradient in the last sampled step: the largest, by slot.",
    "dead_units": "Share of an activation's units that were zero for all inputs of the last samples: the largest.",
    "saturation": "Share of an activation's values at the end of its range in the last sample: the largest.",
}


class Layers:
    """What the newest sample of this rank says; written by the exchange's thread, read by the server's."""

    def __init__(self) -> None:
        self._worst: dict[str, list[tuple[float, str]]] = {}

    def take(self, detail: Mapping[str, Any]) -> None:
        """Take a detail of the kind `layers` (see `LayerStatistics`)."""
        weights = {name: about for name, about in _tables(detail.get("parameters")) if about.get("dim", 0) > 1}
        ratios = {name: _ratio(about.get("update"), about.get("norm")) for name, about in weights.items()}
        seen = dict(_tables(detail.get("modules")))
        values = {
            "update_ratio": ratios,
            "grad_norm": {name: about.get("grad_norm") for name, about in weights.items()},
            "dead_units": {name: about.get("zero_units") for name, about in seen.items()},
            "saturation": {name: about.get("saturated") for name, about in seen.items()},
        }
        found = {what: _largest(table) for what, table in values.items()}
        self._worst = {**self._worst, **{what: worst for what, worst in found.items() if worst}}

    def metrics(self, rank: str) -> Iterator[Metric]:
        """Yield a family of each kind, empty before the first sample."""
        for what, text in _TEXTS.items():
            family = GaugeMetricFamily(f"ddpdebug_layer_{what}", text, labels=("rank", "slot", "layer"))
            for slot, (value, layer) in enumerate(self._worst.get(what, ()), 1):
                family.add_metric([rank, str(slot), clean(layer, 120)], value)
            yield family


def _tables(value: Any) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for name, about in value.items() if isinstance(value, dict) else ():
        if isinstance(about, dict):
            yield str(name), about


def _ratio(update: Any, norm: Any) -> float | None:
    return update / norm if _is_number(update) and _is_number(norm) and norm > 0 else None


def _largest(table: Mapping[str, Any]) -> list[tuple[float, str]]:
    known = [(float(value), name) for name, value in table.items() if _is_number(value)]
    return sorted(known, key=lambda pair: (-pair[0], pair[1]))[:SLOTS]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)
