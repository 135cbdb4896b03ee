"""The interface to a keeper: a process that serves what a rank came to once the rank has gone. Torch-free."""

from __future__ import annotations

from typing import Any, Protocol


class Keeper(Protocol):
    """The rank's end of it (`processes/linger.py`), which never raises and never waits."""

    lingers: bool  # it has the rank's end, the listening socket and the target file, and takes care of them

    def tell(self, *, files: tuple[int, ...] = (), **facts: Any) -> bool:
        """Give it facts; return whether it has got them."""

    def end(self, **facts: Any) -> bool:
        """Give it the end, and leave the endpoint to it; return whether it has got that."""

    def close(self) -> None:
        """Let go of it; one that was not given the end goes at once."""
