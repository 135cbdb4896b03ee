"""The state of a run's ranks from outside: by their black boxes and the kernel. Torch-free.

For `stacks`, `top` and `report`, which look at a run directory of anybody's: nothing in it is believed beyond its type,
every text is cut, and only ranks that the run can have are looked for. Nothing is asked of the ranks here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddpdebug.clock import time
from ddpdebug.progress import black_box, kernel
from ddpdebug.progress.waits import SILENT_SECONDS, Seen, where
from ddpdebug.run_directory.reader import RANKS
from ddpdebug.schema.progress import Noted, RankProgress
from ddpdebug.schema.wire import from_json

#: More ranks than a person reads, and than black boxes are read at a time.
MAX_RANKS = 4096
_MAX_TEXT, _MAX_FRAMES = 400, 40
#: States of a rank's process, as `RankState.state`.
LIVE, SILENT, DEAD, ELSEWHERE = "live", "silent", "dead", "elsewhere"


@dataclass(frozen=True, slots=True, kw_only=True)
class RankState:
    """The state of a rank as seen from outside.

    Args:
        state: its process gives signs of life; gives none; has ended; or runs on another host, or did before this one
            booted, so that it is not known.
        age: seconds since its last sign of life, NaN where that is not known.
        seen: the same for the judge of hangs.
        words: what it does, or did last.
        ended: why it has ended, by its own account.
        notes: its last calls, oldest first.
    """

    rank: int
    state: str
    age: float
    seen: Seen
    words: str
    ended: str = ""
    notes: tuple[str, ...] = ()

    @property
    def progress(self) -> RankProgress | None:
        """The rank's last own record of its progress."""
        return self.seen.progress


def read_ranks(directory: Path, world: int, *, notes: int = 0) -> dict[int, RankState]:
    """Return the state of each rank that has a readable black box, by rank.

    Args:
        notes: so many of the newest notes of each.
    """
    now, found = time.monotonic(), {}
    for rank in range(min(world, MAX_RANKS)):
        box = black_box.read(directory / RANKS / str(rank) / black_box.NAME, notes=notes > 0)
        if box is not None:
            found[rank] = _state(rank, box, now, notes)
    return found


def _state(rank: int, box: black_box.Recorded, now: float, notes: int) -> RankState:
    progress = from_json(RankProgress, _short(box.look))
    ended = "" if progress is None else progress.ended
    shown = box.kernel()
    age = max(0.0, now - box.beat) if box.here and box.beat else math.nan
    lines = tuple([_note_words(note.text)[:_MAX_TEXT] for note in box.notes[-notes:]]) if notes else ()
    if not box.here:
        state, seen = ELSEWHERE, Seen(progress=progress, left=_ended(ended) if ended else "")
    elif shown is None or shown.is_gone or ended:
        known = None if shown is None else shown.ended_by
        how = _ended(ended) if ended else "it has gone" if known is None else kernel.ending(known)
        state, seen = DEAD, Seen(progress=progress, left=how, left_for=age)
    elif age >= SILENT_SECONDS:
        seen = Seen(progress=progress, silent=age, runs=shown.state == "R", kernel=shown.words())
        state = SILENT
    else:
        state, seen = LIVE, Seen(progress=progress)
    return RankState(rank=rank, state=state, age=age, seen=seen, words=_words(seen), ended=ended, notes=lines)


def state_of(rank: int, look: RankProgress) -> RankState:
    """Return the state of a rank that has just answered."""
    seen = Seen(progress=look)
    return RankState(rank=rank, state=LIVE, age=0.0, seen=seen, words=_words(seen))


def _ended(reason: str) -> str:
    return f"it has ended: {reason}"


def _words(seen: Seen) -> str:
    """Say what a rank waits in, or else what it does."""
    if seen.waits:
        return f"waits in {seen.waits[0].words()}"
    known = seen.progress
    last = f", it waited in {known.waits[0].words()}" if known is not None and known.waits else ""
    return f"{where(seen)}{last}"


def _short(value: Any, depth: int = 6) -> Any:
    """Return a JSON value whose texts and lists are no longer than a job makes them, and whose numbers are finite."""
    if isinstance(value, str):
        return value[:_MAX_TEXT]
    if isinstance(value, float) and not math.isfinite(value):
        return 0.0
    if depth == 0:
        return None
    if isinstance(value, list):
        return [_short(item, depth - 1) for item in value[:_MAX_FRAMES]]
    if isinstance(value, Mapping):
        return {str(key)[:_MAX_TEXT]: _short(item, depth - 1) for key, item in list(value.items())[:1024]}
    return value


# --- ranks that do the same -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Together:
    """Ranks at the same place, in the same state.

    Args:
        stack: innermost first; of one thread for each name where all threads were asked for.
    """

    ranks: tuple[int, ...]
    state: str
    words: str
    stack: tuple[str, ...] = ()
    threads: Mapping[str, tuple[str, ...]] | None = None


def together(
    states: Mapping[int, RankState], threads: Mapping[int, Mapping[str, tuple[str, ...]]] | None = None
) -> list[Together]:
    """Group ranks by state and stack, the largest group first, so that a rank that differs stands at the end."""
    alike: dict[tuple[Any, ...], list[int]] = {}
    for rank, one in sorted(states.items()):
        stack = () if one.progress is None else one.progress.stack
        own = None if threads is None or rank not in threads else tuple(sorted(threads[rank].items()))
        alike.setdefault((one.state, one.words, stack, own), []).append(rank)
    groups = [
        Together(ranks=tuple(ranks), state=state, words=words, stack=stack, threads=None if own is None else dict(own))
        for (state, words, stack, own), ranks in alike.items()
    ]
    return sorted(groups, key=lambda group: (-len(group.ranks), group.ranks))


def _note_words(note: str) -> str:
    """Return a note of a call as people read it; one that is cut as it is."""
    known = Noted.read(note)
    return note if known is None else known.words()
