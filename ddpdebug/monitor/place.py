"""The name of this rank's GPU, by which it is found in other tools' metrics."""

from __future__ import annotations

import torch


def gpu_uuid() -> str:
    """Return the current GPU's name as the driver and its exporters write it, empty without one; never starts CUDA."""
    if not torch.cuda.is_initialized():
        return ""
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return f"GPU-{properties.uuid}"
