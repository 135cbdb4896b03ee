"""Queries in the words of the dashboards. A run is chosen by joining `ddpdebug_run_info`: it needs no label on targets.

Ranks of one run may repeat a fact that all of them know, and a restart may leave two series for a moment: everything is
aggregated, so that a rank is one line.
"""

from __future__ import annotations

#: The run chosen in the dashboard, once per target.
RUN = 'ddpdebug_run_info{run_id="$run"}'
RANKS = 'rank=~"$rank"'
JOIN = "* on (job, instance) group_left ()"


def chosen(expression: str) -> str:
    """Keep of any expression that still has its target's labels what belongs to the chosen run."""
    return f"{expression} {JOIN} {RUN}"


def by_rank(selector: str) -> str:
    """Return a gauge by rank."""
    return f"max by (rank) ({chosen(selector)})"


def ranks(name: str) -> str:
    """Return a gauge of the chosen ranks, by rank."""
    return by_rank(f"{name}{{{RANKS}}}")


def shared(selector: str, *labels: str) -> str:
    """Return what all ranks know alike."""
    by = f" by ({', '.join(labels)})" if labels else ""
    return f"max{by} ({chosen(selector)})"


def rate(selector: str, *labels: str) -> str:
    """Return the rate of a counter by these labels, of the rank that counts most."""
    return f"max by ({', '.join(labels)}) ({chosen(f'rate({selector}[$__rate_interval])')})"


def increase(selector: str, window: str, *labels: str) -> str:
    """Return how much a counter grew, of the rank that counts most."""
    by = f" by ({', '.join(labels)})" if labels else ""
    return f"max{by} ({chosen(f'increase({selector}[{window}])')})"


def phase_seconds(phases: str, only: str = "") -> str:
    """Return the mean time per step of phases (a regular expression) by rank.

    Args:
        only: a matcher that chooses ranks, as `RANKS`.
    """
    of = f", {only}" if only else ""
    total = chosen(f'rate(ddpdebug_phase_seconds_sum{{phase=~"{phases}"{of}}}[$__rate_interval])')
    count = chosen(f'rate(ddpdebug_phase_seconds_count{{phase="forward"{of}}}[$__rate_interval])')
    return f"sum by (rank) ({total}) / max by (rank) ({count})"


#: What a rank does before it waits for the others: what makes a straggler.
OWN_PHASES = "data|forward"


def spread(expression: str) -> list[tuple[str, str]]:
    """Return (query, name) of the bounds and the middle of something by rank: legible for any number of ranks."""
    return [
        (f"max({expression})", "highest rank"),
        (f"quantile(0.5, {expression})", "median rank"),
        (f"min({expression})", "lowest rank"),
    ]


def worst(count: int, expression: str) -> str:
    """Return the series with the largest values at each moment."""
    return f"topk({count}, {expression})"


def by_run(selector: str, *labels: str) -> str:
    """Return what all ranks of a run know alike, or the largest of what they do not, for all runs."""
    by = ", ".join(("run_id", *labels))
    return f"max by ({by}) ({selector} * on (job, instance) group_left (run_id) ddpdebug_run_info)"


_DEVICE = chosen('ddpdebug_device_memory_bytes{kind="reserved"}')
_HOST = chosen("ddpdebug_host_memory_bytes")
_DEVICE_FULL = f"max by (rank) ({_DEVICE}) / (max by (rank) ({chosen('ddpdebug_device_memory_limit_bytes')}) > 0)"
_HOST_FULL = f"max by (rank) ({_HOST}) / (max by (rank) ({chosen('ddpdebug_host_memory_limit_bytes')}) > 0)"
#: What the fullest rank has left, of its device or its host.
HEADROOM = f"1 - max({_DEVICE_FULL} or {_HOST_FULL})"
#: How much longer the slowest rank works than the median one.
STRAGGLER = f"max({phase_seconds(OWN_PHASES)}) / quantile(0.5, {phase_seconds(OWN_PHASES)}) - 1"
