"""`ddpdebug annotations`: send Grafana the findings that it has missed."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import click

from ddpdebug.clock import time
from ddpdebug.disk import Disk
from ddpdebug.errors import UsageError
from ddpdebug.run_directory.reader import ANNOTATIONS, PREVIOUS, RUN, read_findings, read_run

_FLUSH = """Send the findings of the run in RUN_DIR to Grafana as annotations, where they are not there yet.

For what a run could not send, because Grafana was down or the run was killed. Each finding becomes one annotation,
however often this is called. The address is that of the run, the token comes from the variable GRAFANA_TOKEN or from a
file. Where Grafana does not answer it is tried again for a minute; then the exit code is 1.
"""
#: Seconds for which a Grafana that does not answer is tried again, and for which it may ask to be left alone.
_PATIENCE = 60.0


@click.group("annotations", help="Send Grafana the findings that it has missed.")
def command() -> None:
    """The group of `flush`."""


@command.command("flush", help=_FLUSH)
@click.argument("run_dir", type=click.Path(path_type=Path))
@click.option("--url", help="Address of the Grafana, http://host:port. [default: the run's --grafana-url]")
@click.option("--token-file", type=click.Path(path_type=Path), help="File that holds the token.")
def flush(run_dir: Path, url: str | None, token_file: Path | None) -> Callable[[], int]:
    """Check the directory, the address and the token, then send."""
    from ddpdebug.grafana.client import Grafana, read_token  # noqa: PLC0415 - not before it is needed

    try:
        runs = [(directory, read_run(directory)) for directory in _runs(run_dir)]
    except (OSError, ValueError) as error:
        raise UsageError(str(error)) from None
    address = url or next((found for _, run in runs if (found := _address(run))), None)
    if address is None:
        raise UsageError(f"the run in {str(run_dir)!r} was not told of a Grafana; name its address with --url")
    read_token(token_file)
    Grafana(address, "")
    connect = lambda: Grafana(address, read_token(token_file))  # noqa: E731 - each time with the token of then
    return lambda: max([_send(directory, run, connect) for directory, run in runs])


def _runs(directory: Path) -> Iterator[Path]:
    """Yield the runs in a directory, earlier ones that were set aside first."""
    yield from sorted(path for path in directory.glob(PREVIOUS) if (path / RUN).is_file())
    yield directory


def _address(run: dict[str, Any]) -> str | None:
    config = run.get("config")
    found = config.get("grafana_url") if isinstance(config, dict) else None
    return found if isinstance(found, str) else None


def _send(directory: Path, run: dict[str, Any], connect: Callable[[], Any]) -> int:
    from ddpdebug.grafana.annotations import Courier, Sent, flush, sent_before  # noqa: PLC0415 - as above

    marks, deadline, errors = directory / ANNOTATIONS, time.monotonic() + _PATIENCE, [""]

    def pause(seconds: float) -> bool:
        if time.monotonic() + seconds > deadline:
            return True
        time.sleep(seconds)
        return False

    def failed(error: Exception, times: int) -> None:
        errors[0] = str(error)
        if times == 1:
            print(f"ddpdebug: {error}; trying again", file=sys.stderr)

    try:
        known = sent_before(marks)
        sent = Sent(marks, Disk((directory / RUN).stat().st_mode & 0o666))
    except BlockingIOError:
        raise UsageError(f"the run in {str(directory)!r} goes on and sends its findings by itself") from None
    except OSError as error:
        raise UsageError(f"cannot write {str(marks)!r}: {error.strerror or error}") from None
    courier = Courier(connect, pause, failed)
    begun = _seconds(run.get("time"))
    done = flush(read_findings(directory), run["run"], run.get("world") or 1, sent, known, courier, begun)
    sent.close()
    print(f"{directory}: {done.sent} annotations sent, {done.there + len(known)} were there")
    if done.refused:
        print(f"ddpdebug: error: Grafana refused {done.refused}: {done.error}", file=sys.stderr)
    if done.left:
        print(f"ddpdebug: error: {done.left} were not sent: {errors[0]}; call this again later", file=sys.stderr)
    return int(bool(done.left or done.refused))


def _seconds(text: object) -> float:
    try:
        return datetime.fromisoformat(str(text)).timestamp()
    except ValueError:
        return time.time()
