"""The relation of an epoch's batches to optimizer steps: whether its first batches are drawn but not trained on."""

from __future__ import annotations

from dataclasses import dataclass

#: Groups of batches that make a pace, and batches from which on they are worth telling: a loop may fetch one to look.
_GROUPS, _LEAST = 2, 2


@dataclass(slots=True)
class EpochPace:
    """The batches of an epoch, counted between steps.

    Args:
        began: step that was next when it began.
    """

    began: int
    batches: int = 0
    whole: bool = False  # the loader was exhausted
    _at: int = -1  # step that was next at the last batch
    _here: int = 0  # batches since then, that one included
    _lead: int = 0  # before the first step
    _each: int = 0  # before each later one; -1: not always as many
    _groups: int = 0

    def delivered(self, step: int) -> None:
        """Count a batch that was delivered while `step` was the next one."""
        if self._at not in {-1, step}:
            self._close(step)
        self._at, self._here, self.batches = step, self._here + 1, self.batches + 1

    def _close(self, step: int) -> None:
        if step != self._at + 1:  # steps without batches: what follows is no pace
            self._each = -1
        elif self._at == self.began:
            self._lead = self._here
        else:
            self._groups += 1
            self._each = self._here if self._each in {0, self._here} else -1
        self._here = 0

    def left_out(self, step: int) -> int:
        """Return the number of batches drawn first but not trained on, with `step` as the next one; 0 if unknown.

        A loop that fetches ahead draws some first as well, and trains on these in the end, unless it breaks off.
        """
        lead = self._lead - self._each
        if not self.whole or self._each < 1 or self._groups < _GROUPS or lead < _LEAST:
            return 0
        trained = (step - self.began) * self._each
        return lead if 0 <= self.batches - lead - trained < self._each else 0
