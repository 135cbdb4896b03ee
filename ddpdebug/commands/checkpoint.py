"""`ddpdebug checkpoint`: the differences between two checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import click

from ddpdebug.commands._progress import progress

_COMPARE = """Say what is different between the checkpoints A and B, bit by bit, whatever their sharding.

Each is a directory of torch.distributed.checkpoint, a safetensors file or a directory of them, or a file of torch.save.
They are read tensor by tensor, in this process alone. Nested entries have names with dots: optimizer.state.0.exp_avg.
What wrappers put into names (`module.`, `_orig_mod.`) and a prefix that one side alone has are left out, and named.

Exit codes: 0 equal, 1 different, 2 wrong usage, or a checkpoint that cannot be read.
"""


@click.group("checkpoint", help="Compare checkpoints.")
def command() -> None:
    """The group of the command `compare`."""


@command.command("compare", help=_COMPARE)
@click.argument("a", type=click.Path(path_type=Path))
@click.argument("b", type=click.Path(path_type=Path))
@click.option(
    "--lines", type=click.IntRange(1), default=20, show_default=True, help="Entries to print, the worst first."
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON, with all entries that differ.")
@click.option("--trust", is_flag=True, help="Unpickle what is no tensor or plain value, which may run any code.")
def compare(a: Path, b: Path, *, lines: int, as_json: bool, trust: bool) -> Callable[[], int]:
    """Return the action that compares; it runs outside of click, and torch is loaded only then."""

    def act() -> int:
        from ddpdebug.checkpoints.comparison import compare as compared  # noqa: PLC0415 - loads torch
        from ddpdebug.checkpoints.files import open_state  # noqa: PLC0415 - as above
        from ddpdebug.schema.finding import strict_json  # noqa: PLC0415 - not before it is needed

        with progress(f"comparing {a} with {b}"):
            found = compared(open_state(a, trust=trust), open_state(b, trust=trust))
        print(strict_json(found.to_json()) if as_json else found.text(lines))
        return int(not found.equal)

    return act
