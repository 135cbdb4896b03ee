"""Lets the few ranks of a test talk and be judged as very many do, in groups of two (decision 33)."""

from __future__ import annotations

import os
from contextlib import suppress
from typing import Any

#: What each rank that does so says.
SAID = "ddpdebug: talks over a tree"


def become_many() -> None:
    """Let any number of ranks from two on be very many, in this process and in those that are forked from it."""
    from ddpdebug.exchange import tree
    from ddpdebug.exchange.tree_ticks import TreeExchange
    from ddpdebug.schema import step

    step.FLAT = 1
    tree.SIZE = tree._MOST_NEIGHBOURS = tree._NEIGHBOURS = 2
    start = TreeExchange.start

    def told(self: Any) -> None:
        with suppress(OSError):
            os.write(2, f"{SAID}\n".encode())
        start(self)

    TreeExchange.start = told  # type: ignore[method-assign]
