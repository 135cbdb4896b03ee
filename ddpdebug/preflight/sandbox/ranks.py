"""Brings what the ranks have seen to rank 0, through the job's store: no collective, nothing that others wait for."""

from __future__ import annotations

import contextlib
import json
import os
import time
from typing import Any

from ddpdebug import torch_internals as internals

_KEY = "ddpdebug/preflight/{}"
#: How long rank 0 waits for ranks that are slower in their first steps.
_SECONDS = 60.0
#: A record is numbers and digests of a few batches; anything larger is not worth the store's memory.
_MAX_BYTES = 1 << 20


def share(record: Any) -> dict[int, Any]:
    """Return by rank what all have given, on rank 0; the other ranks only give."""
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    found = {rank: record}
    if world == 1:
        return found
    with contextlib.suppress(Exception):  # no store, or it is gone: the checks across ranks say that they are missing
        store = internals.private_store()
        text = json.dumps(record)
        if store is None or len(text) > _MAX_BYTES:
            return found
        store.set(_KEY.format(rank), text)
        if rank == 0:
            deadline = time.monotonic() + _SECONDS
            missing = set(range(1, world))
            while missing and time.monotonic() < deadline:
                for other in [other for other in missing if store.check([_KEY.format(other)])]:
                    found[other] = json.loads(store.get(_KEY.format(other)))
                    missing.remove(other)
                time.sleep(0.02)
    return found
