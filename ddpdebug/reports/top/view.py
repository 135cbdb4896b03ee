"""The view of `ddpdebug top`: a snapshot as tables of rich, which this loads. Torch-free."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ddpdebug.reports.html import duration
from ddpdebug.reports.top.snapshot import KILLED, RankView, Snapshot
from ddpdebug.schema.ended import parse_end
from ddpdebug.sinks.words import clean, counted, number, percent

_GOOD, _BAD, _WARN, _DIM = "black on green", "bold white on red", "black on yellow", "dim"
_STALE_SECONDS = 120
_SLOW = 0.1
_LASTS = 2
_BLOCKS = "▁▂▃▄▅▆▇█"
#: Cells of the bar of a rank's step; of each phase the letter, and how it looks.
_CELLS = 8
_LOOK = {
    "data": ("d", "black on yellow"),
    "forward": ("f", "black on cyan"),
    "backward": ("b", "white on blue"),
    "optimizer": ("o", "white on magenta"),
    "other": (".", "dim"),
    "wait": ("w", "dim reverse"),
}


def view(snapshot: Snapshot, height: int) -> RenderableType:
    """Return verdicts, ranks and the newest findings in at most `height` lines; ranks with problems come first."""
    incidents = snapshot.incidents[:5]
    waiting = len(snapshot.waits) or bool(snapshot.waiting)
    room = max(3, height - 7 - len(incidents) - bool(snapshot.damage) - waiting)
    shown = sorted(snapshot.ranks, key=_health)[:room]
    title = Text(f"ddpdebug top · {clean(snapshot.title, 160)}", "bold", no_wrap=True, overflow="ellipsis")
    parts: list[RenderableType] = [title, _verdicts(snapshot), _pace(snapshot)]
    if snapshot.waiting:
        parts.append(Text(clean(snapshot.waiting, 300), _BAD if snapshot.hangs else _WARN))
    if snapshot.unchecked:
        parts.append(Text(clean(snapshot.unchecked, 400), _WARN))
    parts += [Text(clean(words, 300), _WARN) for words in snapshot.waits]
    parts.append(_ranks(snapshot, shown))
    if (hidden := len(snapshot.ranks) - len(shown)) > 0:
        parts.append(Text(f"{hidden} more ranks, none of them worse", _DIM))
    if snapshot.damage:
        parts.append(Text(f"damaged: {clean('; '.join(snapshot.damage), 200)}", _BAD))
    for code, severity, text in incidents:
        about = (f"{clean(code, 12)} ", "bold"), f"{clean(severity, 10)} ", clean(text, 200)
        parts.append(Text.assemble(*about, no_wrap=True, overflow="ellipsis"))
    return Group(*parts)


#: What stands in the columns, for who asks by `?`.
COLUMNS = """\
step  newest optimizer step       time  of a step, and of that:
loss  of that step                own   without waiting for other ranks
curve losses of the newest steps  cost  what steps would be shorter without it
GiB   memory of the process       phases  data, forward, backward, optimizer,
CUDA  GiB reserved on the device        . other, waiting for other ranks
"""


def sparkline(values: Sequence[float], width: int = 8) -> str:
    """Return a curve of block characters, one for each of the newest values."""
    shown = list(values)[-width:]
    low, high = min(shown, default=0.0), max(shown, default=0.0)
    span = high / 2 - low / 2  # halves: a difference may be beyond the largest number
    return "".join(
        _BLOCKS[int((value / 2 - low / 2) / span * (len(_BLOCKS) - 1)) if span > 0 else 0] for value in shown
    )


def phase_bar(rank: RankView) -> Text:
    """Return a bar of a rank's step phases, one letter for each eighth of the time; empty if unknown."""
    parts = {**rank.phases, "wait": rank.wait_seconds}
    whole = sum(parts.values())
    bar, until = Text(), 0.0
    for phase, seconds in parts.items() if whole > 0 else ():
        letter, style = _LOOK.get(phase, _LOOK["other"])
        until += seconds
        bar.append(letter * (round(_CELLS * until / whole) - len(bar)), style)
    return bar


def _health(rank: RankView) -> tuple[int, float, int]:
    ill = 2 * bool(rank.outvoted) + bool(rank.nonfinite) + 2 * bool(rank.ended and rank.ended != "finished")
    return -ill, -rank.own_seconds if rank.own_seconds > 0 else 0.0, rank.rank


