"""64-bit fingerprints of tensors, bytes and texts.

Two tensors of the same shape and dtype have the same fingerprint when their elements are equal bit for bit (-0.0 is
not 0.0, NaN payloads count), whatever their strides; any changed bit and any moved element changes it. Shape and dtype
are not part of it: the structure digest compares those. A fingerprint is never 0, which means "not computed".

Nothing here draws random numbers, writes to a tensor, raises a version counter or builds an autograd graph.

| tensor | fingerprint |
|---|---|
| CPU, dense | `xxh3_64` of its memory, no copy; of its elements in logical order where it is not contiguous |
| on a device | the same, of a copy in host memory; this waits for the device, `device_fingerprint.py` does not |
| no elements | `EMPTY` |
| no data: meta, fake, lazy, symbolic zero, storage freed (FSDP) | `NO_DATA` |
| sparse | of its coalesced indices and values (COO), of its index and value tensors (CSR, CSC, BSR, BSC) |
| wrapper subclass (`__tensor_flatten__`: DTensor, jagged, ...) | of the tensors that it wraps |
| any other subclass | as a plain tensor, its `__torch_function__` is not asked |
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy
from xxhash import xxh3_64, xxh3_64_intdigest

from ddpdebug.torch_internals import as_plain

#: Temporary memory for tensors that are not contiguous, and on devices, stays below this many bytes.
CHUNK_BYTES = 64 << 20
#: Large tensors are sampled in blocks of this size.
BLOCK_BYTES = 4096
#: Up to this size `glance` reads a tensor whole.
GLANCE_BYTES = 1 << 16

#: What `spots` reads of a tensor.
SPOT_BYTES = 64

_BLOCK = ctypes.c_char * BLOCK_BYTES
MASK = (1 << 64) - 1
NEVER_ZERO = 0x9E3779B97F4A7C15
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_STRIDED = torch.strided
#: Classes of tensors that have no code of somebody else's.
PLAIN = frozenset({Tensor, torch.nn.Parameter})


def of_bytes(data: bytes | bytearray | memoryview) -> int:
    """Return the fingerprint of bytes."""
    return xxh3_64_intdigest(data) or NEVER_ZERO


def of_text(text: str) -> int:
    """Return the fingerprint of a text."""
    return of_bytes(text.encode("utf-8", "surrogatepass"))


def combine(values: Sequence[int]) -> int:
    """Return one fingerprint of several, sensitive to their order and number. Signed values count modulo 2**64."""
    return of_bytes(struct.pack(f"<{len(values)}Q", *[value & MASK for value in values]))


EMPTY = of_bytes(b"")
NO_DATA = of_text("ddpdebug: a tensor without data")


def fingerprint(tensor: Tensor) -> int:
    """Return the fingerprint of a tensor's elements; see the module's table."""
    if type(tensor) in PLAIN and tensor.is_cpu and tensor.layout is _STRIDED and tensor.is_contiguous():
        size = tensor.nbytes
        if size == 0:
            return EMPTY
        # A storage may be shorter than its tensor claims (FSDP frees them): reading on would crash the process.
        fits = size + tensor.storage_offset() * tensor.itemsize <= _storage_bytes(tensor)
        address = tensor.data_ptr() if fits else 0
        if address and not (tensor.is_conj() or tensor.is_neg()):
            return xxh3_64_intdigest(_memory_type(size).from_address(address)) or NEVER_ZERO
    return _fingerprint_of_unusual(tensor)


def fingerprints(tensors: Sequence[Tensor]) -> list[int]:
    """Return the fingerprint of each tensor."""
    if not {*map(type, tensors)} <= PLAIN:
        return [fingerprint(tensor) for tensor in tensors]
    found = []
    for tensor in tensors:  # as `fingerprint` does: a call for each takes as long as the reading of a small one
        if tensor.is_cpu and tensor.layout is _STRIDED and tensor.is_contiguous() and (size := tensor.nbytes):
            fits = size + tensor.storage_offset() * tensor.itemsize <= tensor.untyped_storage().nbytes()
            address = tensor.data_ptr() if fits else 0
            if address and not (tensor.is_neg() or tensor.is_conj()):
                found.append(xxh3_64_intdigest(_memory_type(size).from_address(address)) or NEVER_ZERO)
                continue
        found.append(fingerprint(tensor))
    return found


def glance(tensor: Tensor) -> int:
    """Return a fingerprint that reads little: the whole of a tensor up to `GLANCE_BYTES`, else three blocks of it.

    Whatever changes a large tensor densely (an optimizer, scaling, a load) changes it; a single element may not.
    Equal to `fingerprint` where the whole is read.
    """
    size = tensor.nbytes if tensor.is_cpu and tensor.layout is _STRIDED and type(tensor) in PLAIN else 0
    if size <= GLANCE_BYTES or not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
        return fingerprint(tensor)
    if size + tensor.storage_offset() * tensor.itemsize > _storage_bytes(tensor):
        return fingerprint(tensor)
    address = tensor.data_ptr()
    if not address:
        return fingerprint(tensor)
    digest = xxh3_64_intdigest(_BLOCK.from_address(address), size & 0xFFFFFFFF)
    digest = xxh3_64_intdigest(_BLOCK.from_address(address + size // 2 // 64 * 64), digest)
    return xxh3_64_intdigest(_BLOCK.from_address(address + size - BLOCK_BYTES), digest) or NEVER_ZERO


def spots(tensors: Sequence[Tensor]) -> int:
    """Return one fingerprint of `SPOT_BYTES` in the middle of each tensor's memory; all are dense and on the CPU.

    Whatever rewrites a model (a load, an average, another precision) changes it; an edit elsewhere does not.
    """
    digest = NEVER_ZERO
    for tensor in tensors:
        size, item = tensor.nbytes, tensor.itemsize
        if size == 0 or size + tensor.storage_offset() * item > _storage_bytes(tensor):
            continue
        length = min(size, SPOT_BYTES)
        address = tensor.data_ptr() + (size - length) // 2
        digest = xxh3_64_intdigest(_memory_type(length).from_address(address), digest)
    return digest


def row_fingerprints(tensor: Tensor, row_bytes: int, most: int) -> list[int]:
    """Return fingerprints of the rows of a dense host tensor; of more than `most` rows, evenly spaced ones.

    Empty if the tensor lies elsewhere or does not consist of whole rows. No operation of torch is called.
    """
    size = tensor.nbytes if type(tensor) in PLAIN and tensor.is_cpu and tensor.layout is _STRIDED else 0
    if not 0 < row_bytes <= size or size % row_bytes:
        return []
    number, apart = size // row_bytes, row_bytes if tensor.is_contiguous() else _rows_apart(tensor, row_bytes)
    end = tensor.storage_offset() * tensor.itemsize + (number - 1) * apart + row_bytes
    if not apart or tensor.is_conj() or tensor.is_neg() or end > _storage_bytes(tensor):
        return []
    address, kind = tensor.data_ptr(), _memory_type(row_bytes)
    places = range(0, number, max(1, -(-number // most)))
    return [xxh3_64_intdigest(kind.from_address(address + i * apart)) for i in places] if address else []


def _rows_apart(tensor: Tensor, row_bytes: int) -> int:
    """Return the bytes from one row to the next where each lies in one piece, as in `tokens[:, :-1]`; else 0."""
    (first, *sizes), (apart, *strides) = tensor.shape, tensor.stride()
    piece = 1
    for size, stride in zip(reversed(sizes), reversed(strides), strict=True):
        if size > 1 and stride != piece:
            return 0
        piece *= size
    return apart * tensor.itemsize if first * row_bytes == tensor.nbytes and apart > 0 else 0


def sampled_fingerprint(tensor: Tensor, limit_bytes: int = 1 << 20) -> tuple[int, bool]:
    """Return the fingerprint, and whether it covers only a sample of about `limit_bytes` because the tensor is larger.

    The sample is a fixed set of evenly spaced blocks, the first and the last included, with the total length.
    """
    if not _is_dense(tensor) or tensor.nbytes <= max(limit_bytes, 2 * BLOCK_BYTES):
        return fingerprint(tensor), False
    if not tensor.is_cpu:
        return _of_sample(_sample_on_device(tensor, limit_bytes), tensor.nbytes), True
    plain = integers_of(tensor)
    if not has_data(plain):
        return NO_DATA, False
    digest = xxh3_64(struct.pack("<Q", plain.nbytes))
    for start, stop in _blocks(plain, limit_bytes):
        for piece in _logical(plain, start, stop):
            digest.update(_memory(piece))
    return digest.intdigest() or NEVER_ZERO, True


def sample(tensor: Tensor, limit_bytes: int = 1 << 20) -> tuple[Tensor, Callable[[Tensor], int], bool] | None:
    """Return the part of a dense device tensor that `sampled_fingerprint` reads, for a copy without waiting.

    With it comes what makes the fingerprint of the copy in host memory, and whether it is a sample. None where there is
    nothing to copy, or more than one block of memory.
    """
    if tensor.is_cpu or not _is_dense(tensor) or tensor.numel() == 0 or not has_data(tensor):
        return None
    size = tensor.nbytes
    if size <= max(limit_bytes, 2 * BLOCK_BYTES):
        return integers_of(tensor).contiguous().reshape(-1), fingerprint, False
    return _sample_on_device(tensor, limit_bytes), lambda copy: _of_sample(copy, size), True


def mixed(values: Tensor) -> Tensor:
    """Return the numbers of an int64 tensor, each scrambled, so that neighbouring values become unrelated."""
    found = values * signed(0x9E3779B97F4A7C15)
    found ^= found >> 32
    found *= signed(0xD6E8FEB86659FD93)
    return found ^ (found >> 29)


def rows(tensor: Tensor) -> Tensor:
    """Return one int64 hash for each row of a dense CPU tensor that has elements, in bounded temporary memory."""
    with torch.no_grad():
        words = words_of(tensor).reshape(len(tensor), -1)
        weights = weights_of(words.shape[1], words.device)
        chunks = torch.split(words, max(1, CHUNK_WORDS // words.shape[1]))
        return mixed(torch.cat([(chunk * weights).sum(1) for chunk in chunks]))


def unordered(columns: Sequence[Tensor]) -> int:
    """Return a fingerprint of a table that does not depend on the order of its rows; its columns are int64 tensors."""
    with torch.no_grad():
        weights = weights_of(len(columns), columns[0].device).tolist()
        whole = mixed(sum((column * weight for column, weight in zip(columns, weights, strict=True)), columns[0] * 0))
        return combine([int(whole.sum()), len(whole)])


# -- host memory


@lru_cache(maxsize=8192)
def _memory_type(size: int) -> type[ctypes.Array[ctypes.c_char]]:
    return ctypes.c_char * size  # creating the type costs more than hashing a small tensor


def _memory(tensor: Tensor) -> ctypes.Array[ctypes.c_char]:
    return _memory_type(tensor.nbytes).from_address(tensor.data_ptr())


def _storage_bytes(tensor: Tensor) -> int:
    try:
        return tensor.untyped_storage().nbytes()
    except RuntimeError as error:  # layouts without a storage
        if type(error) not in {RuntimeError, NotImplementedError}:
            raise  # a class of somebody else's: a signal handler's
        return -1


def has_data(tensor: Tensor) -> bool:
    """Whether all memory of a dense tensor is allocated: FSDP and others free it while the tensor object stays."""
    if tensor.is_meta or _storage_bytes(tensor) < 0 or tensor.untyped_storage().device.type == "meta":
        return False
    last = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    fits = (tensor.storage_offset() + last + 1) * tensor.itemsize <= _storage_bytes(tensor)
    return fits and tensor.data_ptr() != 0


def _is_dense(tensor: Tensor) -> bool:
    if hasattr(tensor, "__tensor_flatten__") or is_lazy(tensor):
        return False
    return tensor.layout is torch.strided and not (tensor.is_meta or tensor.is_nested)


def integers_of(tensor: Tensor) -> Tensor:
    """Return a plain tensor of the same bits, as integers if a type has that size: those can always be copied."""
    with torch.no_grad(), as_plain():
        plain = tensor.detach() if type(tensor) in PLAIN else tensor.detach().as_subclass(Tensor)
        plain = plain.resolve_conj().resolve_neg()
        return plain.view(_INTEGERS[plain.itemsize]) if plain.itemsize in _INTEGERS else torch.view_as_real(plain)


def _fingerprint_of_unusual(tensor: Tensor) -> int:
    if is_lazy(tensor) or tensor.is_meta:
        return NO_DATA
    if hasattr(tensor, "__tensor_flatten__"):
        names, _ = tensor.__tensor_flatten__()
        inner = [value for name in names if isinstance(value := getattr(tensor, name), Tensor)]  # not a device mesh
        return combine([fingerprint(value) for value in inner])
    if not _is_dense(tensor):
        return combine(fingerprints(_parts(tensor)))
    if tensor.numel() == 0:
        return EMPTY
    if not has_data(tensor):
        return NO_DATA
    plain = integers_of(tensor)
    digest = xxh3_64()
    for piece in _logical(plain, 0, plain.numel()):
        digest.update(_memory(piece))
    return digest.intdigest() or NEVER_ZERO


def _parts(tensor: Tensor) -> list[Tensor]:
    """Take a tensor that is not one block of memory apart."""
    with torch.no_grad():
        plain = tensor.detach()
        if plain.layout is torch.sparse_coo:
            plain = plain.coalesce()
            return [plain.indices(), plain.values()]
        if plain.layout in (torch.sparse_csr, torch.sparse_bsr):
            return [plain.crow_indices(), plain.col_indices(), plain.values()]
        if plain.layout in (torch.sparse_csc, torch.sparse_bsc):
            return [plain.ccol_indices(), plain.row_indices(), plain.values()]
        return list(plain.unbind()) if plain.is_nested else [plain.to_dense()]


def _logical(tensor: Tensor, start: int, stop: int) -> Iterator[Tensor]:
    """Yield the elements `start` to `stop`, counted in logical order, as contiguous host tensors of bounded size."""
    if start >= stop:
        return
    if tensor.is_contiguous() and tensor.is_cpu:
        yield tensor.view(-1)[start:stop]
        return
    whole = start == 0 and stop == tensor.numel()
    if tensor.ndim == 0 or (whole and tensor.nbytes <= CHUNK_BYTES):
        yield tensor.contiguous().cpu()
        return
    inner = tensor.numel() // len(tensor)
    first, last = -(-start // inner), stop // inner  # rows that are wanted entirely
    if first > last:  # within one row
        yield from _logical(tensor[last], start - last * inner, stop - last * inner)
        return
    if start < first * inner:
        yield from _logical(tensor[first - 1], start - (first - 1) * inner, inner)
    rows = max(1, CHUNK_BYTES // (inner * tensor.itemsize))
    for row in range(first, last, rows):
        part = tensor[row : min(row + rows, last)]
        part = part[0] if len(part) == 1 and tensor.ndim > 1 else part
        yield from _logical(part, 0, part.numel())
    if stop > last * inner:
        yield from _logical(tensor[last], 0, stop - last * inner)


def _blocks(tensor: Tensor, limit_bytes: int) -> Iterator[tuple[int, int]]:
    """Yield the sampled blocks of a tensor as ranges of elements."""
    count = max(2, limit_bytes // BLOCK_BYTES)
    length = BLOCK_BYTES // tensor.itemsize
    for i in range(count):
        start = i * (tensor.numel() - length) // (count - 1)
        yield start, start + length


def _sample_on_device(tensor: Tensor, limit_bytes: int) -> Tensor:
    """Return evenly spaced blocks and the last one, by two operations: each block by itself would be a launch."""
    flat = integers_of(tensor).contiguous().reshape(-1)
    count, length = max(2, limit_bytes // BLOCK_BYTES), BLOCK_BYTES // flat.itemsize
    step = (len(flat) - length) // (count - 1)
    blocks = flat.as_strided((count - 1, length), (step, 1))
    return torch.cat([blocks.reshape(-1), flat[-length:]])


def _of_sample(sample: Tensor, size: int) -> int:
    return combine([fingerprint(sample), size])


# -- words and weights

#: Weights repeat after so many words, times one odd number for each chunk.
CHUNK_WORDS = CHUNK_BYTES // 32  # a chunk needs its words, their products and the weights, eight bytes each


def signed(value: int) -> int:
    """Return the signed 64-bit integer with the bits of an unsigned one."""
    return value - (1 << 64) if value >> 63 else value


def weights_of(count: int, device: torch.device) -> Tensor:
    """Return odd pseudorandom weights for `count` positions: consecutive integers, scrambled."""
    return mixed(torch.arange(1, count + 1, dtype=torch.int64, device=device)) | 1


def words_of(tensor: Tensor) -> Tensor:
    """View a tensor's elements as integers of at most 32 bits, in logical order.

    Not of 64: the difference of two odd weights is even, so two values that differ in bit 63 only could change places
    unseen.
    """
    plain = integers_of(tensor).contiguous().reshape(-1)
    plain = plain.view(torch.int64) if plain.is_floating_point() else plain  # the parts of complex128
    return plain.view(torch.int32) if plain.itemsize == 8 else plain
