"""Entry points that Lightning calls whenever it makes a Trainer or a Fabric.

In a process that ddpdebug does not watch that does and loads nothing. Where `ddpdebug run` watches a script whose ranks
Lightning starts as processes of its own, it notes for them what they must know, and they attach as they come here.
See docs/decisions/038.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from ddpdebug.printing import say

#: Set for the ranks that Lightning starts: who starts them, and what they must know, as JSON.
LAUNCHED = "DDPDEBUG_LAUNCHED"


def trainer_callbacks() -> list[Any]:
    """Return the callback for a new Trainer, if ddpdebug watches this process."""
    return _come_along(with_callback=True)


def fabric_callbacks() -> list[Any]:
    """Return no callback for a Fabric, whose callbacks run only on the script's request; but attach to its ranks."""
    return _come_along(with_callback=False)


def _come_along(*, with_callback: bool) -> list[Any]:
    """Attach to a rank that was started for it; nothing of ours keeps a Trainer from being made."""
    attach = sys.modules.get("ddpdebug.monitor.attach")
    if attach is None and LAUNCHED not in os.environ:
        return []
    try:
        if attach is None or attach.current() is None:
            if not _is_launched():
                return []
            from ddpdebug.trainers.launched import join  # noqa: PLC0415 - loads torch and all of ddpdebug

            join(os.environ.pop(LAUNCHED).partition(" ")[2], os.environ)  # once, whatever becomes of it
        else:
            from ddpdebug.trainers.launched import invitation  # noqa: PLC0415 - all that it needs is loaded

            if (told := invitation(attach.current(), os.environ)) is not None:
                os.environ[LAUNCHED] = f"{os.getpid()} {told}"
        if not with_callback:
            return []
        from ddpdebug.trainers.lightning import AddedCallback  # noqa: PLC0415 - loads Lightning's callbacks

        return [AddedCallback()]
    except Exception as error:
        from ddpdebug.isolation.user_code import is_users  # noqa: PLC0415 - hardly ever

        if is_users(error):  # a signal handler's is the job's
            raise
        say(f"ddpdebug: could not attach, training runs without it: {error}\n")
        return []


def _is_launched() -> bool:
    # the first rank is the one that starts the others; it leaves `LOCAL_RANK=0` to whatever else it starts
    starter = os.environ.get(LAUNCHED, "").partition(" ")[0]
    return starter == str(os.getppid()) and os.environ.get("LOCAL_RANK", "0") != "0"
