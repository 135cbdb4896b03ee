"""`ddpdebug report`: one page about a run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import click

from ddpdebug.commands._progress import progress
from ddpdebug.disk import Disk
from ddpdebug.errors import UsageError
from ddpdebug.run_directory.reader import RUN

_TEXT = """Write a page about the run in RUN_DIR: verdicts, findings with their evidence, loss, norms, times, memory.

The page is one HTML file that opens offline and loads nothing. The run may still be going on, or have been killed.
"""


@click.command("report", help=_TEXT)
@click.argument("run_dir", type=click.Path(path_type=Path))
@click.option("--output", type=click.Path(path_type=Path), help="File to write. [default RUN_DIR/report.html]")
def command(run_dir: Path, output: Path | None) -> Callable[[], int]:
    """Read the run, and return the action that writes the page, to be run outside of click."""
    from ddpdebug.reports.page import report  # noqa: PLC0415 - not before it is needed

    try:
        with progress(f"reading {run_dir}"):
            text = report(run_dir)
    except (OSError, ValueError) as error:
        raise UsageError(str(error)) from None
    file = output or run_dir / "report.html"

    def act() -> int:
        try:
            if output is None:  # in the run directory: for whom its other files are
                mode = (run_dir / RUN).stat().st_mode & 0o666
                Disk(mode).replace(file, [text.encode("utf-8", "backslashreplace")])
            else:
                file.write_text(text, encoding="utf-8", errors="backslashreplace")
        except OSError as error:
            raise UsageError(f"cannot write {str(file)!r}: {error.strerror}") from None
        print(file)
        return 0

    return act
