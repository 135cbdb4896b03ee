"""Tensors hidden from Python's garbage collector, so that a script which counts tensors counts only its own.

`gc.get_objects()` is how memory leaks are hunted. The collector is needed for cycles alone: a tensor of ours refers to
nothing of Python's, so that it is in none.
"""

from __future__ import annotations

import ctypes

import torch

_untrack = ctypes.PYFUNCTYPE(None, ctypes.py_object)(("PyObject_GC_UnTrack", ctypes.pythonapi))


def unlisted(tensor: torch.Tensor) -> torch.Tensor:
    """Remove a tensor of ddpdebug's own, kept for longer than a call, from the collector's list, and return it."""
    _untrack(tensor)
    return tensor
