"""Memory: how full, when it will be full, on which rank."""

from __future__ import annotations

from tools.dashboards import promql as q
from tools.dashboards.parts import BAD, GOOD, NOTE, WARN, WORSE, Board, graded, lines, linked, listing, tile

_HOST = "ddpdebug_host_memory_bytes"
_DEVICE = "ddpdebug_device_memory_bytes"


def board() -> Board:
    """Return the dashboard."""
    made = Board(
        "ddpdebug-memory",
        "Memory",
        "Host and device memory of the ranks. Steady growth is a leak, a sawtooth is fragmentation, one rank alone "
        "is an uneven batch.",
    )
    made.size(6, 5)
    made.add(
        tile(
            q.verdict(f"1 - {q.of_run('run:ddpdebug_memory:ratio')}"),
            unit="percentunit",
            steps=((None, BAD), (0.05, WARN), (0.15, GOOD)),
            missing="limit unknown",
        ),
        "Headroom",
        "What is left of the limit of the fullest device or node, whose ranks share it. Under 5 %: smaller batches, or "
        "checkpoint activations, before the job does it for you.",
    )
    full = q.of_run("run:ddpdebug_memory_full_seconds:min")
    known = q.of_run("run:ddpdebug_ranks_up:sum")
    made.add(
        graded(
            [
                (f"{full} < 1800", "soon", BAD),
                (f"({full} >= 1800) < 14400", "within hours", WORSE),
                (f"{full} >= 14400", "later", NOTE),
                (f"(-10 + 0 * {known}) unless {full}", "steady", GOOD),
                (f"-1 - {q.STATE} unless {known}", "ended", GOOD),
            ],
            unit="s",
            missing="no data",
            words=((-10, "not growing", GOOD),),
        ),
        "Full in",
        "When the first memory, of a device or a node, is full at its present growth. Growth that goes on is a list "
        "that keeps tensors, or a loader that caches: the finding about it says what holds it (MEM4xx).",
    )
    used = [(q.of_run(f"run:ddpdebug_{of}_memory:ratio"), of) for of in ("host", "device")]
    made.add(
        lines(used, unit="percentunit", missing="limit unknown", share=True),
        "Share of the limit",
        "Of the fullest node and, in a run that has devices, of the fullest device. At 100 % the system or torch ends "
        "the job.",
        width=12,
    )
    _ranks(made)
    _devices(made)
    return made


def _ranks(made: Board) -> None:
    made.row("By rank")
    limit = f"max({q.chosen('ddpdebug_host_memory_limit_bytes')} > 0)"
    made.add(
        lines([*q.spread(_HOST), (limit, "limit of the node")], unit="bytes"),
        "Host memory",
        "Resident memory of the ranks' processes, loader workers not included. All ranks growing alike: a leak in "
        "the training loop.",
    )
    labels = {
        "rank": "Rank",
        "Value #A": "Host",
        "Value #B": "Limit of the node",
        "Value #C": "Full in",
        "Value #D": "Device",
        "Value #E": "Device peak",
    }
    made.add(
        listing(
            [
                q.worst(20, q.by_rank(_HOST)),
                q.by_rank("ddpdebug_host_memory_limit_bytes"),
                f"min by (rank) ({q.chosen('ddpdebug_memory_full_seconds', q.RANKS)})",
                q.by_rank(_DEVICE, 'kind="reserved"'),
                q.by_rank(_DEVICE, 'kind="peak"'),
            ],
            names=labels,
            units={
                "Host": "bytes",
                "Limit of the node": "bytes",
                "Full in": "s",
                "Device": "bytes",
                "Device peak": "bytes",
            },
            sort="Host",
            missing="no rank answers now",
        ),
        "Fullest ranks",
        "Memory of each rank now. Sort by a column to find the one that will fail first; a rank whose memory does not "
        "grow has no time in which it is full, one without a device no memory of it.",
    )


def _devices(made: Board) -> None:
    made.row("Devices (open it for a run on GPUs)", closed=True)
    made.add(
        lines(
            [
                (f"max by (kind) ({q.chosen(_DEVICE)})", "{{kind}}"),
                (f"max({q.chosen('ddpdebug_device_memory_limit_bytes')} > 0)", "limit"),
            ],
            unit="bytes",
            missing="no device memory: a run on the CPU",
        ),
        "Device memory of the fullest rank",
        "allocated is what tensors take, reserved what the allocator holds, peak the highest so far. A wide gap "
        "between reserved and allocated: fragmentation.",
    )
    for kind, text in (
        ("allocated", "What tensors take. One rank above the others: its batches are larger or longer."),
        ("reserved", "What torch's allocator holds and other processes cannot have."),
    ):
        panel = lines(q.spread(_DEVICE, f'kind="{kind}"'), unit="bytes", missing="no device memory: a run on the CPU")
        made.add(linked(panel, "the ranks", "ddpdebug-ranks"), f"Device memory {kind}", text)
    retries = f"max by (rank) ({q.rate('ddpdebug_allocation_retries_total', q.RANKS)})"
    made.add(
        lines([(q.worst(8, retries), "rank {{rank}}")], unit="ops", missing="no device memory: a run on the CPU"),
        "Allocation retries per second",
        "Allocations that succeeded only after the cache was emptied, which costs time. More than none for long: "
        "memory is nearly full or fragmented.",
    )
