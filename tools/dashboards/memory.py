"""Memory: how full, how fast it fills, on which rank."""

from __future__ import annotations

from tools.dashboards import promql as q
from tools.dashboards.parts import BAD, GOOD, WARN, Board, lines, linked, listing, tile


def board() -> Board:
    """Return the dashboard."""
    made = Board(
        "ddpdebug-memory",
        "Memory",
        "Device and host memory of the ranks. Steady growth is a leak, a sawtooth is fragmentation, one rank alone "
        "is an uneven batch.",
    )
    made.size(6, 5)
    made.add(
        tile(q.HEADROOM, unit="percentunit", steps=((None, BAD), (0.05, WARN), (0.15, GOOD)), missing="limit unknown"),
        "Headroom",
        "What is left of the limit on the fullest rank, device or host. Under 5 %: smaller batches, or checkpoint "
        "activations, before the job does it for you.",
    )
    growth = f"deriv(ddpdebug_host_memory_bytes{{{q.RANKS}}}[15m])"
    made.add(
        tile(
            f"3600 * max({q.by_rank(growth)})",
            unit="bytes",
            steps=((None, GOOD), (1 << 30, WARN), (10 << 30, BAD)),
            missing="needs 15 minutes",
        ),
        "Host growth per hour",
        "Fastest growth of a rank's resident memory. More than a gigabyte an hour for long: a list that keeps "
        "tensors, or a loader that caches.",
    )
    made.add(
        lines([(f"max by (kind) ({q.chosen('ddpdebug_device_memory_bytes')})", "{{kind}}")], unit="bytes"),
        "Device memory of the fullest rank",
        "allocated is what tensors take, reserved what the allocator holds, peak the highest so far. A wide gap "
        "between reserved and allocated: fragmentation.",
        width=12,
    )
    _ranks(made)
    return made


def _ranks(made: Board) -> None:
    made.row("By rank")
    for kind, text in (
        ("allocated", "What tensors take. One rank above the others: its batches are larger or longer."),
        ("reserved", "What torch's allocator holds and other processes cannot have."),
    ):
        query = q.by_rank(f'ddpdebug_device_memory_bytes{{kind="{kind}", {q.RANKS}}}')
        panel = lines(q.spread(query), unit="bytes", missing="no device memory: a run on the CPU")
        made.add(linked(panel, "the ranks", "ddpdebug-ranks"), f"Device memory {kind}", text)
    host = q.ranks("ddpdebug_host_memory_bytes")
    made.add(
        lines(q.spread(host), unit="bytes"),
        "Host memory",
        "Resident memory of the ranks' processes, loader workers not included. All ranks growing alike: a leak in "
        "the training loop.",
    )
    labels = {"rank": "Rank", "Value #A": "Host", "Value #B": "Device", "Value #C": "Device peak"}
    device = "ddpdebug_device_memory_bytes"
    made.add(
        listing(
            [
                q.worst(20, host),
                q.by_rank(f'{device}{{kind="reserved", {q.RANKS}}}'),
                q.by_rank(f'{device}{{kind="peak", {q.RANKS}}}'),
            ],
            names=labels,
            units={"Host": "bytes", "Device": "bytes", "Device peak": "bytes"},
            sort="Device",
        ),
        "Fullest ranks",
        "Memory of each rank now. Sort by a column to find the one that will fail first.",
    )
