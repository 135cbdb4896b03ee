"""`ddpdebug dashboards`: write the Grafana dashboards, and put them into a Grafana."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import click

from ddpdebug.errors import UsageError

_BUILD = "Write the dashboards of this version as JSON files into DIRECTORY, for Grafana's provisioning."


@click.group("dashboards", help="Write the Grafana dashboards, and put them into a Grafana.")
def command() -> None:
    """The group of the commands `build` and `push`."""


@command.command("build", help=_BUILD)
@click.argument("directory", type=click.Path(path_type=Path))
def build(directory: Path) -> Callable[[], int]:
    """Return the action that writes the dashboards, to be run outside of click."""
    from ddpdebug.grafana.dashboards import texts  # noqa: PLC0415 - not before it is needed

    def act() -> int:
        files = texts()
        try:
            directory.mkdir(parents=True, exist_ok=True)
            for name, text in files.items():
                (directory / name).write_text(text, encoding="utf-8")
        except OSError as error:
            raise UsageError(f"cannot write to {str(directory)!r}: {error.strerror}") from None
        print(f"{len(files)} dashboards written to {directory}")
        return 0

    return act


_PUSH = """Save the dashboards in the Grafana at URL.

The token comes from the variable GRAFANA_TOKEN or from a file. A dashboard of the same uid that ddpdebug did not make,
or that comes from a file of that Grafana, is left alone.
"""


@command.command("push", help=_PUSH)
@click.option("--url", required=True, help="Address of the Grafana, http://host:port.")
@click.option("--token-file", type=click.Path(path_type=Path), help="File that holds the token.")
@click.option("--folder", help="Title of their folder, made if it is missing; by default General, or where they are.")
@click.option("--force", is_flag=True, help="Overwrite what is there, whoever made it.")
def push(url: str, token_file: Path | None, folder: str | None, *, force: bool) -> Callable[[], int]:
    """Check address and token, and return the action that pushes the dashboards."""
    from ddpdebug.grafana.client import Grafana, GrafanaError, GrafanaUnreachableError, read_token  # noqa: PLC0415
    from ddpdebug.grafana.dashboards import shipped  # noqa: PLC0415 - not before it is needed

    grafana = Grafana(url, read_token(token_file))

    def act() -> int:
        failed = 0
        try:
            place = None if folder is None else grafana.folder(folder)
            for dashboard in shipped().values():
                try:
                    address = grafana.push(dashboard, folder=place, force=force)
                    print(f"{dashboard['title']}: {url.rstrip('/')}{address}")
                except GrafanaUnreachableError:
                    raise
                except GrafanaError as error:
                    print(f"ddpdebug: error: {error}", file=sys.stderr)
                    failed = 1
        except GrafanaError as error:  # of nobody, or without the folder: the rest would fare alike
            print(f"ddpdebug: error: {error}", file=sys.stderr)
            failed = 1
        return failed

    return act
