"""Numbers, ranks and what came from the job, as words on one line. Torch-free.

Everything that came from the job (names, messages, values) passes through `clean`: a parameter may be called anything.
"""

from __future__ import annotations

import math
import signal
from collections.abc import Iterable

from ddpdebug.schema.finding import UNDECIDED, Finding

MAX_NAME, MAX_VALUE = 160, 160
_MAX_HOSTS = 3
#: Ranks in a row that are named; more of a few dozen ranks are rare, of thousands nobody would read them.
_MAX_SPANS = 16


def clean(text: object, limit: int = 1000) -> str:
    """Return the text on one line with everything unprintable escaped, shortened in the middle beyond `limit`."""
    line = str(text)
    if len(line) > limit:
        line = f"{line[: limit // 2]}…{line[len(line) - limit // 2 + 1 :]}"
    if line.isprintable():
        return line
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in line)


def number(value: float, digits: int = 4) -> str:
    """Return a number as people write it: 0.0131, 1.31e5, 12, nan."""
    if isinstance(value, int) and not isinstance(value, bool):
        return clean(value, MAX_VALUE)  # of a damaged file: beyond every float
    if isinstance(value, bool) or not math.isfinite(value):
        return str(value).lower()
    mantissa, _, exponent = f"{value:.{digits}g}".partition("e")
    return f"{mantissa}e{int(exponent)}" if exponent else mantissa


def percent(share: float) -> str:
    """Return a share with two significant digits, and all digits before the point: 0.83 %, 17 %, 430 %."""
    value = 100 * share
    return f"{number(value, 2) if abs(value) < 99.5 else round(value)} %"


def ranks_text(ranks: Iterable[int], world: int | None = None) -> str:
    """Return `rank 2`, `ranks 0-3,7`, `ranks 0,2,4 and 509 more` where they are scattered, or `all 4 ranks`."""
    known = sorted(set(ranks))
    if world is not None and len(known) == world > 1:
        return "both ranks" if world == 2 else f"all {world} ranks"
    runs: list[list[int]] = []
    for rank in known:
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    spans = ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs[:_MAX_SPANS])
    more = sum(last - first + 1 for first, last in runs[_MAX_SPANS:])
    return f"rank{'' if len(known) == 1 else 's'} {spans}" + (f" and {more} more" if more else "")


def culprits_text(finding: Finding, world: int | None = None, *, places: bool = True) -> str:
    """Return the blamed ranks as `ranks_text` does, with their nodes, and whether there was no majority."""
    words = ranks_text(finding.ranks, world)
    if places and (where_they_run := _places_text(finding)):
        words += f" ({where_they_run})"
    open_ = UNDECIDED in finding.evidence and world != 2  # of two nobody expects a majority
    return f"{words} (no majority)" if open_ else words


def _places_text(finding: Finding) -> str:
    """Return host and device of one rank, the hosts of several; empty where it is not known, or there are too many."""
    known = [clean(finding.places.get(str(rank), ""), MAX_NAME) for rank in finding.ranks]
    if len(known) == 1 or not all(known):
        return known[0] if len(known) == 1 else ""
    hosts = dict.fromkeys(place.partition(",")[0] for place in known)
    return ", ".join(hosts) if len(hosts) <= _MAX_HOSTS else ""


def counted(count: int, noun: str) -> str:
    """Return `1 step`, `2 steps`."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def signal_name(number: int) -> str:
    """Return `SIGKILL` for 9, and `signal 70` for one without a name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
