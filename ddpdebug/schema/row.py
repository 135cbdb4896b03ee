"""The fixed row of a rank for one step, its flags and its encoding. Torch-free.

The row is the only thing that every rank sends in every step that is watched. Its size does not depend on the model.
Digests are 64-bit fingerprints; 0 means "not computed in this step". NaN in a float field means "not known". This file
is the documentation of the layout; `LAYOUT_VERSION` changes whenever a field does.
"""

from __future__ import annotations

import struct
import zlib
from enum import IntFlag
from typing import Any, NamedTuple, NewType

Digest = NewType("Digest", int)

#: Parameters are dealt to this many slots by the hash of their name; each slot has its own linear checksum.
CHECKSUM_SLOTS = 8
#: Classes of replicas that a row has room for.
CLASS_SLOTS = 6
#: What is compared in each of them.
CLASS_KINDS = ("params", "grads", "state")


class Flag(IntFlag):
    """Facts of one rank in one step, one bit each."""

    FIRST = 1  # the first row of this optimizer
    CHECKED = 2  # the sampled tier ran: the digests and checksums below are filled in
    SKIPPED = 4  # GradScaler did not call the optimizer (non-finite gradients)
    PARAMS_CHANGED_OUTSIDE = 8  # parameters are not those that this rank's previous step left behind
    STATE_CHANGED_OUTSIDE = 16  # likewise for the optimizer state
    UNSYNCED_BACKWARD = 32  # a backward pass after the last synchronised one fed this step
    BYPASS = 64  # gradients arrived for DDP parameters without any forward of the DDP wrapper
    NO_DDP = 128  # no DDP owns any parameter of this optimizer
    IN_JOIN = 256  # inside DDP's Join context: ranks may stop at different times on purpose
    LOCAL_ONLY = 512  # post-local SGD and the like: replicas differ on purpose; or steps do not pair (after a Join)
    LOSS_NONFINITE = 1024
    LOCAL_GRADS_NONFINITE = 2048
    GRADS_NONFINITE = 4096
    RNG_USED_IN_FORWARD = 8192
    CLIPPED = 16384  # gradient clipping was called in this step
    CLIPPED_BEFORE_SYNC = 32768  # ... while the gradients were this rank's own
    BATCH_SAMPLED = 65536  # the batch digest covers a sample of its bytes only
    LOADED = 131072  # a load_state_dict ran since the previous step
    SHARDED_STATE = 262144  # optimizer state is sharded over ranks on purpose (ZeroRedundancyOptimizer)
    CUSTOM_REDUCTION = 524288  # a user comm hook reduces the gradients
    LOSSY_REDUCTION = (
        1048576  # ... and it approximates (PowerSGD, quantisation): its checksum cannot be held to a bound
    )
    BUFFERS_NOT_BROADCAST = 2097152  # broadcast_buffers=False
    HALF_REDUCTION = (
        4194304  # the reduction travels in 16 bits (gradients of no more, a hook), or may (an unknown hook)
    )
    CLOSURE = 8388608  # the optimizer evaluates a closure itself (LBFGS)
    FORWARD_NONFINITE = 1 << 24  # a module returned NaN or +Inf that was not its habit; -Inf alone is a mask
    INPUT_NONFINITE = 1 << 25  # an argument of the model's forward held NaN or Inf (an additive mask does not count)
    PARAMS_NONFINITE = 1 << 26  # parameters were NaN or Inf before the step already
    STEP_NONFINITE = 1 << 27  # parameters or state are NaN or Inf after a step with finite gradients
    NEAR_OVERFLOW = 1 << 28  # a 16-bit output or gradient above half of what its dtype can hold
    GUARD_SKIPPED = 1 << 29  # the numeric guard did not let this step happen
    EVAL_MODE = 1 << 30  # the model, or a part that trains, was in eval mode in every forward that trained
    GRADS_CARRIED = (
        1 << 31
    )  # gradients of the step were not its own (those of the step before, of another loss), or twice
    GRADS_DISCARDED = 1 << 32  # gradients of a backward were cleared before any optimizer had stepped
    STEPPED_TWICE = 1 << 33  # since another optimizer stepped some of the same parameters no backward has come
    CLIPPED_SCALED = 1 << 34  # clipping saw gradients that still carried the loss scale, or none that a step used
    SCHEDULED_OFTEN = 1 << 35  # one scheduler was stepped several times since the optimizer step before
    SCHEDULED_ELSEWHERE = 1 << 36  # the learning rate was set where this optimizer does not read it
    MEANS_ADDED = 1 << 37  # the losses of the step's backward passes, as far as that is known, make no one mean
    SINGLE_CLASS = 1 << 38  # all class labels of the step's losses were the same
    VAL_LOSS_SEEN = 1 << 39  # nobody has told `val_loss`: it was seen in an evaluation of the script
    LAST_STATE = 1 << 40  # not a step: what this rank's last step has left, read in full when the run ended
    MODES_MIXED = 1 << 41  # with EVAL_MODE: a module that trains and that the mode changes was in train mode
    MODE_CHANGES_NOTHING = 1 << 42  # with EVAL_MODE: the model has no module that trains and that the mode changes
    NOT_ONE_LINE = 1 << 43  # since a step more than one line has called backward, or none
    FEWER_FORWARDS = 1 << 44  # there were fewer forwards with gradients than backward passes, as far as is known
    INPUT_GRADIENT = 1 << 45  # the gradient of an input was wanted, or nobody looks at inputs any more
    GRADS_GONE = 1 << 46  # with GRADS_DISCARDED: those of the last backward
    GRADS_WRITTEN = 1 << 47  # something else than clipping and unscaling changed gradients after the last backward
    BATCH_GREW = 1 << 49  # the model was given larger inputs, all together, than for the step before
    BATCH_SHRANK = 1 << 50  # ... or smaller ones
    ALONE = 1 << 51  # the step was not to be watched: this rank has a row of it because a number was not finite
    SHARDED = 1 << 52  # the optimizer steps DTensors: ranks hold parts of parameters, and share some of these
    CLIPPED_ALL = 1 << 53  # the parameters that clipping was given are those of the optimizer that have gradients
    KEPT_GATHERED = 1 << 54  # a backward ran with gathered parameters that are not the parts which the rank holds
    SHARDS_UNREDUCED = 1 << 55  # FSDP2 had gradients of a backward at the step that it had not reduced, or not for all
    AVERAGED = 1 << 48  # with LOCAL_ONLY, where no rank has said so but later steps have shown it


