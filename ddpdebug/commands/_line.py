"""The command line as click parses it. Loads click, never torch or rich."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Sequence

import click

from ddpdebug._version import __version__
from ddpdebug.commands._rank import Plan
from ddpdebug.errors import TargetError, UsageError, did_you_mean
from ddpdebug.printing import say

COMMANDS = (
    "run",
    "check",
    "preflight",
    "verdict",
    "equivalence",
    "explain",
    "facts",
    "fix",
    "replay",
    "checkpoint",
    "report",
    "top",
    "stacks",
    "dashboards",
    "hub",
    "mcp",
    "doctor",
)

#: What a command does once its line is right, called outside of click; a plan is what remains to be done.
Action = Callable[[], int | Plan]


class _Commands(click.Group):
    """Loads a command when it is asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command:
        if cmd_name not in COMMANDS:
            raise UsageError(f"unknown command {cmd_name!r}; {did_you_mean(cmd_name, COMMANDS)}")
        command: click.Command = importlib.import_module(f"ddpdebug.commands.{cmd_name}").command
        return command


def carry_out(words: Sequence[str]) -> int | Plan:
    """Run one command and return its exit code, or the plan for a script that is to run in this process."""
    try:
        action = _parse(list(words) or ["--help"])
    except (click.ClickException, UsageError) as error:
        status = error.status if isinstance(error, TargetError) and words[0] == "run" else UsageError.exit_code
        return _fail(error, status)
    if not callable(action):
        return action or 0  # --help, --version
    try:
        return action()
    except UsageError as error:
        return _fail(error)
    except KeyboardInterrupt:
        say("ddpdebug: interrupted\n")
        return 130
    except BrokenPipeError:  # who read the output has read enough, as `head` does; nothing is left to flush at the exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 141


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
    return f"unknown option {error.option_name}; {did_you_mean(name, names, prefix='--', listed='--help lists all')}"


def _fail(error: Exception, status: int = UsageError.exit_code) -> int:
    message = str(error)
    if isinstance(error, click.NoSuchOption):
        message = _unknown_option(error)
    elif isinstance(error, click.ClickException):
        text = error.format_message()
        message = text[:1].lower() + text[1:].rstrip(".")
    say(f"ddpdebug: error: {' '.join(message.split())}\n")
    return status
