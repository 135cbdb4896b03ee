"""The patience for ranks at work: from when on a wait for them is too long. Torch-free, no clock."""

from __future__ import annotations


class Patience:
    """The waits of a run for ranks at work: a wait is too long if it far exceeds all that ended well.

    Args:
        least: seconds that are never too long: imports from a slow file system, a first evaluation, a checkpoint.
        factor: so many times the longest wait that has ended well.
    """

    def __init__(self, least: float = 300.0, factor: float = 10.0) -> None:
        self._least, self._factor = least, factor
        self.longest = 0.0  # seconds, of those that have ended well
        self._now = 0.0  # of the one that lasts

    def waits(self, seconds: float) -> None:
        """Take the length of the present wait; a shorter one than before is a new wait."""
        if seconds < self._now:
            self.ended()
        self._now = seconds

    def ended(self) -> None:
        """Note that the wait has ended well: the ranks have gone on."""
        self.longest, self._now = max(self.longest, self._now), 0.0

    def broken(self) -> None:
        """Forget the present wait: the rank is not at work any more, or has left."""
        self._now = 0.0

    @property
    def limit(self) -> float:
        """The seconds from which on a wait is too long."""
        return max(self._least, self._factor * self.longest)
