"""Tensors that Python's garbage collector does not list, so that a script which counts tensors counts its own.

`gc.get_objects()` is how memory leaks are hunted. The collector is needed for cycles alone: a tensor of ours refers to
nothing of Python's, so that it is in none.
"""

from __future__ import annotations

import ctypes

import torch

_untrack = ctypes.PYFUNCTYPE(None, ctypes.py_object)(("PyObject_GC_UnTrack", ctypes.pythonapi))


def unlisted(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor that is ours alone and that is kept for longer than a call, off the collector's list."""
    _untrack(tensor)
    return tensor
