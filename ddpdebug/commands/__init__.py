"""The command line: one file for each command. Importing this loads click, never torch or rich."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence

import click

from ddpdebug._version import __version__
from ddpdebug.errors import UsageError, did_you_mean

COMMANDS = (
    "run",
    "check",
    "preflight",
    "verdict",
    "bisect",
    "equivalence",
    "explain",
    "replay",
    "memory",
    "report",
    "top",
    "stacks",
    "dashboards",
    "annotations",
    "hub",
    "doctor",
)

#: What a command does once its line is right; called outside of click, which would catch what a script raises.
Action = Callable[[], int]


class _Commands(click.Group):
    """Loads a command when it is asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command:
        if cmd_name not in COMMANDS:
            raise UsageError(f"unknown command {cmd_name!r}; {did_you_mean(cmd_name, COMMANDS)}")
        command: click.Command = importlib.import_module(f"ddpdebug.commands.{cmd_name}").command
        return command


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; what a user's script raises passes through."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        action = _parse(words or ["--help"])
    except (click.ClickException, UsageError) as error:
        return _fail(error)
    if not callable(action):
        return action or 0  # --help, --version
    try:
        return action()
    except UsageError as error:
        if error.by_script:
            raise
        return _fail(error)


def _parse(words: list[str]) -> Action | int | None:
    group = _Commands("ddpdebug", help="Find out, while a DDP job runs, why it goes wrong.")
    group = click.version_option(__version__, message="%(prog)s %(version)s")(group)
    result: Action | int | None = group.main(words, prog_name="ddpdebug", standalone_mode=False)
    return result


def _unknown_option(error: click.NoSuchOption) -> str:
    command = error.ctx.command if error.ctx else None
    shown = [p for p in command.params if not getattr(p, "hidden", False)] if command else []
    names = [name.removeprefix("--") for p in shown for name in p.opts if name.startswith("--")]
    name = error.option_name.lstrip("-")
    return f"unknown option {error.option_name}; {did_you_mean(name, names, prefix='--')}"


def _fail(error: Exception) -> int:
    message = str(error)
    if isinstance(error, click.NoSuchOption):
        message = _unknown_option(error)
    elif isinstance(error, click.ClickException):
        text = error.format_message()
        message = text[:1].lower() + text[1:].rstrip(".")
    print(f"ddpdebug: error: {' '.join(message.split())}", file=sys.stderr)
    return UsageError.exit_code
