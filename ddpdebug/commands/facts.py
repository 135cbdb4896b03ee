"""`ddpdebug facts`: facts of how a run trains, and differences between two runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import click

from ddpdebug.commands._progress import progress

_TEXT = """Print the facts of RUN, or in what OTHER differs from RUN.

Facts are read from what a run has recorded: who moves, train and eval mode, loads, samples, scale, order of the calls,
numbers, ranks, signals, end. RUN and OTHER are run directories, or files that `ddpdebug facts RUN --json` has written.
`ddpdebug check --golden RUN` holds a script to them. Exit codes of a comparison: 0 nothing differs, 1 something does.
"""


@click.command("facts", help=_TEXT)
@click.argument("run", type=click.Path(path_type=Path))
@click.argument("other", type=click.Path(path_type=Path), required=False)
@click.option("--json", "as_json", is_flag=True, help="Print JSON: of one run, the file that --golden reads.")
def command(run: Path, other: Path | None, *, as_json: bool) -> Callable[[], int]:
    """Read the facts, and return the action that prints them, to be run outside of click."""
    from ddpdebug.facts.comparison import differences, facts_of, listed  # noqa: PLC0415 - not before it is needed
    from ddpdebug.schema.finding import strict_json  # noqa: PLC0415 - as above
    from ddpdebug.sinks.words import clean  # noqa: PLC0415 - as above

    with progress("reading the facts"):
        known = facts_of(run)
        found = None if other is None else differences(known, facts_of(other))

    def act() -> int:
        if found is None:
            print(known.text(), end="") if as_json else print(*map(clean, listed(known)), sep="\n")
            return 0
        if as_json:
            print(strict_json([{**asdict(one), "words": one.words} for one in found]))
        elif found:
            print(*(f"{one.contract}. {clean(one.words)}" for one in found), sep="\n")
        else:
            print("nothing differs")
        return int(bool(found))

    return act
