"""`ddpdebug hub`: the runs of a team on one page; imports and pushes of runs that have ended."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import click

from ddpdebug.commands._progress import progress
from ddpdebug.config import parsing as kinds
from ddpdebug.errors import UsageError

_HUB = """Serve the hub: one page for all runs, also after they have ended.

Runs come from jobs that are started with --hub URL, from directories that are watched, and from
"ddpdebug hub import". Without a token the hub serves this machine only. The variable DDPDEBUG_HUB_TOKEN has the token
for everything, DDPDEBUG_HUB_READ_TOKEN one for looking only. docs/hub.md has more.
"""
_IMPORT = "Copy the runs in RUN_DIR, or below it, into the database of a hub, which may be serving it."
_PUSH = """Send the run in RUN_DIR to a hub, as --hub does while a job runs.

For what a job could not send, because the hub was away or the job was killed. It may be called again at any time.
"""
_DATA = "ddpdebug-hub.sqlite"
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
_SIZES = {"M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_data = click.option(
    "--data",
    default=_DATA,
    show_default=True,
    help="Where the runs are kept: a file of SQLite, or the URL of a Postgres (postgresql+psycopg://...).",
)


def _quantity(units: dict[str, int], valid: str) -> Callable[[Any, Any, str], float]:
    def read(_: object, option: click.Parameter, text: str) -> float:
        found = re.fullmatch(rf"(\d+(?:\.\d+)?)([{''.join(units)}])", text)
        if found is None:
            raise UsageError(f"{option.opts[0]}: {text!r} is not valid; give {valid}")
        return float(found[1]) * units[found[2]]

    return read


@click.group("hub", help=_HUB, invoke_without_command=True)
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to bind; another one needs a token.")
@click.option("--port", type=click.IntRange(0, 65535), default=8765, show_default=True, help="Port; 0 is a free one.")
@_data
@click.option(
    "--watch",
    "watched",
    multiple=True,
    type=click.Path(path_type=Path),
    help="Show the runs below this directory too; may be repeated.",
)
@click.option(
    "--keep",
    default="30d",
    show_default=True,
    callback=_quantity(_UNITS, "a time like 12h or 30d"),
    help="Delete runs from the hub that ended longer ago; run directories stay.",
)
@click.option(
    "--max-size",
    default="20G",
    show_default=True,
    callback=_quantity(_SIZES, "a size like 500M or 20G"),
    help="Delete the oldest runs that are over while all take more than this.",
)
@click.option(
    "--webhooks",
    type=click.Path(path_type=Path),
    help="File of the webhooks that are told of findings and of runs that are lost or fail; docs/hub.md has its form.",
)
@click.option("--address", default="", help="Address by which people reach the hub, for the links in what is told.")
@click.pass_context
def command(  # noqa: PLR0913 - the options
    ctx: click.Context,
    *,
    host: str,
    port: int,
    data: str,
    watched: tuple[Path, ...],
    keep: float,
    max_size: float,
    webhooks: Path | None,
    address: str,
) -> Callable[[], int] | None:
    """Check the options, open socket and database, and return the action that serves, to be run outside of click."""
    if ctx.invoked_subcommand is not None:
        return None
    _require()
    from ddpdebug.hub.auth import Auth, is_loopback  # noqa: PLC0415 - not before it is needed

    tokens = Auth(
        _token("DDPDEBUG_HUB_TOKEN", "DDPDEBUG_HUB_TOKEN_FILE"),
        _token("DDPDEBUG_HUB_READ_TOKEN", "DDPDEBUG_HUB_READ_TOKEN_FILE"),
    )
    if not tokens.required and not is_loopback(host):
        raise UsageError(
            f"--host {host} opens the hub to other machines, and that needs a token; set DDPDEBUG_HUB_TOKEN, "
            "for example to what python -c 'import secrets; print(secrets.token_urlsafe())' prints"
        )
    for directory in watched:
        if not directory.is_dir():
            raise UsageError(f"--watch: there is no directory {str(directory)!r}")
    from ddpdebug.hub.outgoing import read_hooks  # noqa: PLC0415 - as above
    from ddpdebug.hub.serve import Serving  # noqa: PLC0415 - as above

    hooks = () if webhooks is None else read_hooks(webhooks)
    serving = Serving(host, port, data, tokens, watched, keep=keep, most=max_size)
    serving.tell(hooks, address)
    print(f"ddpdebug: hub at {serving.url}, runs in {serving.place}", flush=True)
    return serving.run


@command.command("import", help=_IMPORT)
@click.argument("run_dirs", metavar="RUN_DIR...", nargs=-1, required=True, type=click.Path(path_type=Path))
@_data
def import_(run_dirs: tuple[Path, ...], data: str) -> Callable[[], int]:
    """Find the runs, and return the action that copies them."""
    _require()
    from ddpdebug.hub.store import Store  # noqa: PLC0415 - not before it is needed
    from ddpdebug.hub.watch import runs_below  # noqa: PLC0415

    found = []
    for directory in run_dirs:
        runs = list(runs_below(directory))
        if not runs:
            raise UsageError(f"there is no run in {str(directory)!r}")
        found += runs
    return partial(_import, found, Store(data))


def _import(directories: list[Path], store: Any) -> int:
    from sqlalchemy.exc import SQLAlchemyError  # noqa: PLC0415 - not before it is needed

    from ddpdebug.hub.store import NotWantedError, copy_run  # noqa: PLC0415
    from ddpdebug.run_directory.mirror import Mirror  # noqa: PLC0415

    failed = 0
    for directory in directories:
        try:
            with progress(f"importing {directory}"), closing(Mirror(directory)) as mirror:
                copy_run(store, mirror, "import", at=mirror.changed)
                key = mirror.key
            print(f"{directory}: {key}")
        except (OSError, ValueError, NotWantedError, SQLAlchemyError) as error:
            failed = 1
            reason = str(getattr(error, "orig", None) or error)
            print(f"ddpdebug: error: {directory} is not imported: {reason}", file=sys.stderr)
    return failed


@command.command("push", help=_PUSH)
@click.argument("run_dir", type=click.Path(path_type=Path))
@click.option("--hub", "url", help="Address of the hub, http://host:port. [default: the run's --hub]")
@click.option("--hub-token-file", type=click.Path(path_type=Path), help="File that holds the token.")
def push(run_dir: Path, url: str | None, hub_token_file: Path | None) -> Callable[[], int]:
    """Check directory, address and token, and return the action that sends the run."""
    from ddpdebug.processes.pusher import read_token  # noqa: PLC0415 - not before it is needed
    from ddpdebug.run_directory.mirror import Mirror  # noqa: PLC0415

    try:
        mirror = Mirror(run_dir)
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot push {str(run_dir)!r}: {error}") from None
    config = mirror.run.get("config")
    address = url or (config.get("hub") if isinstance(config, dict) else None)
    if address is None:
        raise UsageError(f"the run in {str(run_dir)!r} was not told of a hub; name its address with --hub")
    try:
        checked = kinds.WEB_ADDRESS.parse(address)
        read_token(os.environ, hub_token_file)
    except ValueError:
        raise UsageError(f"--hub: {address!r} is not valid; give {kinds.WEB_ADDRESS.valid}") from None
    except OSError as error:
        raise UsageError(f"cannot read the token from {str(hub_token_file)!r}: {error.strerror}") from None
    return partial(_push, mirror, checked, hub_token_file)


def _push(mirror: Any, url: str, token_file: Path | None) -> int:
    from ddpdebug.processes.pusher import Post, RefusedError, read_token  # noqa: PLC0415 - not before it is needed

    post = Post(url, mirror.key, lambda: read_token(os.environ, token_file))
    try:
        with progress(f"sending the run to {url}"):
            mirror.bring(post.send)
    except (RefusedError, OSError, ValueError) as error:
        reason = str(getattr(error, "reason", None) or error)
        print(f"ddpdebug: error: the hub at {url} does not take the run: {reason}", file=sys.stderr)
        return 1
    print(f"{url.rstrip('/')}/runs/{mirror.key}")
    return 0


def _token(name: str, of_file: str) -> str | None:
    """Return the token in a variable, or in the file that another one names."""
    if file := os.environ.get(of_file, ""):
        try:
            token = Path(file).read_text(encoding="utf-8").strip()
        except (OSError, ValueError) as error:
            raise UsageError(f"cannot read the file of {of_file}: {error}") from None
        if not token:
            raise UsageError(f"the file of {of_file} is empty; it should hold a token")
        return token
    return os.environ.get(name, "").strip() or None


def _require() -> None:
    try:
        import jinja2  # noqa: F401, PLC0415 - whether they are there
        import sqlalchemy  # noqa: F401, PLC0415
        import starlette  # noqa: F401, PLC0415
        import uvicorn  # noqa: F401, PLC0415
    except ImportError as error:
        raise UsageError(f"the hub needs {error.name}; install it with: pip install 'ddpdebug[hub]'") from None
