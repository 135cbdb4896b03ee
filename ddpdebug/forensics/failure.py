"""The exception that ends a rank: the line that raised it, and the parameters that its text names."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import FrameType
from typing import Any

import torch

from ddpdebug.forensics.memory.oom import where
from ddpdebug.isolation.foreign import is_a
from ddpdebug.isolation.local_variables import local_values
from ddpdebug.probes.step_state import StepState
from ddpdebug.probes.threads import always_alone
from ddpdebug.torch_internals import is_plain

#: How the reducer of DDP names parameters: by their places among those that require a gradient.
_PLACES = re.compile(r"Parameter at index (\d+)|did not receive grad for rank \d+:((?: \d+)+)")
#: How `load_state_dict` names them.
_SIZES = re.compile(r"size mismatch for ([^\s:]+):")
_KEYS = re.compile(r'key\(s\) in state_dict: ((?:"[^"]*"(?:, )?)+)')
_MAX_NAMES = 20
_MAX_TENSORS, _MAX_READ = 4, 1 << 20


def about_error(
    error: BaseException | None,
    reason: str,
    state: StepState,
    alone: Callable[[], AbstractContextManager[bool]] = always_alone,
) -> dict[str, Any]:
    """Return the fields of `Failure` that follow from exception and models; queries no device, which may have failed.

    Args:
        error: None where nobody has it: only its text is known then.
        reason: with its class and text.
        alone: tells whether gradients may be read here.
    """
    found = {} if error is None else {**where(error, state, alone), "tensors": _tensors(error)}
    blocking = os.environ.get("CUDA_LAUNCH_BLOCKING", "0") not in {"", "0"}
    cut = None if state.cut_short is None or state.cut_short.error in reason else state.cut_short
    known = {"raised_in": state.next_step(), "named": _named(reason, state), "blocking": blocking, "cut_short": cut}
    return {**found, **known}


def _tensors(error: BaseException) -> dict[str, str]:
    """Return what the innermost function of `torch.nn` was given, where it is that which raised."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return {} if trace is None else _given(trace.tb_frame)


def _given(frame: FrameType) -> dict[str, str]:
    file = frame.f_code.co_filename.replace("\\", "/")
    if not file.endswith("/torch/nn/functional.py") and "/torch/nn/modules/" not in file:
        return {}
    tensors = [(name, value) for name, value in local_values(frame).items() if is_a(value, torch.Tensor)]
    return {name: _described(value) for name, value in tensors[:_MAX_TENSORS] if is_plain(value)}


def _described(tensor: torch.Tensor) -> str:
    text = f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
    whole = not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype is torch.bool)
    if whole and tensor.device.type == "cpu" and 0 < tensor.numel() <= _MAX_READ:
        low, high = tensor.aminmax()
        text += f", {int(low)} to {int(high)}"
    return text


def _named(text: str, state: StepState) -> tuple[str, ...]:
    keys = _SIZES.findall(text) or re.findall('"(.*?)"', next(iter(_KEYS.findall(text)), ""))
    if keys:
        return tuple(keys[:_MAX_NAMES])
    places = [int(n) for groups in _PLACES.findall(text) for group in groups for n in group.split()]
    if not places or len(state.wrappers) != 1:  # of several, the text does not say which
        return ()
    (wrapper,) = state.wrappers
    names = [name for key, name in wrapper.wrapped.items() if key in wrapper.trainable]
    return tuple([names[place] for place in places[:_MAX_NAMES] if place < len(names)])
