"""What a rank knows about the exception that ends it: where it was raised, and the parameters that its text means."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from ddpdebug.forensics.memory.oom import where
from ddpdebug.probes.step_state import StepState
from ddpdebug.probes.threads import always_alone

#: How the reducer of DDP names parameters: by their places among those that require a gradient.
_PLACES = re.compile(r"Parameter at index (\d+)|did not receive grad for rank \d+:((?: \d+)+)")
_MAX_NAMES = 20


def about_error(
    error: BaseException | None,
    reason: str,
    state: StepState,
    alone: Callable[[], AbstractContextManager[bool]] = always_alone,
) -> dict[str, Any]:
    """Return the fields of `Failure` that the exception and the models tell.

    Args:
        error: None where nobody has it: only its text is known then.
        reason: with its class and text.
        alone: tells whether gradients may be read here.
    """
    found = {} if error is None else where(error, state, alone)
    return {**found, "raised_in": state.next_step(), "named": _named(reason, state)}


def _named(text: str, state: StepState) -> tuple[str, ...]:
    places = [int(n) for groups in _PLACES.findall(text) for group in groups for n in group.split()]
    if not places or len(state.wrappers) != 1:  # of several, the text does not say which
        return ()
    (wrapper,) = state.wrappers
    names = [name for key, name in wrapper.wrapped.items() if key in wrapper.trainable]
    return tuple(names[place] for place in places[:_MAX_NAMES] if place < len(names))
