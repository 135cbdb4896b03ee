"""`ddpdebug memory`: what a snapshot of CUDA's allocator shows."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import click

_TEXT = """Say what a snapshot of CUDA's allocator shows: what is in use by line, and how fragmented it is.

SNAPSHOT is a file of `torch.cuda.memory._dump_snapshot()`, or one that ddpdebug wrote. It is read as plain data:
nothing in it runs.
"""


@click.command("memory", help=_TEXT)
@click.argument("snapshot", type=click.Path(path_type=Path))
def command(snapshot: Path) -> Callable[[], int]:
    """Read the file; print later, outside of click."""
    from ddpdebug.forensics.memory.snapshot import read, report  # noqa: PLC0415 - not before it is needed

    lines = report(read(snapshot))

    def act() -> int:
        print("\n".join(lines))
        return 0

    return act
