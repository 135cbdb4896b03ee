"""`ddpdebug preflight`: checks of data, model, loss and learning rate, on an unchanged script's own first steps."""

from __future__ import annotations

import os
import shutil
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from ddpdebug.clock import time
from ddpdebug.commands._progress import progress
from ddpdebug.commands._target import TargetCommand, click_option, load_factory, prepare, split_factory
from ddpdebug.config.settings import Config, options, to_flags
from ddpdebug.errors import TargetError, UsageError
from ddpdebug.preflight.output.results import chosen
from ddpdebug.printing import say
from ddpdebug.processes.launch import Request, ranks_environment, torchrun_words
from ddpdebug.processes.script import end_with, run_script
from ddpdebug.sinks.words import clean

_TEXT = """Check a training script before it trains: data, parameters, initial loss, gradients, and more.

The script runs unchanged until its first optimizer steps are done and is stopped then; everything after that works on
copies. FACTORY is `package.module:build` or `file.py:build`, a function without arguments that returns
`model, loss_fn, optimizer, batches`, in place of a script.

Exit codes: 0 nothing wrong, 1 a check failed (with --fail-on warning: or warned), 2 wrong usage, 3 the script failed
before its first optimizer step, or has none.
"""
_FAILED = 3
_STEPS = 4


@click.pass_context
def _callback(ctx: click.Context, /, factory: str | None, only: str | None, **values: Any) -> Callable[[], int]:
    """Check the line; run later, outside of click."""
    told = {key: values.pop(key) for key in ("expect_loss", "causal")}
    settings = {key: value for key, value in told.items() if value not in {None, False}}
    given = {key: value for key, value in values.items() if value is not None}
    groups = None if only is None else chosen(only)
    if factory is not None:
        if ctx.obj:
            raise UsageError("give a script or --factory, not both")
        path, name = split_factory(factory)
        config = Config.load(given, os.environ, Path.cwd(), flags=True)
        return lambda: _from_factory(path, name, config, groups, settings)
    request = prepare(given, ctx.obj, "preflight")
    return lambda: _from_script(request, groups, settings)


command = TargetCommand(
    "preflight",
    callback=_callback,
    help=_TEXT,
    params=[
        *(click_option(option) for option in options("preflight")),
        click.Option(["--factory"], metavar="NAME", help="Examine what this function returns instead of a script."),
        click.Option(["--only"], metavar="GROUP,...", help="Only these groups of checks, for example data,overfit."),
        click.Option(["--expect-loss"], type=float, help="The loss to expect at first, where log C is not it."),
        click.Option(["--causal"], is_flag=True, help="The model must not see later positions: test that."),
    ],
)


# --- an unchanged script ----------------------------------------------------------------------------------------------


def _from_script(request: Request, groups: Sequence[str] | None, settings: Mapping[str, Any]) -> int:
    if not request.in_rank and (error := request.target.syntax_error()) is not None:
        print(error, end="", file=sys.stderr)
        return _FAILED
    if request.config.nproc_per_node is not None and not request.in_rank:
        _become_launcher(request, groups, settings)
    if not request.in_rank:
        os.environ.update(_alone(os.environ))
    os.environ["TORCHDYNAMO_DISABLE"] = "1"  # the checks look into the model, which is the same uncompiled
    codes: list[int] = []
    end_with(lambda: codes[0] if codes else None)
    codes.append(_captured(request, groups, settings))
    return codes[0]


def _become_launcher(request: Request, groups: Sequence[str] | None, settings: Mapping[str, Any]) -> None:
    """Go on as torch's launcher, which starts this command on every rank."""
    config = request.config
    words = ["preflight", *to_flags({k: v for k, v in request.given.items() if k != "nproc_per_node"}, "preflight")]
    words += [] if groups is None else [f"--only={','.join(groups)}"]
    words += [f"--expect-loss={settings['expect_loss']}"] if "expect_loss" in settings else []
    words += ["--causal"] if "causal" in settings else []
    words += request.target.command
    sys.stdout.flush()
    sys.stderr.flush()
    # the launcher takes the place of this process: signals and the exit status need no forwarding
    line = torchrun_words(config.nproc_per_node or 1, words)
    os.execve(sys.executable, line, ranks_environment())  # noqa: S606 - no shell on purpose


