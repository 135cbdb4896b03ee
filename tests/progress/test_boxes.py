"""What is read of black boxes from outside, and the answers to a question, in directories of anybody's."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path

import pytest
from machine import until

from ddpdebug.disk import Disk
from ddpdebug.progress import asked, black_box, kernel
from ddpdebug.progress.asked import ANSWER, REQUEST, Asked, Asking
from ddpdebug.progress.boxes import DEAD, ELSEWHERE, LIVE, SILENT, read_ranks, together
from ddpdebug.schema.progress import Call, RankProgress
from ddpdebug.schema.wire import to_json

_WAITS = (Call(group="g", number=118, operation="all_reduce", location="train.py:41"),)


def write_box(run: Path, look: RankProgress, *, notes: int = 0, ended: str = "") -> black_box.BlackBox:
    """Write the black box of a rank, as this process."""
    folder = run / "ranks" / str(look.rank)
    folder.mkdir(parents=True, exist_ok=True)
    box = black_box.BlackBox(folder / black_box.NAME, Disk())
    for number in range(notes):
        box.note(f"all_reduce #{number + 1}")
    box.beat({**to_json(look), "ended": ended})
    return box


def _look(rank: int, **fields: object) -> RankProgress:
    return RankProgress(rank=rank, same=5.0, stack=("train.py:41 (main)",), **fields)  # type: ignore[arg-type]


def test_ranks_in_the_same_place_stand_together(tmp_path: Path) -> None:
    """Most first, so that the odd one is at the end."""
    for rank in (0, 1, 3):
        write_box(tmp_path, _look(rank, waits=_WAITS))
    write_box(tmp_path, _look(2, kind="sleep", place="train.py:33", does="time.sleep(9)"))
    groups = together(read_ranks(tmp_path, 4))
    assert [group.ranks for group in groups] == [(0, 1, 3), (2,)]
    assert groups[0].words == "waits in all_reduce #118 at train.py:41"
    assert "sleeps, at train.py:33" in groups[1].words
    assert {group.state for group in groups} == {LIVE}


def test_states(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that gives no sign, one that has ended, and one of another host are told apart."""
    write_box(tmp_path, _look(0))
    monkeypatch.setattr(black_box.time, "monotonic", lambda: 1.0)
    write_box(tmp_path, _look(1))
    monkeypatch.undo()
    write_box(tmp_path, _look(2), notes=3, ended="exception: KeyError: 'x'")
    with monkeypatch.context() as patch:
        patch.setattr(kernel, "host", lambda: "elsewhere")
        write_box(tmp_path, _look(3))
    ranks = read_ranks(tmp_path, 5, notes=2)
    assert {rank: one.state for rank, one in ranks.items()} == {0: LIVE, 1: SILENT, 2: DEAD, 3: ELSEWHERE}
    assert "KeyError" in ranks[2].words
    assert ranks[2].notes == ("all_reduce #2", "all_reduce #3")
    assert "no sign of life" in ranks[1].words


def test_what_is_no_black_box_is_not_waited_for(tmp_path: Path) -> None:
    """A pipe, a link, a device, another size, and a look that is none."""
    for rank in range(5):
        (tmp_path / "ranks" / str(rank)).mkdir(parents=True)
    os.mkfifo(tmp_path / "ranks" / "0" / black_box.NAME)
    write_box(tmp_path, _look(5))
    (tmp_path / "ranks" / "1" / black_box.NAME).symlink_to(tmp_path / "ranks" / "5" / black_box.NAME)
    (tmp_path / "ranks" / "2" / black_box.NAME).symlink_to("/dev/zero")
    (tmp_path / "ranks" / "3" / black_box.NAME).write_bytes(b"ddpdbbox" * 10)
    data = bytearray((tmp_path / "ranks" / "5" / black_box.NAME).read_bytes())
    data[256:] = os.urandom(len(data) - 256)
    (tmp_path / "ranks" / "4" / black_box.NAME).write_bytes(data)
    ranks = read_ranks(tmp_path, 6, notes=10)
    assert set(ranks) <= {4, 5}
    assert together(ranks)


