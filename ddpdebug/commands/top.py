"""`ddpdebug top`: a live view of a run, for people in a terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import click

from ddpdebug.clock import time
from ddpdebug.errors import UsageError

_TEXT = """Show a run live: do the ranks agree, which rank is ill, who is slow.

WHERE is a run directory or the address of rank 0's metrics (http://...). Without it, the newest directory in
ddpdebug-runs/ is taken.
"""
_RUNS = "ddpdebug-runs"


@click.command("top", help=_TEXT)
@click.argument("where", required=False)
@click.option("--once", is_flag=True, help="Print the state once and leave.")
@click.option("--interval", type=click.FloatRange(0.2, 3600), default=2.0, help="Seconds between looks. [default 2]")
def command(where: str | None, *, once: bool, interval: float) -> Callable[[], int]:
    """Take the first snapshot, which shows whether the place is right; show later, outside of click."""
    from ddpdebug.reports.top.snapshot import Snapshot, from_directory, from_url  # noqa: PLC0415 - not before it is needed

    is_url = where is not None and where.startswith(("http://", "https://"))
    look: Callable[[], Snapshot] = partial(from_url, where or "") if is_url else partial(from_directory, _place(where))
    try:
        first = look()
    except (OSError, ValueError) as error:
        raise UsageError(str(error)) from None
    return partial(_show, first, None if once else interval, look)


def _place(where: str | None) -> Path:
    if where is not None:
        return Path(where)
    found = [path for path in Path(_RUNS).glob("*/run.json") if path.is_file()]
    if not found:
        raise UsageError(f"there is no run in {_RUNS}/; name a run directory or an address")
    return max(found, key=lambda path: path.stat().st_mtime).parent


def _show(snapshot: object, interval: float | None, look: Callable[[], object]) -> int:
    from rich.console import Console  # noqa: PLC0415 - not before it is needed
    from rich.live import Live  # noqa: PLC0415

    from ddpdebug.reports.top.view import view  # noqa: PLC0415

    console = Console(file=sys.stdout, highlight=False, markup=False, emoji=False)
    if interval is None or not console.is_terminal:
        console.print(view(snapshot, 1_000_000))  # type: ignore[arg-type]  # what the command has loaded
        return 0
    try:
        with Live(view(snapshot, console.height), console=console, screen=True, auto_refresh=False) as live:  # type: ignore[arg-type]
            while True:
                time.sleep(interval)
                try:
                    snapshot = look()
                except (OSError, ValueError):
                    continue  # it ended, or is being written: the last view stays
                live.update(view(snapshot, console.height), refresh=True)  # type: ignore[arg-type]
    except KeyboardInterrupt:
        return 0
