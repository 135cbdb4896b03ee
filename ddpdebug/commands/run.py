"""`ddpdebug run`: an unchanged training script, watched."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

import click

from ddpdebug.ci.golden import TRAJECTORY
from ddpdebug.ci.selftest import FAULT
from ddpdebug.commands._target import target_command
from ddpdebug.isolation.user_code import is_users
from ddpdebug.processes import stacks
from ddpdebug.processes.launch import Request, rank_words, ranks_environment, torchrun_words
from ddpdebug.processes.script import Attached, end_hard, run_script
from ddpdebug.run_directory.reader import ENDS

if TYPE_CHECKING:
    from ddpdebug.monitor.monitor import Monitor

_TEXT = """Run a training script with ddpdebug attached; the script needs no change.

Inside a rank (torchrun, srun) it attaches to this rank. With --nproc-per-node it starts the ranks itself, through
torch's own launcher. Options come before the script; everything after it belongs to the script.
"""


class Ending:
    """The end of the script, remembered for the verdict and passed on to the monitor."""

    def __init__(self) -> None:
        self.monitor: Monitor | None = None
        self.reason: str | None = None
        self.exit_code: int | None = None

    def close(self, reason: str, exit_code: int | None) -> None:
        """Close the monitor; an interrupted script keeps the ending that the interpreter gives it."""
        self.reason = reason
        self.exit_code = None if reason == "interrupted" else exit_code
        if self.monitor is not None:
            self.monitor.close(reason, exit_code)

    def conclude(self) -> int | None:
        """Tell how ranks have ended that the script has started by itself; return the script's own exit code."""
        starts = None if self.monitor is None else self.monitor.starts
        known = None if starts is None else starts.account()
        if known is not None:
            from ddpdebug.monitor.spawned import keep  # noqa: PLC0415 - it is loaded

            keep(known[0], ENDS, known[1])
        return self.exit_code


def attach(request: Request, *, strict: bool = False) -> Monitor | None:
    """Load torch and watch this process. A failure of ours must not keep the script from running, unless `strict`."""
    try:
        from ddpdebug.monitor.attach import install  # noqa: PLC0415 - loads torch

        return install(request.config, command=request.target.command, starts=strict)
    except Exception as error:
        if strict or is_users(error):  # a signal handler's is the job's
            raise
        message = f"{type(error).__name__}: {error}"
        print(f"ddpdebug: could not attach, the script runs without it: {message}", file=sys.stderr)
        return None


def _act(request: Request, *, as_check: bool) -> int:
    if request.config.nproc_per_node is not None and not request.in_rank:
        sys.stdout.flush()
        sys.stderr.flush()
        words = torchrun_words(request.config.nproc_per_node, rank_words(request))
        # the launcher takes the place of this process: signals and the exit status need no forwarding
        os.execve(sys.executable, words, ranks_environment())  # noqa: S606 - no shell on purpose
    if not as_check:
        run_script(request.target, before=lambda: attach(request))
        return 0
    stacks.arm(os.environ)
    ending = Ending()
    end_hard(ending.conclude)

    def before() -> Attached:
        if os.environ.get(FAULT) or os.environ.get(TRAJECTORY):
            from ddpdebug.ci import faults, trajectory  # noqa: PLC0415 - they load torch

            faults.install(os.environ)
            trajectory.install(os.environ)
        ending.monitor = attach(request, strict=True)
        return ending

    run_script(request.target, before=before)
    return 0


command = target_command("run", _act, _TEXT, click.Option(["--as-check"], is_flag=True, hidden=True))
