"""Host and device of the ranks in a finding, for people; of a job on one host only the device. Torch-free."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from ddpdebug.schema.announcements import Announcement, Device, Place
from ddpdebug.schema.finding import Finding

#: So many ranks of a finding are told of; more are not looked up one by one.
_MOST = 16


class Places:
    """The hosts and devices that the ranks have announced."""

    def __init__(self) -> None:
        self._nodes: dict[int, str] = {}
        self._devices: dict[int, str] = {}

    def hear(self, rank: int, value: Announcement | None) -> None:
        """Record an announcement if it names a rank's host or device."""
        if isinstance(value, Place):
            self._nodes[rank] = value.node
        elif isinstance(value, Device) and value.device:
            self._devices[rank] = value.device

    def named(self, found: Iterable[tuple[Finding, bool]]) -> list[tuple[Finding, bool]]:
        """Return findings with the hosts or devices of their ranks."""
        if len(set(self._nodes.values())) < 2:  # the device of one rank that is to blame, as it may be broken
            return [(replace(finding, places=self._device(finding.ranks)), new) for finding, new in found]
        return [(replace(finding, places=self._of(finding.ranks)), new) for finding, new in found]

    def _device(self, ranks: Sequence[int]) -> dict[str, str]:
        return {str(rank): self._devices[rank] for rank in ranks if len(ranks) == 1 and rank in self._devices}

    def _of(self, ranks: Iterable[int]) -> dict[str, str]:
        known = [rank for rank in ranks if rank in self._nodes][:_MOST]
        return {str(rank): ", ".join(filter(None, (self._nodes[rank], self._devices.get(rank)))) for rank in known}