def _verdicts(snapshot: Snapshot) -> Text:
    alive = [rank for rank in snapshot.ranks if not rank.ended]
    apart = {what: count for what, count in snapshot.differing.items() if count}
    model = {what: count for what, count in apart.items() if what != "gradients"}
    straggler = snapshot.straggler
    finished = snapshot.ranks and not alive
    compared = bool(snapshot.differing)
    up = ("all up", _GOOD) if not snapshot.missing else (f"{counted(snapshot.missing, 'rank')} missing", _BAD)
    ended = (KILLED, _BAD) if any(rank.ended == KILLED for rank in snapshot.ranks) else ("ended", _DIM)
    late = straggler is not None and straggler[1] >= _SLOW
    slow = f"rank {straggler[0]} +{percent(straggler[1])}" if straggler else ""
    tiles = [
        ended if finished else up,
        _tile("ranks agree", f"ranks differ: {', '.join(model)}", not model, known=compared),
        _tile(
            "gradients in sync", "gradients differ", "gradients" not in apart, known="gradients" in snapshot.differing
        ),
        *([("NaN or Inf", _BAD)] if any(rank.nonfinite for rank in snapshot.ranks) else []),
        *([(slow, _BAD)] if late else []),
    ]
    line = Text()
    for text, style in tiles:
        line.append(f" {text} ", style)
        line.append(" ")
    return line


def _pace(snapshot: Snapshot) -> Text:
    """Return when the last step was, what ddpdebug costs, and who is the slowest how often, on one line."""
    age = min((rank.age for rank in snapshot.ranks if not math.isnan(rank.age)), default=math.nan)
    stale = age > _STALE_SECONDS and not all(rank.ended for rank in snapshot.ranks)
    rest = [f"overhead {percent(snapshot.overhead)}"] if math.isfinite(snapshot.overhead) else []
    if last := ", ".join(f"rank {rank.rank} in {_share(rank.last)}" for rank in snapshot.lasts[:_LASTS]):
        rest.append(f"slowest: {last}")
    line = Text(f"last step {_seconds(age)} ago", _BAD if stale else _DIM, no_wrap=True, overflow="ellipsis")
    return line.append("".join(f" · {text}" for text in rest), _DIM)


def _tile(good: str, bad: str, fine: bool, *, known: bool = True) -> tuple[str, str]:  # noqa: FBT001 - the verdict
    if not known:
        return f"{good.split(maxsplit=1)[0]} not compared yet", _DIM
    return (good, _GOOD) if fine else (bad, _BAD)


def _ranks(snapshot: Snapshot, shown: list[RankView]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    device = any(rank.device > 0 for rank in snapshot.ranks)
    names = ["rank", "step", "loss", "curve", "time", "own", "phases", "cost", "GiB", *(["CUDA"] if device else [])]
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("state")
    slow = snapshot.straggler
    for rank in shown:
        late = slow is not None and slow[0] == rank.rank and slow[1] >= _SLOW
        cells: list[str | Text] = [
            str(rank.rank),
            "" if rank.step is None else str(rank.step),
            "" if math.isnan(rank.loss) else number(float(rank.loss)),
            sparkline(rank.losses),
            _seconds(rank.step_seconds),
            Text(_seconds(rank.own_seconds), _WARN if late else ""),
            phase_bar(rank),
            Text(_share(rank.cost), _WARN if rank.cost >= _SLOW else ""),
            _bytes(rank.host),
            *([_bytes(rank.device)] if device else []),
        ]
        table.add_row(*cells, _state(rank, snapshot))
    return table


def _share(value: float) -> str:
    return "" if math.isnan(value) else "<1 %" if 0 < value < 0.01 else f"{100 * value:.0f} %"


def _state(rank: RankView, snapshot: Snapshot) -> Text:
    several = sum(map(bool, snapshot.differing.values())) > 1  # else the verdicts say in what
    alone = [what for what in rank.outvoted if what not in snapshot.undecided]
    if rank.outvoted:
        tie = snapshot.blamed.get(rank.rank, "others differ" if snapshot.blamed else "differs")
        named = "outvoted" if alone else tie
        text = f"{named}: {', '.join(alone or rank.outvoted)}" if several else named
        return Text(text, _WARN if named == "others differ" else _BAD)
    if rank.nonfinite:
        return Text("NaN or Inf", _BAD)
    if rank.ended:
        return Text(clean(rank.ended, 40), _DIM if parse_end(rank.ended).is_in_order else _BAD)
    return Text("ok" if rank.step is not None else "no step yet", _DIM)


def _seconds(value: float) -> str:
    return duration(value) or "?"


def _bytes(value: float) -> str:
    if math.isnan(value) or value <= 0:
        return ""
    return number(value / (1 << 30), 2)
