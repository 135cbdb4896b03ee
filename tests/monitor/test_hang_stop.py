"""When a rank leaves because of a hang, without processes."""

from __future__ import annotations

from ddpdebug.monitor.hang_stop import HangStop, line_of
from ddpdebug.progress.waits import Seen
from ddpdebug.schema.finding import Finding, Severity
from ddpdebug.schema.hangs import ENDED, GRACE_SECONDS
from ddpdebug.schema.progress import Call, RankProgress

_HANG = Finding(
    code="HANG501", severity=Severity.CRITICAL, title="a rank stopped", ranks=(1,), evidence={"hang": "0:1"}, id="a"
)
_WAITS = RankProgress(rank=0, same=20.0, waits=(Call(group="g", number=6, operation="all_reduce"),))
_STILL = RankProgress(rank=1, same=20.0, still=20.0)
_WORKS = RankProgress(rank=2, same=0.1)
_LATER = GRACE_SECONDS + 1


class _Rank:
    """A rank whose messages are heard in the tick in which they are sent."""

    def __init__(self, peers: list[_Rank], rank: int, findings: list[Finding], written: list[Finding]) -> None:
        self.left: list[Finding] = []
        self.stop = HangStop(
            findings=lambda: findings,
            written=lambda: written,
            say=lambda name: [peer.stop.hear(rank, name) for peer in peers],
            leave=lambda finding, seconds: self.left.append(finding),
        )
        peers.append(self)


def _ranks(count: int, found: list[Finding], written: list[Finding] | None = None) -> list[_Rank]:
    peers: list[_Rank] = []
    for rank in range(count):
        _Rank(peers, rank, found, written or [])
    return peers


def _tick(ranks: list[_Rank], looks: list[RankProgress], now: float, needed: set[int] | None = None) -> None:
    for rank, look in zip(ranks, looks, strict=True):
        rank.stop.tick(look, set(range(len(ranks))) if needed is None else needed, now)


def test_ranks_that_can_talk_leave_together() -> None:
    """None leaves in the time of grace, and all once each has said that it is ready."""
    ranks = _ranks(2, [_HANG])
    for now in (0.0, 5.0):
        _tick(ranks, [_WAITS, _STILL], now)
    assert [rank.left for rank in ranks] == [[], []]
    _tick(ranks, [_WAITS, _STILL], _LATER)
    _tick(ranks, [_WAITS, _STILL], _LATER)
    assert all(_HANG in rank.left for rank in ranks)


def test_nobody_leaves_while_a_rank_is_at_work() -> None:
    """A checkpoint is finished first."""
    ranks = _ranks(3, [_HANG])
    for now in (0.0, _LATER, 10 * _LATER):
        _tick(ranks, [_WAITS, _STILL, _WORKS], now)
    assert not any(rank.left for rank in ranks)
    _tick(ranks, [_WAITS, _STILL, _WAITS], 11 * _LATER)
    _tick(ranks, [_WAITS, _STILL, _WAITS], 11 * _LATER)
    assert all(rank.left for rank in ranks)


def test_a_rank_that_has_ended_is_not_asked() -> None:
    """The others leave without it."""
    ranks = _ranks(3, [_HANG])
    for now in (0.0, _LATER, _LATER):
        _tick(ranks[:2], [_WAITS, _STILL], now, {0, 1})
    assert all(rank.left for rank in ranks[:2])


def test_a_hang_that_ends_in_time_ends_nothing() -> None:
    """Also where ranks had said already that they were ready."""
    found = [_HANG]
    ranks = _ranks(2, found)
    _tick(ranks, [_WAITS, _STILL], 0.0)
    _tick(ranks, [_WAITS, _WORKS], _LATER)  # rank 0 says it
    found[0] = Finding(code="HANG501", severity=Severity.CRITICAL, title="t", evidence={"hang": "0:1", ENDED: 9.0})
    for now in (_LATER, 5 * _LATER):
        _tick(ranks, [_WAITS, _STILL], now)
    assert not any(rank.left for rank in ranks)


def test_alone_by_what_another_rank_has_written() -> None:
    """A rank that hears nobody reads the hang in the run directory."""
    (rank,) = _ranks(1, [], [_HANG])
    for now in (100.0, 105.0):
        rank.stop.alone(_WAITS, [Seen(silent=20.0)], now)
    assert not rank.left
    rank.stop.alone(_WAITS, [Seen(silent=20.0)], 100.0 + _LATER)
    assert rank.left == [_HANG]


def test_alone_while_another_rank_is_at_work() -> None:
    """What the black boxes show holds there."""
    (rank,) = _ranks(1, [_HANG])
    for now in (0.0, _LATER):
        rank.stop.alone(_WAITS, [Seen(progress=_WORKS)], now)
    assert not rank.left
    rank.stop.alone(_WORKS, [], 2 * _LATER)
    assert not rank.left
    rank.stop.alone(_WAITS, [Seen(progress=_STILL), Seen(progress=_WORKS, left="gone")], 3 * _LATER)
    assert rank.left == [_HANG]


def test_who_follows_has_no_grace_of_its_own() -> None:
    """A rank that hears of the hang later leaves as the others have."""
    (rank,) = _ranks(1, [_HANG])
    gone = RankProgress(rank=2, ended="hang: HANG501 a rank stopped")
    rank.stop.alone(_WAITS, [Seen(progress=gone, left="it has left")], 0.0)
    assert rank.left == [_HANG]


def test_line() -> None:
    """It says why, and who cannot leave by itself."""
    silent = Finding(code="HANG501", severity=Severity.CRITICAL, title="t", ranks=(1,), phase="interpreter")
    assert "rank 1 cannot leave by itself" in line_of(silent, 0)
    assert "exit status 4" in line_of(_HANG, 0)
    assert "cannot leave" not in line_of(_HANG, 0)
