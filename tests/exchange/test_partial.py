"""What a part of the ranks says, merged."""

from __future__ import annotations

import itertools
import math
import random

import pytest

from ddpdebug.exchange.partial import EXTREMES, MAX_CLASSES, Partial, ranks_of
from ddpdebug.schema.row import DIGESTS, Flag, Row, decode, encode


def _row(rank: int, step: int = 7, *, odd: bool = False, **fields: object) -> bytes:
    digests = {name: 1000 + place for place, name in enumerate(DIGESTS)}
    own = {"batch_digest": 5000 + rank, "rng_digest": 6000 + rank, "loss": 1.0 + rank / 100, "step_seconds": 0.1}
    own["backward_seconds"] = 0.0
    if odd:
        own["params_after_digest"] = 1
    return encode(Row(rank=rank, step=step, **{**digests, **own, **fields}))  # type: ignore[arg-type]


def _of(ranks: range, step: int = 7, odd: tuple[int, ...] = (), **fields: object) -> list[Partial]:
    partials = []
    for rank in ranks:
        own = Partial(progress=step + 1, least=step + 1)
        own.add_row(_row(rank, step, odd=rank in odd, **fields))
        own.messages.append((1 << rank, b"alike"))
        own.messages.append((1 << rank, b"of rank %d" % rank if rank < 2 else b"of the rest"))
        partials.append(own)
    return partials


def _merged(partials: list[Partial]) -> Partial:
    whole = Partial()
    for partial in partials:
        whole.merge(Partial.decode(partial.encode()))
    return Partial.decode(whole.encode())


def _all(ranks: range) -> int:
    return sum(1 << rank for rank in ranks)


def test_ranks_that_are_alike_are_one_class() -> None:
    """Digests that differ between healthy ranks, and their numbers, part nobody."""
    part = _merged(_of(range(40))).steps[0, 7, False]
    ((members, data),) = part.classes.values()
    assert (members, decode(data).rank) == (_all(range(40)), 0)
    assert part.ranks == _all(range(40))


def test_the_first_in_something_is_kept() -> None:
    """Whoever has the highest loss, the longest own time, the most memory; NaN is never first."""
    rows = [_row(rank) for rank in range(20)]
    rows[3] = _row(3, step_seconds=0.4)
    rows[5] = _row(5, loss=math.nan, local_grad_norm=math.inf)
    rows[11] = _row(11, host_private_bytes=1 << 40)
    whole = Partial()
    for row in rows:
        whole.add_row(row)
    kept = Partial.decode(whole.encode()).steps[0, 7, False].rows()
    assert kept.keys() == {0, 3, 5, 11, 19}
    assert all(kept[rank] == rows[rank] for rank in kept)
    assert len(kept) <= len(EXTREMES) + 1


def test_merging_in_another_order_changes_nothing() -> None:
    """Nor does how the ranks are parted into groups."""
    values = random.Random(3)
    partials = [
        Partial(progress=1, least=1, leaving=1 << rank, steps={}, messages=[(1 << rank, b"m")]) for rank in range(24)
    ]
    for rank, partial in enumerate(partials):
        partial.add_row(_row(rank, odd=rank in {4, 9}, local_grad_norm=values.random(), data_seconds=values.random()))
    first = _merged(partials)
    for seed in range(5):
        order = partials.copy()
        random.Random(seed).shuffle(order)
        groups = (
            [_merged(list(group)) for group in itertools.batched(order, 5)]
            if hasattr(itertools, "batched")
            else [_merged(order[start : start + 5]) for start in range(0, 24, 5)]
        )
        again = _merged(groups)
        assert again.steps[0, 7, False].rows() == first.steps[0, 7, False].rows()
        assert again.steps[0, 7, False].classes == first.steps[0, 7, False].classes
        assert (again.leaving, again.messages) == (first.leaving, first.messages)
        sums = {
            name: (count, pytest.approx(total))
            for name, (count, total) in again.steps[0, 7, False].summary.sums.items()
        }
        assert first.steps[0, 7, False].summary.sums == sums


@pytest.mark.parametrize("ranks", [[], [5], [0, 8191], list(range(1, 8192, 3)), list(range(65))])
def test_a_set_of_ranks_is_read_back(ranks: list[int]) -> None:
    """Of a few as of many."""
    assert list(ranks_of(sum(1 << rank for rank in ranks))) == ranks


