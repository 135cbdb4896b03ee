"""`ddpdebug replay`: runs a bundle's forward and backward again, and names the first bad operation."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from ddpdebug.commands._replay_request import Request
from ddpdebug.errors import UsageError

_TEXT = """Run a bad step again from its bundle, in one process, and name the first bad operation.

The bundle holds tensors and numbers; it cannot bring code. Say where the model's class comes from with one of --model,
--script, --import-class or --module: this runs your own code.

Exit codes: 0 nothing non-finite came out, 1 it was reproduced, 2 wrong usage, 3 the step did not get to its end (the
model raised, another version, another device), so that nothing is known of it.
"""


def _check(request: Request) -> None:
    sources = [request.model, request.script, request.import_class or None, request.module]
    if sum(source is not None for source in sources) > 1:
        raise UsageError("give only one of --model, --script, --import-class and --module")
    if request.model is not None and (":" not in request.model or not all(request.model.rpartition(":")[::2])):
        raise UsageError(f"--model {request.model!r} has no function; give package.module:function or file.py:function")
    for file, flag in ((request.script, "--script"), (request.module, "--module")):
        if file is not None and not file.is_file():
            raise UsageError(f"{flag} {str(file)!r} is no file")
    if not request.bundle.is_dir():
        raise UsageError(f"{str(request.bundle)!r} is no bundle; bundles lie in a run directory, below bundles/")
    if request.json is not None and (request.json.is_dir() or not request.json.parent.is_dir()):
        raise UsageError(f"--json {str(request.json)!r} cannot be written; give the name of a file")


@click.command("replay", help=_TEXT)
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option("--model", metavar="WHERE", help="package.module:function or file.py:function that returns the model.")
@click.option("--script", metavar="FILE", type=click.Path(path_type=Path), help="Import the bundle's class from there.")
@click.option("--import-class", is_flag=True, help="Import the module and class that the bundle names.")
@click.option("--module", metavar="FILE", type=click.Path(path_type=Path), help="A pickled module; needs --trust.")
@click.option("--trust", is_flag=True, help="Unpickle --module, which may run any code.")
@click.option("--device", metavar="NAME", help="Where to run [cpu, cuda, ...; default as the bundle, or cpu].")
@click.option("--cpu", is_flag=True, help="The same as --device cpu.")
@click.option("--dtype", type=click.Choice(["float32", "float64"]), help="Convert everything: does it survive then?")
@click.option("--no-amp", is_flag=True, help="Leave autocast off.")
@click.option("--json", metavar="FILE", type=click.Path(path_type=Path), help="Write the result as JSON.")
def command(*, trust: bool, cpu: bool, no_amp: bool, **given: Any) -> Callable[[], int]:
    """Check the line, and return the action that replays, to be run outside of click."""
    if given["module"] is not None and not trust:
        raise UsageError("--module unpickles a file, which may run any code; add --trust if you made the file")
    if cpu and given["device"] not in {None, "cpu"}:
        raise UsageError(f"--cpu and --device {given['device']!r} contradict each other; give one of them")
    request = Request(**{**given, "device": "cpu" if cpu else given["device"], "amp": not no_amp})
    _check(request)

    def act() -> int:
        from ddpdebug.commands._replay import run  # noqa: PLC0415 - torch is loaded when the line is right

        return run(request)

    return act
