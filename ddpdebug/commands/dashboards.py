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
    """Hold the two commands."""


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
            print(f"ddpdebug: error: cannot write to {str(directory)!r}: {error.strerror}", file=sys.stderr)
            return UsageError.exit_code
        print(f"{len(texts)} dashboards written to {directory}")
        return 0

    return act


def _shipped() -> dict[str, str]:
    from ddpdebug.dashboards import texts  # noqa: PLC0415 - not before it is needed

    return texts()


def _anew() -> dict[str, str]:
    from ddpdebug.dashboards import built  # noqa: PLC0415 - not before it is needed

    try:
        return built()
    except ImportError:
        message = "making dashboards needs the kit they are written with; pip install grafana-foundation-sdk==0.0.21"
        raise UsageError(message) from None
