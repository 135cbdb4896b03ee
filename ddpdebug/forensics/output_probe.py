"""The agreement probe: every rank runs its module on rank 0's batch; equal weights must give equal outputs.

The batch travels in the exchange, never through the job's groups. The forward runs on the inner module in eval mode
without gradients; random state, modes and buffers are put back bit for bit.
"""

from __future__ import annotations

import base64
import io
import json
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from ddpdebug import fingerprint, torch_internals as internals
from ddpdebug.isolation.process_state import kept_random_state
from ddpdebug.nested import tensors_in
from ddpdebug.probes.ddp_wrapper import Wrapper
from ddpdebug.probes.handover import Plans
from ddpdebug.probes.values import raw_bytes
from ddpdebug.schema.announcements import Agreement, Announce
from ddpdebug.schema.details import hex_digest

#: A larger batch is not sent: the exchange is for small messages.
MAX_BYTES = 4 << 20
_KIND = "agreement"


class AgreementProbe:
    """Plans and runs probes. `offer` and `run` are called on the training thread, `hear` in the background thread.

    Args:
        say: sends a JSON message to all ranks.
        announce: tells all ranks.
        plans: carries the batches to the training thread.
    """

    def __init__(self, say: Callable[..., object], announce: Announce, plans: Plans | None = None) -> None:
        self._say, self._announce = say, announce
        self._plans = plans or Plans()
        self._offered = 0

    def offer(self, arguments: Sequence[Any]) -> None:
        """Send the arguments of a forward to all ranks; called on rank 0 only.

        Raises:
            ValueError: the arguments are too large, or contain something other than tensors and plain values.
        """
        data = pack(arguments)
        if len(data) > MAX_BYTES:
            raise ValueError(f"the batch has {len(data)} bytes; the agreement probe takes at most {MAX_BYTES}")
        self._offered += 1
        self._say("agree", number=self._offered, data=base64.b64encode(data).decode())

    def hear(self, message: Mapping[str, Any], step: int) -> None:
        """Plan a probe after optimizer step `step`, which is the same on all ranks."""
        arguments = unpack(base64.b64decode(str(message["data"])))
        self._plans.add(_KIND, step, (int(message["number"]), tuple(arguments)))

    def run(self, wrappers: Sequence[Wrapper], step: int, *, last: bool = False) -> None:
        """Run the probes that are due after this step."""
        for number, arguments in self._plans.take(_KIND, None if last else step):
            module = wrappers[0].module() if wrappers else None
            if module is not None:
                self._announce(replace(look(module, arguments), step=step), number)


def look(module: torch.nn.Module, arguments: Sequence[Any]) -> Agreement:
    """Run `module(*arguments)` and return fingerprints of its output and of its weights."""
    device = next((p.device for p in internals.parameters(module)), torch.device("cpu"))
    moved = [a.to(device) if isinstance(a, torch.Tensor) else a for a in arguments]
    with undisturbed(module), torch.no_grad(), internals.as_users():
        output = module(*moved)
    weights = fingerprint.combine(fingerprint.fingerprints([p.detach() for p in internals.parameters(module)]) or [1])
    outputs = [fingerprint.fingerprint(t.detach()) for t in tensors_in(output)]
    return Agreement(output=hex_digest(fingerprint.combine(outputs or [1])), weights=hex_digest(weights))


@contextmanager
def undisturbed(module: torch.nn.Module) -> Iterator[None]:
    """Switch to eval mode; afterwards restore modes, buffers and random state bit for bit."""
    modes = [(m, m.training) for m in internals.modules(module)]
    buffers = [(b, b.detach().clone()) for b in internals.buffers(module)]
    with kept_random_state():
        for m, _ in modes:
            m.training = False
        try:
            yield
        finally:
            for m, mode in modes:
                m.training = mode
            with torch.no_grad():
                for buffer, value in buffers:
                    if fingerprint.fingerprint(buffer) != fingerprint.fingerprint(value):
                        buffer.copy_(value)


def pack(arguments: Sequence[Any]) -> bytes:
    """Serialise tensors and plain values as JSON and raw bytes; nothing in them runs code when read."""
    described: list[dict[str, Any]] = []
    raw = io.BytesIO()
    for value in arguments:
        if isinstance(value, torch.Tensor):
            data = raw_bytes(value.detach().cpu())
            described.append({"dtype": str(value.dtype), "shape": list(value.shape), "bytes": len(data)})
            raw.write(data)
        elif value is None or isinstance(value, bool | int | float | str):
            described.append({"value": value})
        else:
            raise ValueError(f"the agreement probe takes tensors and plain values, not {type(value).__name__}")
    head = json.dumps(described).encode()
    return struct.pack("<I", len(head)) + head + raw.getvalue()


def unpack(data: bytes) -> list[Any]:
    """Deserialise the result of `pack`."""
    (length,) = struct.unpack_from("<I", data)
    position = 4 + length
    values: list[Any] = []
    for item in json.loads(data[4:position]):
        if "dtype" not in item:
            values.append(item["value"])
            continue
        dtype = getattr(torch, str(item["dtype"]).removeprefix("torch."))
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"unknown dtype {item['dtype']!r}")  # noqa: TRY004 - the value is wrong, not its type
        piece = bytearray(data[position : position + item["bytes"]])
        position += item["bytes"]
        tensor = torch.frombuffer(piece, dtype=torch.uint8).view(dtype) if piece else torch.empty(0, dtype=dtype)
        values.append(tensor.reshape(item["shape"]))
    return values
