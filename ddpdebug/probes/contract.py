"""The DDP contract, read from existing state: the settings of the wrapper, and the use of it by the code."""

from __future__ import annotations

from typing import Any

from ddpdebug import torch_internals as internals
from ddpdebug.isolation.user_code import user_location
from ddpdebug.probes.optimizers import OptimizerWatch
from ddpdebug.schema.details import Contract
from ddpdebug.schema.row import Flag

_HOOK_FLAGS = {
    "local": Flag.LOCAL_ONLY,
    "lossy": Flag.LOSSY_REDUCTION | Flag.CUSTOM_REDUCTION,
    "half": Flag.HALF_REDUCTION,
    "custom": Flag.CUSTOM_REDUCTION | Flag.HALF_REDUCTION,
}


def flags(watch: OptimizerWatch) -> Flag:
    """Return the row's flags about the DDP contract at one optimizer's step."""
    found = Flag(0)
    owners = watch.wrappers
    if not owners:
        found |= Flag.NO_DDP
    for wrapper in owners:
        pending = wrapper.pending or {}
        found |= Flag.BYPASS if "bypass" in pending else Flag(0)
        found |= Flag.UNSYNCED_BACKWARD if "no_sync" in pending else Flag(0)
        found |= _HOOK_FLAGS.get(wrapper.hook_kind or "", Flag(0))
        found |= Flag.LOCAL_ONLY if wrapper.unpaired else Flag(0)
        ddp = wrapper.ref()
        if ddp is not None:
            found |= Flag(0) if internals.broadcasts_buffers(ddp) else Flag.BUFFERS_NOT_BROADCAST
            found |= Flag.IN_JOIN if internals.in_join(ddp) else Flag(0)
    found |= Flag.HALF_REDUCTION if watch.halved else Flag(0)
    return found | (Flag.SHARDED_STATE if watch.sharded() else Flag(0))


def facts(watch: OptimizerWatch, *, wrappers: int, world: int) -> Contract:
    """Return the part of the `contract` detail that is known only at the step itself."""
    owners = watch.wrappers
    merged: dict[str, Any] = {}
    for wrapper in owners:
        merged.update(wrapper.pending or {})
    return Contract(
        **merged,
        ddp=wrappers,
        world=world,
        groups=tuple([tuple(wrapper.group) for wrapper in owners]),
        hook=next(iter([wrapper.hook for wrapper in owners if wrapper.hook]), None),
        ignored=tuple(sorted({name for wrapper in owners for name in wrapper.ignored})),
        location=user_location(),
    )
