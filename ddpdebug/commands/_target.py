"""Shared parts of commands: options of `Config`, the script at the end of the line, factories; all are checked."""

from __future__ import annotations

import importlib
import importlib.util
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from ddpdebug.commands._rank import Plan
from ddpdebug.config.settings import Config, Option, options
from ddpdebug.disk import Disk, mode_of
from ddpdebug.errors import TargetError, UsageError, did_you_mean
from ddpdebug.processes.launch import Request
from ddpdebug.processes.script import Target


class TargetCommand(click.Command):
    """A command whose line ends in `script.py [args]` or `-m module [args]`; its own options come before that."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse ddpdebug's part of the line and keep the script's part as it is."""
        switches = {name for p in self.params for name in (*p.opts, *p.secondary_opts) if getattr(p, "is_flag", False)}
        end = _own_part(args, switches | set(ctx.help_option_names))
        ctx.obj = args[end:]
        return super().parse_args(ctx, args[:end])

    def collect_usage_pieces(self, ctx: click.Context) -> list[str]:
        """Return the words of the usage line after the command's name."""
        return ["[OPTIONS]", "{SCRIPT | -m MODULE} [ARGS]..."]


def target_command(name: str, act: Callable[..., int | Plan], text: str, *extra: click.Option) -> TargetCommand:
    """Return the command `name` with its options of `Config`; it calls `act` with the request."""

    @click.pass_context
    def callback(ctx: click.Context, /, **values: Any) -> Callable[[], int | Plan]:
        hidden = {option.name for option in extra}
        given = {key: value for key, value in values.items() if value not in (None, ()) and key not in hidden}
        request = prepare(given, ctx.obj, name)
        marks = {str(key): values[str(key)] for key in hidden}
        return lambda: act(request, **marks)

    parameters = [click_option(option) for option in options(name)]
    return TargetCommand(name, callback=callback, params=[*parameters, *extra], help=text)


def prepare(given: Mapping[str, Any], words: Sequence[str], command: str) -> Request:
    """Check a command line before torch is loaded or a rank started, and return its request; raise UsageError."""
    config = Config.load(given, os.environ, Path.cwd(), flags=True, command=command)
    target = target_of(words, command)
    target.check()
    in_rank = "RANK" in os.environ and "WORLD_SIZE" in os.environ
    if in_rank and "nproc_per_node" in given:
        raise UsageError(
            f"--nproc-per-node starts ranks, but this process is rank {os.environ['RANK']} already; leave it out"
        )
    if os.environ.get("RANK", "0") == "0":
        if config.out is not None:
            _check_directory(config.out, "--out", Disk(mode_of(config.file_mode)))
        if command == "check":
            check_outputs(config)
    return Request(config=config, given=given, target=target, in_rank=in_rank)


def check_outputs(config: Config) -> None:
    """Raise UsageError if a verdict file cannot be written."""
    for name in ("junit", "json", "markdown", "codequality"):
        file = getattr(config, name)
        if file is not None:
            _check_file(file, f"--{name}")


def _own_part(args: Sequence[str], switches: set[str]) -> int:
    """Return where the script's part of a line begins."""
    at = 0
    while at < len(args):
        word = args[at]
        if word == "-m" or not word.startswith("-"):
            return at
        if word == "--":
            return at
        at += 1 if word in switches or "=" in word else 2
    return len(args)


def target_of(words: Sequence[str], command: str) -> Target:
    """Return the script or module at the end of a line; raise TargetError if there is none."""
    words = words[1:] if words[:1] == ["--"] else words
    usage = f"usage: ddpdebug {command} [options] script.py [args], or -m package.module [args]"
    if not words:
        raise TargetError(f"no script given; {usage}")
    if words[0] != "-m":
        return Target(name=words[0], args=tuple(words[1:]))
    if len(words) == 1:
        raise TargetError(f"-m needs the name of a module; {usage}")
    return Target(name=words[1], args=tuple(words[2:]), module=True)


def click_option(option: Option) -> click.Option:
    """Return a setting as an option of the command line."""
    default = Config.__dataclass_fields__[option.name].default
    note = f"default {default}" if default is not None else "no default"
    if option.switch:
        names, about = f"{option.flag}/{option.flag.replace('--', '--no-', 1)}", f"[{note}]"
        return click.Option([names], default=None, help=f"{option.help} {about}")
    about = f"{option.help} [{option.valid}; {note}]"
    return click.Option([option.flag], metavar="VALUE", default=None, multiple=option.repeated, help=about)


def _check_directory(directory: Path, flag: str, disk: Disk | None = None) -> None:
    try:
        (disk or Disk(None)).make_directory(directory)  # a place for files that CI reads is made as users expect
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as error:
        raise UsageError(f"{flag} {str(directory)!r} cannot be written: {error.strerror or error}") from None


def _check_file(file: Path, flag: str) -> None:
    if file.is_dir():
        raise UsageError(f"{flag} {str(file)!r} is a directory; give the name of a file")
    _check_directory(file.parent, flag)


def plain_console(limit: int) -> Any:
    """Return a `rich.console.Console` for standard output, at most `limit` columns wide, without markup."""
    from rich.console import Console  # noqa: PLC0415 - not before it is needed

    columns = shutil.get_terminal_size().columns if sys.stdout.isatty() else limit
    return Console(file=sys.stdout, width=min(columns, limit), highlight=False, markup=False, emoji=False)


def split_factory(factory: str) -> tuple[str, str]:
    """Return the file or module of a factory and its name there; raise UsageError before anything is started."""
    path, colon, name = factory.rpartition(":")
    if not colon or not path or not name.isidentifier():
        raise UsageError(f"{factory!r} names no factory; write package.module:build or file.py:build")
    if path.endswith(".py") and not Path(path).is_file():
        raise UsageError(f"no such file: {path!r} (looked in {Path.cwd()})")
    return path, name


def load_factory(path: str, name: str) -> Callable[..., Any]:
    """Import the function of a file or module; exceptions of the user's code pass through.

    Raises:
        UsageError: there is no such module or function.
    """
    if path.endswith(".py"):
        sys.path.insert(0, str(Path(path).resolve().parent))  # as Python does for a script
        spec = importlib.util.spec_from_file_location(Path(path).stem, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
    else:
        sys.path.insert(0, str(Path.cwd()))
        try:
            module = importlib.import_module(path)
        except ModuleNotFoundError as error:
            if error.name and (path == error.name or path.startswith(f"{error.name}.")):
                raise UsageError(f"no module named {path!r} (looked in {Path.cwd()} and in sys.path)") from None
            raise
    build = getattr(module, name, None)
    if not callable(build):
        known = [found for found, value in vars(module).items() if callable(value) and not found.startswith("_")]
        raise UsageError(f"{path} has no function {name!r}; {did_you_mean(name, known)}")
    found: Callable[..., Any] = build
    return found
