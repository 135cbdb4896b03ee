"""`ddpdebug run`: an unchanged training script with ddpdebug attached."""

from __future__ import annotations

import os
import sys

import click

from ddpdebug.commands._rank import AS_CHECK, RUN, Plan, launcher, planned
from ddpdebug.commands._target import target_command
from ddpdebug.processes.launch import Request, rank_words, torchrun_words

_TEXT = """Run a training script with ddpdebug attached; the script needs no change.

Inside a rank (torchrun, srun) it attaches to this rank. With --nproc-per-node it starts the ranks itself, through
torch's own launcher. Options come before the script; everything after it belongs to the script.
"""


def _act(request: Request, *, as_check: bool) -> int | Plan:
    if request.config.nproc_per_node is None or request.in_rank:
        return planned(request, AS_CHECK if as_check else RUN)
    if (error := request.target.syntax_error()) is not None:  # before any rank is started
        print(error, end="", file=sys.stderr)
        return 1
    return launcher(torchrun_words(request.config.nproc_per_node, rank_words(request)), os.environ)


command = target_command("run", _act, _TEXT, click.Option(["--as-check"], is_flag=True, hidden=True))
