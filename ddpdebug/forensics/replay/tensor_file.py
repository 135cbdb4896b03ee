"""Writes tensors in the safetensors format piece by piece, as the job's memory has no room for a copy of a model.

The format is a length (u64), a JSON header that says dtype, shape and place of each tensor, and the bytes. The
library's own writer would hold all of the bytes in memory; it is used for reading.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Mapping
from pathlib import Path

import torch

from ddpdebug.disk import Disk, NoRoomError, write_all
from ddpdebug.probes.values import raw_bytes

#: The format's names. Other dtypes are written as bytes, and the reader is told in the bundle's JSON.
FORMAT_NAMES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.int16: "I16",
    torch.int32: "I32",
    torch.int64: "I64",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}
_PIECE = 1 << 20  # two of them are held at once, beside what the job's own thread reads meanwhile


def can_write(tensor: torch.Tensor) -> bool:
    """Whether a tensor can be written: dense, not quantised, with data."""
    return tensor.layout is torch.strided and tensor.device.type != "meta" and not tensor.is_quantized


def write_tensors(path: Path, tensors: Mapping[str, torch.Tensor], disk: Disk | None = None) -> int:
    """Write a new file; return its size. Raise OSError if the disk is full, or its space reserved for the job."""
    disk = disk or Disk()
    header: dict[str, object] = {}
    end = 0
    for name, tensor in tensors.items():
        known = FORMAT_NAMES.get(tensor.dtype)
        shape = list(tensor.shape) if known else [tensor.nbytes]
        header[name] = {"dtype": known or "U8", "shape": shape, "data_offsets": [end, end + tensor.nbytes]}
        end += tensor.nbytes
    head = json.dumps(header).encode()
    head += b" " * (-len(head) % 8)
    with disk.open(path, os.O_WRONLY | os.O_EXCL) as file:
        write_all(file.fileno(), struct.pack("<Q", len(head)) + head)
        for tensor in tensors.values():
            flat = tensor.detach().resolve_conj().resolve_neg().reshape(-1)
            step = max(1, _PIECE // max(1, flat.element_size()))
            for start in range(0, flat.numel(), step):
                piece = raw_bytes(flat[start : start + step].cpu())
                if (reason := disk.refusal(path, len(piece), "bundles")) is not None:
                    raise NoRoomError(reason)  # the job has written something meanwhile
                write_all(file.fileno(), piece)
    return 8 + len(head) + end
