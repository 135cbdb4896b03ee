"""`ddpdebug mcp`: answers to programs that ask about runs."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import click

from ddpdebug.errors import UsageError

_TOKEN = "DDPDEBUG_MCP_TOKEN"  # noqa: S105 - its name
_TEXT = """Answer programs that ask about the runs in DIRECTORY (default: here) over the Model Context Protocol.

On standard input and output, for a program that starts this one; with --http over the network, for who has the token
in the variable DDPDEBUG_MCP_TOKEN or in --token-file. Nothing outside of the directories is read and nothing is
changed, unless --allow-run is given. docs/mcp.md has more.
"""


@click.command("mcp", help=_TEXT)
@click.argument("directories", metavar="[DIRECTORY]...", nargs=-1, type=click.Path(path_type=Path))
@click.option("--allow-run", is_flag=True, help="Answer `check` too, which runs scripts in these directories.")
@click.option("--http", is_flag=True, help="Serve over streamable HTTP.")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to serve at.")
@click.option("--port", default=0, type=click.IntRange(0, 65535), help="Port to serve at. [default a free one]")
@click.option("--token-file", type=click.Path(path_type=Path), help="Read the token from this file instead.")
def command(
    directories: tuple[Path, ...], *, allow_run: bool, http: bool, host: str, port: int, token_file: Path | None
) -> Callable[[], int]:
    """Check what is asked for; serve later, outside of click."""
    try:
        import mcp.server  # noqa: F401, PLC0415 - whether it is there
    except ImportError as error:
        raise UsageError(f"this needs {error.name}; install it with: pip install 'ddpdebug[mcp]'") from None
    from ddpdebug.mcp.answers import Answers  # noqa: PLC0415 - not before it is needed
    from ddpdebug.mcp.server import make_server, serve_http  # noqa: PLC0415 - as above

    server = make_server(Answers(directories or (Path(),)), allow_run=allow_run)
    token = _token(token_file) if http else ""

    def act() -> int:
        if http:
            return serve_http(server, host, port, token)
        server.run("stdio")
        return 0

    return act


def _token(file: Path | None) -> str:
    try:
        token = os.environ.get(_TOKEN, "") if file is None else file.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot read the token from {str(file)!r}: {error}") from None
    if not token.strip():
        raise UsageError(f"--http needs a token; set {_TOKEN} or give --token-file")
    return token.strip()