class Row(NamedTuple):
    """One rank, one optimizer step. Fields named `*_digest` must agree between healthy replicas unless noted."""

    # identity
    rank: int = 0
    step: int = 0  # attempts of this optimizer so far, from 0; a step that the loss scaler skips counts
    optimizer: int = 0  # in order of first use
    flags: int = 0  # Flag
    backwards: int = 0  # backward passes of this process so far
    syncs: int = 0  # of these, with a reduction by DDP or FSDP2
    micro_batches: int = 0  # backward passes that fed this step
    without_grad: int = 0  # trainable parameters of this optimizer without a gradient
    # agreement
    modes_digest: Digest = Digest(0)  # train/eval of every module, at the forwards that a backward follows
    batch_digest: Digest = Digest(0)  # forward inputs; expected to DIFFER between ranks
    record_digest: Digest = Digest(0)  # what the DataLoader delivered, labels included; expected to DIFFER
    output_digest: Digest = Digest(0)  # forward outputs; compared only where batch and weights agree
    eval_batch_digest: Digest = Digest(0)  # inputs of forwards without gradients in eval mode since the last row
    eval_output_digest: Digest = Digest(0)  # their outputs; compared only where the inputs agree
    rng_digest: Digest = Digest(0)  # CPU generator before the first forward; may differ
    grads_digest: Digest = Digest(0)  # gradients at the step, of parameters that a DDP owns
    foreign_grads_digest: Digest = Digest(0)  # gradients at the step, of parameters that no DDP owns
    presence_digest: Digest = Digest(0)  # which parameters have a gradient
    hyper_digest: Digest = Digest(0)  # lr, weight decay, betas, ... of every group
    state_digest: Digest = Digest(0)  # moments and step counters, after the step
    params_before_digest: Digest = Digest(0)  # just before the optimizer changed them
    params_after_digest: Digest = Digest(0)  # just after
    foreign_params_digest: Digest = Digest(0)  # after the step, of parameters that no DDP owns
    frozen_params_digest: Digest = Digest(0)  # DDP parameters that no optimizer has
    buffers_digest: Digest = Digest(0)  # right after DDP's broadcast at the start of forward
    replicas_digest: Digest = Digest(0)  # watched copies outside DDP (EMA, teacher)
    # numbers
    loss_kind: int = 0  # what the first loss of the step is made of; 0 where that is not known
    loss: float = float("nan")  # mean over the micro-batches, unscaled; their sum where each is only a part
    lr: float = float("nan")  # of the first group
    loss_scale: float = float("nan")
    local_grad_norm: float = float("nan")  # 2-norm before the reduction, without the loss scale
    grad_norm: float = float("nan")  # 2-norm after the reduction, before clipping, without the loss scale
    clip_norm: float = float("nan")  # total norm that the clipping saw
    clip_max: float = float("nan")
    param_norm: float = float("nan")  # in sampled steps: 2-norm of the weights before the step, and of their change,
    update_norm: float = float("nan")  # estimated from a part of each; on rank 0 only
    val_loss: float = float("nan")  # as told by `observe(val_loss=...)` since the previous step, or seen
    # linear checksums: sum of the elements of the gradients in a slot, before and after the reduction
    local_sum_0: float = float("nan")
    local_sum_1: float = float("nan")
    local_sum_2: float = float("nan")
    local_sum_3: float = float("nan")
    local_sum_4: float = float("nan")
    local_sum_5: float = float("nan")
    local_sum_6: float = float("nan")
    local_sum_7: float = float("nan")
    local_norm_0: float = float("nan")  # 2-norm of the same elements: what the error bound scales with
    local_norm_1: float = float("nan")
    local_norm_2: float = float("nan")
    local_norm_3: float = float("nan")
    local_norm_4: float = float("nan")
    local_norm_5: float = float("nan")
    local_norm_6: float = float("nan")
    local_norm_7: float = float("nan")
    reduced_sum_0: float = float("nan")
    reduced_sum_1: float = float("nan")
    reduced_sum_2: float = float("nan")
    reduced_sum_3: float = float("nan")
    reduced_sum_4: float = float("nan")
    reduced_sum_5: float = float("nan")
    reduced_sum_6: float = float("nan")
    reduced_sum_7: float = float("nan")
    # times, seconds
    step_seconds: float = float("nan")  # since the end of the previous step
    data_seconds: float = float("nan")  # waiting for the DataLoader
    forward_seconds: float = float("nan")
    backward_seconds: float = float("nan")
    optimizer_seconds: float = float("nan")
    overhead_seconds: float = float("nan")  # spent in ddpdebug's own hooks
    backward_local_seconds: float = float("nan")  # of backward, until the last gradient of this rank's own had come
    sync_wait_seconds: float = float("nan")  # the rest of it: the reduction, and waiting for the others
    collective_seconds: float = float("nan")  # in other collectives: DDP's broadcast of buffers, those that code calls
    copy_seconds: float = float("nan")  # copies from the host to a device; without a device not known
    cpu_seconds: float = float("nan")  # processor time of the thread that trains
    gc_seconds: float = float("nan")  # in Python's garbage collector
    # memory at the end of the step, bytes; 0 where the system does not report it
    host_bytes: int = 0  # resident set
    host_private_bytes: int = 0  # of these, neither backed by a file nor shared
    host_peak_bytes: int = 0  # largest resident set so far
    host_limit_bytes: int = 0  # of the control group, or of the machine
    workers_bytes: int = 0  # private memory of the DataLoader's workers
    device_allocated_bytes: int = 0
    device_reserved_bytes: int = 0
    device_peak_bytes: int = 0  # largest allocated so far
    device_inactive_bytes: int = 0  # free pieces of segments that are in use: cannot be given back
    device_limit_bytes: int = 0
    device_retries: int = 0  # allocations that succeeded only after the cache had been emptied
    batch_elements: int = 0  # of the inputs of the step's largest forward
    live_graphs: int = 0  # earlier steps whose autograd graph is still alive
    input_elements: int = 0  # of the inputs of all its forwards with gradients
    # replicas of sharded parameters: a class is what the same ranks hold the same bytes of. Filled in where a step is
    # checked in full; 0 means that there is no such class, or that nothing of it was looked at
    class_0_key: int = 0  # the same on all ranks of a class, and on no others
    class_1_key: int = 0
    class_2_key: int = 0
    class_3_key: int = 0
    class_4_key: int = 0
    class_5_key: int = 0
    class_0_params: int = 0  # its parameters after the step
    class_1_params: int = 0
    class_2_params: int = 0
    class_3_params: int = 0
    class_4_params: int = 0
    class_5_params: int = 0
    class_0_grads: int = 0  # their gradients as the optimizer finds them, and which there are
    class_1_grads: int = 0
    class_2_grads: int = 0
    class_3_grads: int = 0
    class_4_grads: int = 0
    class_5_grads: int = 0
    class_0_state: int = 0  # the optimizer's state after the step
    class_1_state: int = 0
    class_2_state: int = 0
    class_3_state: int = 0
    class_4_state: int = 0
    class_5_state: int = 0
    # of gradients at the step, where an optimizer steps DTensors and all were clipped by one 2-norm
    part_norm: float = float("nan")  # 2-norm of all that this rank holds
    share_norm: float = float("nan")  # its share: squares of all ranks add up to those of the whole gradient
    # parameters as FSDP2 has gathered them for the step's forwards and backwards, in checked steps
    gathered_key: int = 0  # the same on all ranks that have gathered from each other, and on no others
    gathered_values: int = 0
    #: By what the script has multiplied all shards of gradients that this rank holds; NaN: by nothing, or not alike.
    grads_scaled: float = float("nan")

    @property
    def local_sums(self) -> tuple[float, ...]:
        """Checksums of the rank's own gradients, one per slot."""
        return self[_LOCAL_SUM : _LOCAL_SUM + CHECKSUM_SLOTS]

    @property
    def local_norms(self) -> tuple[float, ...]:
        """2-norms of the rank's own gradients, one per slot."""
        return self[_LOCAL_NORM : _LOCAL_NORM + CHECKSUM_SLOTS]

    @property
    def reduced_sums(self) -> tuple[float, ...]:
        """Checksums of the reduced gradients, one per slot."""
        return self[_REDUCED_SUM : _REDUCED_SUM + CHECKSUM_SLOTS]

    @property
    def other_seconds(self) -> float:
        """The step's time beyond loader, forward, backward, optimizer and collectives; NaN if unknown."""
        known = (self.data_seconds, self.forward_seconds, self.backward_seconds, self.optimizer_seconds)
        rest = self.step_seconds - sum(seconds for seconds in (*known, self.collective_seconds) if seconds >= 0)
        return rest if not rest < 0 else 0.0

    @property
    def wait_seconds(self) -> float:
        """The time spent waiting for other ranks or exchanging data with them; if unknown, all of backward."""
        waited = self.sync_wait_seconds if self.sync_wait_seconds >= 0 else self.backward_seconds
        return sum(seconds for seconds in (waited, self.collective_seconds) if seconds >= 0)

    @property
    def own_seconds(self) -> float:
        """The rank's own time: the step without the time spent waiting for others; NaN if unknown."""
        if not self.step_seconds >= 0 or not (self.sync_wait_seconds >= 0 or self.backward_seconds >= 0):
            return float("nan")
        return max(0.0, self.step_seconds - self.wait_seconds)

    @property
    def own_phases(self) -> dict[str, float]:
        """The parts of `own_seconds`, in order; unknown ones are 0."""
        found = {
            "data": self.data_seconds,
            "forward": self.forward_seconds,
            "backward": self.backward_local_seconds,
            "optimizer": self.optimizer_seconds,
            "other": self.other_seconds,
        }
        return {phase: seconds if seconds >= 0 else 0.0 for phase, seconds in found.items()}

    def has(self, flag: Flag) -> bool:
        """Whether `flag` is set."""
        return bool(self.flags & flag)


