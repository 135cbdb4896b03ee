"""Fingerprints of recorded batches and their samples, to be compared within and across ranks. JSON values.

They come to rank 0 through the job's store: no collective, nothing that others wait for.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from ddpdebug import fingerprint, torch_internals as internals
from ddpdebug.clock import time
from ddpdebug.nested import tensors_in_objects
from ddpdebug.preflight.capture.tape import Tape

#: Samples of a batch that get a fingerprint of their own.
_SAMPLES = 512
_KEY = "ddpdebug/preflight/{}"
#: How long rank 0 waits for ranks that are slower in their first steps.
_SECONDS = 60.0
#: A record is numbers and digests of a few batches; anything larger is not worth the store's memory.
_MAX_BYTES = 1 << 20


def digests(tapes: Iterable[Tape]) -> dict[str, Any]:
    """Return the digests of all batches, and mean and deviation of the first floating-point input."""
    batches = [list(tensors_in_objects(tape.inputs)) for tape in tapes]
    return {"batches": [of_inputs(inputs) for inputs in batches], "scale": scale(batches)}


def of_inputs(inputs: list[Tensor]) -> dict[str, Any]:
    """Return the digests of one batch: of the whole, and of each sample if the first dimension counts samples."""
    size = next((t.shape[0] for t in inputs if t.dim()), 0)
    rows = [t for t in inputs if t.dim() and t.shape[0] == size]
    whole = fingerprint.fingerprint(torch.tensor([_digest(t) for t in inputs], dtype=torch.int64))
    samples = [[_digest(t[at]) for t in rows] for at in range(min(size, _SAMPLES))]
    # of whole numbers fewer are different: tokens of a small vocabulary, flags
    elements = sum(t[0].numel() / (1 if t.is_floating_point() else 16) for t in rows if t.shape[0])
    return {"batch": whole, "samples": [_joined(parts) for parts in samples], "elements": elements}


def scale(batches: list[list[Tensor]]) -> list[float] | None:
    """Return mean and standard deviation of the first floating-point input, over all batches."""
    firsts = [next((t for t in inputs if t.is_floating_point() and t.numel()), None) for inputs in batches]
    values = [t.detach().double().flatten() for t in firsts if t is not None]
    if not values:
        return None
    flat = torch.cat(values)
    return [float(flat.mean()), float(flat.std()) if flat.numel() > 1 else 0.0]


def _digest(tensor: Tensor) -> int:
    value = fingerprint.fingerprint(tensor.detach().contiguous().cpu())
    return value - (1 << 64) if value >= 1 << 63 else value


def _joined(parts: list[int]) -> int:
    return parts[0] if len(parts) == 1 else fingerprint.fingerprint(torch.tensor(parts, dtype=torch.int64))


def share(record: Any) -> dict[int, Any]:
    """Gather a JSON value of each rank on rank 0, by rank, through the job's store; other ranks get only their own."""
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
