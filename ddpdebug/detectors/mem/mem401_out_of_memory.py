"""MEM401: an allocation failed."""

from __future__ import annotations

from typing import Any

from ddpdebug.detectors.examples import step_at
from ddpdebug.detectors.kinds import EventRule, Examples, Facts, Fields, Severity
from ddpdebug.detectors.mem.explanation import ExplainingRule, explain
from ddpdebug.detectors.mem.sizes import GIB, size_text
from ddpdebug.schema.announcements import AllocationFailure, MemoryState

_FAILED: dict[str, Any] = {
    "failed": True,
    "step": 12,
    "steps": 12,
    "world": 4,
    "phase": "forward",
    "module": "blocks.3.mlp",
    "location": "train.py:31",
    "requested": 2 * GIB,
    "allocated": 70 * GIB,
    "reserved": 71 * GIB,
    "limit": 80 * GIB,
    "split": {"parameters": 8 * GIB, "gradients": 8 * GIB, "optimizer_state": 16 * GIB, "other": 38 * GIB},
    "shapes": [[8, 4096]],
    "elements": 32768,
    "largest_elements": 8192,
}


class OutOfMemory(EventRule, ExplainingRule):
    """An allocation failed on this rank in the named phase and module.

    Impact: the rank dies or drops its step; the others wait for it in the next collective until their timeout.

    Diagnosis: `cause` is what the numbers say. `memory` compares the ranks at their last common step, `batch` the
    shapes they were working on. Every rank has written a summary to `ranks/<rank>/memory/` in the run directory, with
    torch's own table and, with `--memory-history`, the allocator's snapshot (`python -m torch.cuda._memory_viz`).

    Causes:
    - `optimizer state is made`: a peak that occurs once: the states that the first optimizer step makes
    - `too big from the start`: micro-batch, sequence length, resolution or model too large for this device
    - `larger than ever`: a batch of long or large samples: often the longest of the epoch
    - memory that grew over steps: graphs kept alive, outputs collected, caches
    - a peak that occurs once: logits over a large vocabulary in float32, evaluation
    - fragmentation: enough memory is reserved but no block is large enough
    - another process or another rank on the same device

    Remedy:
    - smaller micro-batches with accumulation under `no_sync()`
    - `torch.utils.checkpoint.checkpoint` for the named module; bfloat16 autocast
    - `gradient_as_bucket_view=True` in DDP; `ZeroRedundancyOptimizer` to shard the states
    - do not catch the error on one rank and go on: its peers wait in a collective
    """

    code = "MEM401"
    severity = Severity.CRITICAL
    title = "out of memory"
    incident = ("ranks", "step")
    events = ("memory",)
    fires_on = Examples(
        lambda: Facts(topic="alone:memory", values={2: _FAILED}),
        lambda: (
            step_at(11),
            Facts(topic="alone:memory", values={1: {**_FAILED, "phase": "optimizer", "module": None}}),
        ),
    )
    silent_on = Examples(
        lambda: Facts(topic="alone:memory", values={0: {**_FAILED, "failed": False}}),
        lambda: Facts(topic="alone:failure", values={0: {"reason": "exception: ValueError", "step": 1, "missing": []}}),
    )

    def judge(self, fact: MemoryState) -> Fields | None:
        if not isinstance(fact, AllocationFailure):
            return None
        reason = explain(fact, self)
        evidence = {
            "cause": reason.text,
            "requested": size_text(fact.requested) if fact.requested else None,
            "allocated": size_text(fact.allocated),
            "limit": size_text(fact.limit) if fact.limit else None,
            "held_by": {name.replace("_", " "): size_text(n) for name, n in fact.split.items() if n},
            "memory": self._by_rank(),
            "operation": fact.operation,
            "largest": fact.largest,
            "summary": fact.directory,
        }
        return {
            "subject": (fact.module,) if fact.module else (),
            "phase": fact.phase,
            "evidence": {name: value for name, value in evidence.items() if value},
            "actions": [
                *reason.actions,
                "do not catch the error on one rank and go on: its peers wait in a collective",
            ],
        }

    def _by_rank(self) -> dict[str, str]:
        if self.newest is None:
            return {}
        return {
            str(rank): f"{size_text(row.device_allocated_bytes or row.host_private_bytes)} after step {row.step}, "
            f"{row.batch_elements} elements"
            for rank, row in self.newest.rows.items()
        }
