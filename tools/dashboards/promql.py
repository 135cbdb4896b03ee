"""Queries in the words of the dashboards.

Every series has the run's id as a label, so that a query touches the series of the chosen run alone. What belongs to a
run as a whole is drawn from the recording rules (deploy/prometheus/rules/ddpdebug.yml): a picture of a run costs the
same whatever runs beside it, and however many ranks it has. Ranks of one run may repeat a fact that all of them know:
everything else is aggregated, so that a rank is one line.
"""

from __future__ import annotations

#: The run and the ranks that are chosen in the dashboard.
RUN = 'run_id=~"$run"'
RANKS = 'rank=~"$rank"'


def chosen(name: str, *matchers: str) -> str:
    """Return the series of the chosen run with this name."""
    return f"{name}{{{', '.join((RUN, *matchers))}}}"


def of_run(name: str, *matchers: str) -> str:
    """Return something of the chosen run that is recorded once for it."""
    return f"max({chosen(name, *matchers)})"


def last(expression: str) -> str:
    """Return the last values within the time range that is shown: also of a run that has ended in it."""
    return f"last_over_time({expression}[$__range])"


def by_rank(name: str, *matchers: str) -> str:
    """Return a gauge of the chosen ranks, by rank."""
    return f"max by (rank) ({chosen(name, RANKS, *matchers)})"


def last_by_rank(name: str, *matchers: str) -> str:
    """Return the last value of each of the chosen ranks that was there in the time range."""
    return f"max by (rank) ({last(chosen(name, RANKS, *matchers))})"


def rate(name: str, *matchers: str) -> str:
    """Return the rate of a counter of the chosen run's series."""
    return f"rate({chosen(name, *matchers)}[$__rate_interval])"


def spread(name: str, *matchers: str) -> list[tuple[str, str]]:
    """Return (query, name) of the bounds and the middle of a gauge by rank: legible for any number of ranks."""
    values = by_rank(name, *matchers)
    return [
        (f"max({values})", "highest rank"),
        (f"quantile(0.5, {values})", "median rank"),
        (f"min({values})", "lowest rank"),
    ]


def usual(expression: str) -> str:
    """Return the median of the others at each moment, without the largest: of two ranks that is the other one."""
    return f"quantile(0.5, {expression} unless topk(1, {expression})) or max({expression})"


def worst(count: int, expression: str) -> str:
    """Return the series with the largest values at each moment."""
    return f"topk({count}, {expression})"


def worst_rank(name: str) -> str:
    """Return the largest of what is recorded for a rank of the chosen run, with the rank as its label."""
    return f"topk(1, max by (rank) ({chosen(name)}))"


#: The run's state (parts.RUN_STATES) when the time range ends, also of a run that ended in it.
STATE = f"max({last(chosen('run:ddpdebug_run_state:max'))})"

END = f"(-1 - {STATE})"


def verdict(expression: str) -> str:
    """Return the value, or how the run ended where there is none: below zero, so that no value can be meant."""
    return f"({expression}) or {END}"
