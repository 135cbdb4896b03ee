"""Signs of life by way of the store, where there are more ranks than are read in a second."""

from __future__ import annotations

from typing import Any

import pytest

from ddpdebug.exchange import beats
from ddpdebug.exchange.beats import MOST_READ, Beats

_WORLD = 8 * MOST_READ
_STILL, _SILENT, _LATE = 700, 900, 20


class _Store(dict[str, bytes]):
    def check(self, keys: list[str]) -> bool:
        return all(key in self for key in keys)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return [self[key] for key in keys]

    def set(self, key: str, value: bytes) -> None:
        self[key] = value

    def set_timeout(self, timeout: Any) -> None:
        pass


def test_who_is_read_seldom_is_not_silent_for_that(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only who has set the same again and again is; who has set nothing was looked for at a time that is known."""
    now = [100.0]
    monkeypatch.setattr(beats.time, "monotonic", lambda: now[0])
    store = _Store()
    own = Beats(lambda: store, lambda: "run", 0)
    own._own, own._asked = b"0", tuple(range(1, _WORLD))
    for second in range(28):
        for rank in set(range(1, _WORLD)) - {_SILENT}:
            if rank != _LATE or second > 2:
                store[f"run/beats/{rank}"] = b"same" if rank == _STILL else str(second).encode()
        own._round()
        now[0] += 1.0
    heard, missed = own.heard(), own.missed()
    unchanged = {rank: one.unchanged(now[0]) for rank, one in heard.items()}
    assert max(seconds for rank, seconds in unchanged.items() if rank != _STILL) <= 1.0
    assert unchanged[_STILL] >= 16.0
    assert heard.keys() == set(range(1, _WORLD)) - {_SILENT}
    assert missed[_LATE] == 100.0
    assert missed[_SILENT] > 120.0