_LOCAL_SUM = Row._fields.index("local_sum_0")
_LOCAL_NORM = Row._fields.index("local_norm_0")
_REDUCED_SUM = Row._fields.index("reduced_sum_0")

#: Fields that are compared between ranks.
DIGESTS = tuple([name for name in Row._fields if name.endswith("_digest")])


def _kind(name: str) -> str:
    if name.endswith("_digest") or name.startswith(("class_", "gathered_")):
        return "Q"
    return "d" if isinstance(Row._field_defaults[name], float) else "q"


def _format() -> str:
    return "<" + "".join(map(_kind, Row._fields))


_STRUCT = struct.Struct(_format())
ROW_BYTES = _STRUCT.size
#: Identifies the layout: readers refuse rows written under another one.
LAYOUT_VERSION = zlib.crc32((_format() + ",".join(Row._fields)).encode())


def encode(row: Row) -> bytes:
    """Encode a row as `ROW_BYTES` bytes."""
    return _STRUCT.pack(*row)


def decode(data: bytes | memoryview, offset: int = 0) -> Row:
    """Decode the row at `offset`."""
    return Row._make(_STRUCT.unpack_from(data, offset))


def layout() -> dict[str, Any]:
    """Describe the layout for readers of a run directory that do not have this module."""
    return {"version": LAYOUT_VERSION, "format": _STRUCT.format, "fields": list(Row._fields)}
