"""Where this rank runs, as it tells the others: for service discovery, and to find its GPU in other tools' metrics."""

from __future__ import annotations

from typing import Any

import torch

from ddpdebug.sinks import RunStarted


def place(started: RunStarted) -> dict[str, Any]:
    """Return the announcement `place` of a rank that has begun."""
    return {"node": started.node, "local_rank": started.local_rank, "metrics": started.metrics_url}


def gpu_uuid() -> str:
    """Return the current GPU's name as the driver and its exporters write it, empty without one; never starts CUDA."""
    if not torch.cuda.is_initialized():
        return ""
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return f"GPU-{properties.uuid}"