def test_a_look_of_anybodys_is_cut(tmp_path: Path) -> None:
    """Texts, lists and numbers are bounded, and types are those that they must be."""
    box = write_box(tmp_path, _look(0))
    box.beat({"rank": 0, "place": "x" * 9000, "same": float("nan"), "stack": ["\x1b[2J<b>"] * 200, "waits": [{"a": 1}]})
    (one,) = read_ranks(tmp_path, 1).values()
    assert one.progress is not None
    assert len(one.progress.place or "") <= 400
    assert one.progress.same == 0.0
    assert len(one.progress.stack) <= 40
    assert one.progress.waits == ()


# --- a question -------------------------------------------------------------------------------------------------------


def test_a_rank_answers_once(tmp_path: Path) -> None:
    """With the frames of all its threads where these are asked for; the question goes when it was answered."""
    box = write_box(tmp_path, _look(0))
    answering = Asked(0, Disk())
    held = threading.Event()
    thread = threading.Thread(target=held.wait, name="a thread that waits", daemon=True)
    thread.start()
    with Asking(tmp_path, threads=True) as asking:
        assert (tmp_path / REQUEST).stat().st_mode & 0o077 == 0
        assert asking.answers({0}, 0.0) == {}
        answering.look(tmp_path, _look(0))
        (answer,) = asking.answers({0}, 5.0).values()
        (tmp_path / "ranks" / "0" / ANSWER).unlink()
        answering.look(tmp_path, _look(0))
        assert not (tmp_path / "ranks" / "0" / ANSWER).exists()
    held.set()
    thread.join()
    box.close()
    assert not (tmp_path / REQUEST).exists()
    (stack,) = (stack for name, stack in answer.threads.items() if name.startswith("a thread that waits"))
    assert any("wait" in frame for frame in stack)


@pytest.mark.parametrize("content", [b"", b"[]", b'{"id": 7}', b'{"id": ""}', b"x" * 5000, b"[" * 4000])
def test_what_is_no_question_is_not_answered(content: bytes, tmp_path: Path) -> None:
    """Nor waited for."""
    (tmp_path / "ranks" / "0").mkdir(parents=True)
    (tmp_path / REQUEST).write_bytes(content)
    Asked(0, Disk()).look(tmp_path, _look(0))
    assert not (tmp_path / "ranks" / "0" / ANSWER).exists()


def test_another_users_question_is_not_answered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor one through a link."""
    (tmp_path / "ranks" / "0").mkdir(parents=True)
    (tmp_path / REQUEST).write_text(json.dumps({"id": "a"}), encoding="utf-8")
    with monkeypatch.context() as patch:
        patch.setattr(asked.os, "getuid", lambda: tmp_path.stat().st_uid + 1)
        Asked(0, Disk()).look(tmp_path, _look(0))
    (tmp_path / REQUEST).rename(tmp_path / "other")
    (tmp_path / REQUEST).symlink_to(tmp_path / "other")
    Asked(0, Disk()).look(tmp_path, _look(0))
    assert not (tmp_path / "ranks" / "0" / ANSWER).exists()


def test_an_answer_of_anybodys(tmp_path: Path) -> None:
    """One to another question, of another rank, or of another form is none."""
    (tmp_path / "ranks" / "0").mkdir(parents=True)
    with Asking(tmp_path) as asking:
        name = json.loads((tmp_path / REQUEST).read_text(encoding="utf-8"))["id"]
        for value in (
            {"request": "x"},
            {"request": name, "rank": 1, "look": {"rank": 1}},
            {"request": name, "rank": 0},
        ):
            (tmp_path / "ranks" / "0" / ANSWER).write_text(json.dumps(value), encoding="utf-8")
            assert asking.answers({0}, 0.0) == {}
        good = {"request": name, "rank": 0, "look": {"rank": 0}}
        (tmp_path / "ranks" / "0" / ANSWER).write_text(json.dumps(good), encoding="utf-8")
        assert until(lambda: asking.answers({0}, 0.0))