def test_sums_and_flags_are_those_of_all_ranks() -> None:
    """Each is counted once; who does not know a number is not counted."""
    partials = _of(range(40), flags=int(Flag.CHECKED))
    partials[7] = Partial()
    partials[7].add_row(_row(7, flags=int(Flag.CHECKED | Flag.NEAR_OVERFLOW), loss=math.nan))
    groups = [_merged(partials[start : start + 7]) for start in range(0, 40, 7)]
    summary = _merged(groups).steps[0, 7, False].summary
    losses = [1.0 + rank / 100 for rank in range(40) if rank != 7]
    assert summary.sums["loss"] == (39, pytest.approx(math.fsum(losses)))
    assert summary.sums["val_loss told"] == (0, 0.0)
    assert summary.some == int(Flag.CHECKED | Flag.NEAR_OVERFLOW)
    assert summary.common == int(Flag.CHECKED)


def test_who_differs_is_known_by_name() -> None:
    """One class for each kind, with everybody in it."""
    part = _merged(_of(range(64), odd=(5, 33))).steps[0, 7, False]
    assert sorted(list(ranks_of(members)) for members, _ in part.classes.values()) == sorted(
        [[5, 33], [rank for rank in range(64) if rank not in {5, 33}]]
    )
    assert {0, 5} <= part.rows().keys()


def test_ranks_without_anything_in_common_take_bounded_room() -> None:
    """Nobody is lost: they are one class of the rest."""
    whole = Partial()
    for rank in range(500):
        whole.add_row(_row(rank, params_after_digest=rank + 1))
    part = Partial.decode(whole.encode()).steps[0, 7, False]
    assert part.ranks == _all(range(500))
    assert len(part.classes) == MAX_CLASSES + 1
    assert len(part.rows()) <= MAX_CLASSES + 1 + len(EXTREMES)


def test_equal_messages_are_one_and_keep_their_order() -> None:
    """What each rank says first comes first; what a rank says twice is heard twice."""
    partials = _of(range(6))
    partials[3].messages.append((1 << 3, b"alike"))
    found = _merged(partials).messages
    assert found[0] == (_all(range(6)), b"alike")
    assert (1 << 3, b"alike") in found
    assert (_all(range(2, 6)), b"of the rest") in found
    assert [text for mask, text in found if mask >> 1 & 1] == [b"alike", b"of rank 1"]


def test_what_a_rank_says_keeps_its_order_where_another_says_it_the_other_way() -> None:
    """Then it is heard twice."""
    some, other = Partial(), Partial()
    some.messages = [(1, b"x"), (1, b"y")]
    other.messages = [(2, b"y"), (2, b"x")]
    some.merge(other)
    for rank, order in ((0, [b"x", b"y"]), (1, [b"y", b"x"])):
        assert [text for mask, text in some.messages if mask >> rank & 1] == order


def test_flags_by_which_healthy_ranks_differ_part_nobody() -> None:
    """And those that say what a rank has done do."""
    for flag, classes in ((Flag.BATCH_GREW, 1), (Flag.GRADS_NONFINITE, 2)):
        whole = Partial()
        for rank in range(4):
            whole.add_row(_row(rank, flags=int(flag) if rank == 2 else 0))
        assert len(whole.steps[0, 7, False].classes) == classes


def test_the_slowest_of_those_that_go_on_counts() -> None:
    """Who leaves takes no more steps."""
    whole = _merged([Partial(progress=9, leaving=1), Partial(progress=7, least=7, most=7), Partial(least=5, most=6)])
    assert (whole.progress, whole.least, whole.most) == (9, 5, 7)


@pytest.mark.parametrize("cut", [1, 10, 100, 700])
def test_bytes_that_are_no_partial_are_refused(cut: int) -> None:
    """Nothing is made up of what is missing, or of what is too much."""
    data = _of(range(1))[0].encode()
    with pytest.raises(ValueError, match=r"ends too early|too many"):
        Partial.decode(data[:-cut])
    with pytest.raises(ValueError, match="bytes too many"):
        Partial.decode(data + b"\0" * cut)


def test_what_all_ranks_hear_hardly_grows_with_their_number() -> None:
    """A step of many ranks has a row for each of its extremes, and a bit for each rank."""
    few, many = (len(_merged(_of(range(world))).encode()) for world in (32, 1024))
    assert many - few < 512
