"""`ddpdebug top`: a live view of a run, for people in a terminal."""

from __future__ import annotations

import os
import select
import sys
import termios
import tty
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import click

from ddpdebug.clock import time
from ddpdebug.errors import UsageError

_TEXT = """Show a run live: do the ranks agree, which rank is wrong, which one is slow.

WHERE is a run directory. Without it, the newest directory in ddpdebug-runs/ is taken.
"""
_RUNS = "ddpdebug-runs"


@click.command("top", help=_TEXT)
@click.argument("where", required=False)
@click.option("--once", is_flag=True, help="Print the state once and leave.")
@click.option("--interval", type=click.FloatRange(0.2, 3600), default=2.0, help="Seconds between looks. [default 2]")
def command(where: str | None, *, once: bool, interval: float) -> Callable[[], int]:
    """Take the first snapshot, which checks the place; return the action that shows it, to be run outside of click."""
    from ddpdebug.reports.top.snapshot import from_directory  # noqa: PLC0415 - not before it is needed

    look = partial(from_directory, _place(where))
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
        raise UsageError(f"there is no run in {_RUNS}/; name a run directory")
    return max(found, key=lambda path: path.stat().st_mtime).parent


def _show(snapshot: object, interval: float | None, look: Callable[[], object]) -> int:
    from rich.console import Console, Group  # noqa: PLC0415 - not before it is needed
    from rich.live import Live  # noqa: PLC0415
    from rich.text import Text  # noqa: PLC0415

    from ddpdebug.reports.top.view import COLUMNS, view  # noqa: PLC0415

    console = Console(file=sys.stdout, highlight=False, markup=False, emoji=False)
    if interval is None or not console.is_terminal:
        console.print(view(snapshot, 1_000_000))  # type: ignore[arg-type]  # what the command has loaded
        return 0
    explained = False

    def shown() -> object:
        keys = Text("q leaves · ? explains the columns", "dim")
        rest = [Text(COLUMNS.rstrip(), "dim"), keys] if explained else [keys]
        return Group(view(snapshot, console.height - (5 if explained else 1)), *rest)  # type: ignore[arg-type]

    try:
        with _keys() as key, Live(shown(), console=console, screen=True, auto_refresh=False) as live:  # type: ignore[arg-type]
            while (pressed := key(interval)) != "q":
                explained ^= pressed == "?"
                with suppress(OSError, ValueError):  # it ended, or is being written: the last view stays
                    snapshot = look()
                live.update(shown(), refresh=True)  # type: ignore[arg-type]
    except KeyboardInterrupt:
        pass
    return 0


@contextmanager
def _keys() -> Iterator[Callable[[float], str]]:
    """Read single keys while this lasts: a function that returns the key pressed within so many seconds, or nothing."""
    if not sys.stdin.isatty():
        yield lambda seconds: time.sleep(seconds) or ""
        return
    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)

    def key(seconds: float) -> str:
        ready, _, _ = select.select([descriptor], [], [], seconds)
        return os.read(descriptor, 1).decode("ascii", "replace") or "q" if ready else ""  # "q": nobody is there

    try:
        tty.setcbreak(descriptor)
        yield key
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)
