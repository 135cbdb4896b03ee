"""One self-contained page about a run: made of its run directory, opened offline, without a script. Torch-free."""

from __future__ import annotations

from pathlib import Path

from ddpdebug.reports.page import page
from ddpdebug.reports.reading import read_history


def report(directory: Path) -> str:
    """Return the page about a run, also one that was killed or still goes on.

    Raises:
        ValueError: this is not a run directory, or another version's.
    """
    return page(read_history(directory))
