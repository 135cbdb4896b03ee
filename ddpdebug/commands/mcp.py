"""`ddpdebug mcp`: a Model Context Protocol server that answers programs about runs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import click

from ddpdebug.errors import UsageError

_TEXT = """Answer a program that asks about the runs in DIRECTORY (default: here) over the Model Context Protocol.

The program starts this command and talks to it on standard input and output. Nothing outside of the directories is
read and nothing is changed, unless --allow-run is given. Over the network a hub answers the same, at /mcp. docs/mcp.md
has more.
"""


@click.command("mcp", help=_TEXT)
@click.argument("directories", metavar="[DIRECTORY]...", nargs=-1, type=click.Path(path_type=Path))
@click.option("--allow-run", is_flag=True, help="Answer `check` too, which runs scripts in these directories.")
def command(directories: tuple[Path, ...], *, allow_run: bool) -> Callable[[], int]:
    """Check the options, and return the action that serves, to be run outside of click."""
    try:
        import mcp.server  # noqa: F401, PLC0415 - whether it is there
    except ImportError as error:
        raise UsageError(f"this needs {error.name}; install it with: pip install 'ddpdebug[mcp]'") from None
    from ddpdebug.mcp.answers import Answers  # noqa: PLC0415 - not before it is needed
    from ddpdebug.mcp.directories import Directories  # noqa: PLC0415 - as above
    from ddpdebug.mcp.running import Running  # noqa: PLC0415 - as above
    from ddpdebug.mcp.server import make_server  # noqa: PLC0415 - as above

    places = Directories(directories or (Path(),))
    server = make_server(Answers(places), Running(places) if allow_run else None)

    def act() -> int:
        server.run("stdio")
        return 0

    return act
