"""`ddpdebug dashboards`: make the Grafana dashboards, and put them into a Grafana."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import click

from ddpdebug.errors import UsageError

_BUILD = """Write the dashboards as JSON files into DIRECTORY, for Grafana's provisioning.

They are those that this version ships; from a checkout, `make dashboards` makes them anew from their code.
"""


@click.group("dashboards", help="Make the Grafana dashboards, and put them into a Grafana.")
def command() -> None:
    """The group of `build` and `push`."""


@command.command("build", help=_BUILD)
@click.argument("directory", type=click.Path(path_type=Path))
@click.option("--from-code", is_flag=True, help="Make them anew; needs grafana-foundation-sdk==0.0.21.")
def build(directory: Path, *, from_code: bool) -> Callable[[], int]:
    """Check the directory, then write."""
    texts = _anew() if from_code else _shipped()

    def act() -> int:
        try:
            directory.mkdir(parents=True, exist_ok=True)
            for name, text in texts.items():
                (directory / name).write_text(text, encoding="utf-8")
        except OSError as error:
            raise UsageError(f"cannot write to {str(directory)!r}: {error.strerror}") from None
        print(f"{len(texts)} dashboards written to {directory}")
        return 0

    return act


def _shipped() -> dict[str, str]:
    from ddpdebug.grafana.dashboards import texts  # noqa: PLC0415 - not before it is needed

    return texts()


def _anew() -> dict[str, str]:
    from ddpdebug.grafana.dashboards import built  # noqa: PLC0415 - not before it is needed

    try:
        return built()
    except ImportError:
        message = "making dashboards needs the kit they are written with; pip install grafana-foundation-sdk==0.0.21"
        raise UsageError(message) from None


_PUSH = """Save the dashboards in the Grafana at URL.

The token comes from the variable GRAFANA_TOKEN or from a file. A dashboard of the same uid that ddpdebug did not make,
or that comes from a file of that Grafana, is left alone.
"""


@command.command("push", help=_PUSH)
@click.option("--url", required=True, help="Address of the Grafana, http://host:port.")
@click.option("--token-file", type=click.Path(path_type=Path), help="File that holds the token.")
@click.option("--force", is_flag=True, help="Overwrite what is there, whoever made it.")
def push(url: str, token_file: Path | None, *, force: bool) -> Callable[[], int]:
    """Check address and token, then push."""
    from ddpdebug.grafana.client import Grafana, GrafanaError, read_token  # noqa: PLC0415
    from ddpdebug.grafana.dashboards import shipped  # noqa: PLC0415 - not before it is needed

    grafana = Grafana(url, read_token(token_file))

    def act() -> int:
        failed = 0
        for dashboard in shipped().values():
            try:
                print(f"{dashboard['title']}: {url.rstrip('/')}{grafana.push(dashboard, force=force)}")
            except GrafanaError as error:
                print(f"ddpdebug: error: {error}", file=sys.stderr)
                failed = 1
        return failed

    return act