def _captured(request: Request, groups: Sequence[str] | None, settings: Mapping[str, Any]) -> int:
    from ddpdebug.preflight.capture.capture import Capture  # noqa: PLC0415 - loads torch, after the line is known to be right

    capture = Capture(request.config.steps or _STEPS)
    trouble = _run(request, capture)
    if not capture.steps:
        where = "its first optimizer step"
        what = "the script ended without" if trouble is None else f"the script ended with {trouble} before"
        hint = "; preflight needs a script that trains, or --factory" if trouble is None else ""
        say(f"ddpdebug: error: {what} {where}{hint}\n")
        return _FAILED
    subject = capture.subject()
    if subject is None:
        say("ddpdebug: error: no call of a model was seen before the optimizer's step\n")
        return _FAILED
    if os.environ["RANK"] != "0":
        return 0
    subject.settings.update(settings)
    note = f"{capture.steps} optimizer steps of {request.target.name}, {len(capture.tapes)} batches recorded"
    if trouble is not None:
        note += f"; the script ended with {trouble}"
    return _examine(subject, request.config, groups, note)


class _Closing:
    """The monitor's place in a preflight: removes the capture when the script ends, before its traceback is printed."""

    def __init__(self, capture: Any) -> None:
        self._capture = capture

    def close(self, reason: str, exit_code: int | None) -> None:
        """Leave the process as it was."""
        del reason, exit_code
        self._capture.close()


def _run(request: Request, capture: Any) -> str | None:
    """Run the script until it is stopped; return what it raised, after printing it as Python does."""

    def before() -> _Closing:
        capture.install()
        return _Closing(capture)

    try:
        run_script(request.target, before=before)
    except TargetError:
        raise
    except SystemExit as error:
        return None if error.code in {None, 0} else f"SystemExit: {error.code}"
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # noqa: BLE001 - the script's
        sys.excepthook(type(error), error, error.__traceback__)
        return type(error).__name__
    return None


def _alone(environ: Mapping[str, str]) -> dict[str, str]:
    """Return what torchrun would set for a world of one process."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ours = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    ours |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return {key: value for key, value in ours.items() if key not in environ or key in {"RANK", "WORLD_SIZE"}}


# --- a factory --------------------------------------------------------------------------------------------------------


def _from_factory(
    path: str, name: str, config: Config, groups: Sequence[str] | None, settings: Mapping[str, Any]
) -> int:
    from ddpdebug.preflight.api import subject_of  # noqa: PLC0415 - loads torch

    made = load_factory(path, name)()
    if not (isinstance(made, tuple) and len(made) == 4):
        raise UsageError(f"{name!r} must return (model, loss_fn, optimizer, batches), not {type(made).__name__}")
    subject = subject_of(*made, **settings)
    return _examine(subject, config, groups, f"{len(subject.batches)} batches of {path}:{name}")


# --- examining and telling --------------------------------------------------------------------------------------------


def _examine(subject: Any, config: Config, groups: Sequence[str] | None, note: str) -> int:
    from ddpdebug import torch_internals as internals  # noqa: PLC0415 - loads torch
    from ddpdebug.preflight.examine import examine  # noqa: PLC0415
    from ddpdebug.preflight.output.files import write  # noqa: PLC0415
    from ddpdebug.preflight.output.results import Status  # noqa: PLC0415

    internals.claim_process()  # the script has been stopped
    start = time.monotonic()
    with progress("preflight") as now:
        checks = examine(subject, groups, lambda group: now(f"preflight: {group}"))
    print(f"ddpdebug: preflight: {clean(note)}; examined in {time.monotonic() - start:.1f} s", flush=True)
    print(_lines(checks), end="", flush=True)
    if config.out is not None:
        try:
            files = write(checks, config.out, f"preflight: {note}")
            print(f"ddpdebug: written: {', '.join(map(str, files))}", flush=True)
        except OSError as error:
            say(f"ddpdebug: could not write {str(config.out)!r}: {error.strerror}\n")
    bad = {Status.FAIL, Status.WARN} if config.fail_on == "warning" else {Status.FAIL}
    return int(any(check.status in bad for check in checks))


def _lines(checks: Sequence[Any]) -> str:
    width = shutil.get_terminal_size().columns
    if sys.stdout.isatty() and "NO_COLOR" not in os.environ:
        from ddpdebug.preflight.output.text import styled  # noqa: PLC0415 - loads rich

        return styled(checks, width)
    from ddpdebug.preflight.output.text import render  # noqa: PLC0415

    return render(checks, max(100, width))
