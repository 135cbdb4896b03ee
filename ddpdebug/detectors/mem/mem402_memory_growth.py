"""MEM402: the memory of the device grows steadily."""

from __future__ import annotations

from ddpdebug.detectors.examples import growing, holders
from ddpdebug.detectors.kinds import Examples, Severity, Threshold
from ddpdebug.detectors.mem.growth import GrowthRule, Series
from ddpdebug.detectors.mem.sizes import MIB


class MemoryGrowth(GrowthRule):
    """Allocated device memory at the end of the step rises steadily: by about as much in six blocks of steps in a row.

    It is told while it goes on once it would reach the limit within twenty times as long as it has lasted, else when
    the run ends with it: until then it may be a cache that fills.

    Impact: the run ends in an out-of-memory error at about the projected step, typically hours after the cause.

    Diagnosis: divide the slope by known sizes: one activation, one batch, one scalar's graph. Where the evidence names
    a holder, read the line that fills it. Growth that stops when evaluation is left out belongs to evaluation. Each
    block counts with its minimum, so that evaluations, long batches and cached blocks do not look like growth.

    Causes:
    - predictions, features or metrics collected on the device
    - a tensor with its graph kept across steps: validation without `torch.no_grad()`, summed losses, saved outputs
    - hooks registered again every step, or closures that capture tensors
    - a cache, queue or memory bank without a bound
    - `backward(create_graph=True)` or `retain_graph=True` whose graph is never released

    Remedy:
    - store `loss.detach()` or `loss.item()`, and move collected outputs to the CPU
    - evaluate under `torch.no_grad()`, remove hook handles with `handle.remove()`
    - bound the cache; if the growth is wanted, say so: `ddpdebug.expect_growth("replay buffer", 2 << 30)`
    - avoid `create_graph=True` with `.grad`, use `torch.autograd.grad`; `empty_cache()` cures nothing here
    """

    code = "MEM402"
    severity = Severity.WARNING
    title = "device memory grows steadily"
    series = (Series("device", "device_allocated_bytes", "device_limit_bytes"),)
    memory_growth_device = least = Threshold(
        8,
        "MiB that the blocks must bring together, of a device",
        source="chosen: four blocks of 2 MiB, to which its allocator rounds",
    )
    fires_on = Examples(
        lambda: growing(
            "device_allocated_bytes", lambda step: 300 * MIB + 2 * MIB * step, 70, holders=holders("cache")
        ),
        lambda: growing(
            "device_allocated_bytes", lambda step: 300 * MIB + MIB * step + 90 * MIB * (step % 10 == 0), 90
        ),
    )
    silent_on = Examples(
        lambda: growing("device_allocated_bytes", lambda step: 300 * MIB + 2 * MIB * min(step, 30), 90),  # warm-up
        lambda: growing(
            "device_allocated_bytes", lambda step: 300 * MIB + 50 * MIB * (step * 7 % 11), 90
        ),  # lengths vary
        lambda: growing(
            "device_allocated_bytes", lambda step: 300 * MIB + 40 * MIB * (step // 30), 90
        ),  # jumps at epochs
        lambda: growing("device_allocated_bytes", lambda step: 300 * MIB + 2 * MIB * step, 70, declared=1024 * MIB),
    )
