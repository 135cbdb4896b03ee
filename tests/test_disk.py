"""The disk is the job's first: what is refused, what is cleaned up, who may read."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import resource
import stat
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from run_records import ENDED, FINDING, judged, started

from ddpdebug import disk as module
from ddpdebug.disk import Disk, Free, Kept, Volumes, mode_of
from ddpdebug.run_directory import reader as run_files
from ddpdebug.run_directory.writer import RunDirectory
from ddpdebug.sinks import FindingRaised, Saved, Trouble
from ddpdebug.sinks.fanout import Fanout

MIB, GIB = 1 << 20, 1 << 30


class Volume:
    """A file system whose room a test sets."""

    def __init__(self, free: int, total: int = 1 << 40, files: int | None = None) -> None:
        self.free, self.total, self.files = free, total, files

    def __call__(self, path: Path) -> Free:
        """Answer."""
        return Free(self.free, self.total, self.files)


@pytest.mark.parametrize(
    ("free", "total", "needed", "ranks", "size", "fits"),
    [
        (10 * GIB, 20 * GIB, 0, 1, GIB, True),
        (10 * GIB, 20 * GIB, 2 * GIB, 1, GIB, True),
        (10 * GIB, 20 * GIB, 2 * GIB + GIB // 2, 1, GIB, False),  # four checkpoints
        (10 * GIB, 20 * GIB, 0, 8, GIB, True),
        (8 * GIB, 20 * GIB, 0, 8, GIB, False),  # each of eight ranks may write as much
        (200 * MIB, GIB, 0, 1, 1, False),  # the floor
        (90 * GIB, 2000 * GIB, 0, 1, 30 * GIB, False),  # the share of the disk
        (90 * GIB, 200_000 * GIB, 0, 1, GIB, True),  # which is not the share of a whole data centre
        (440 * MIB, 440 * MIB, 128 * MIB, 2, 61 * MIB, False),  # the job that failed for a bundle
    ],
)
def test_what_is_large_leaves_several_checkpoints(
    tmp_path: Path, free: int, total: int, needed: int, ranks: int, size: int, fits: bool
) -> None:
    """By the size of model and state, of the disk, and by how many ranks write there."""
    disk = Disk(ranks=ranks, free=Volume(free, total))
    disk.needed = needed
    assert (disk.refusal(tmp_path, size, "bundles") is None) is fits
    assert disk.left_out == ({} if fits else {"bundles": 1})


def test_rows_stop_and_go_on_with_the_room(tmp_path: Path) -> None:
    """Not to and fro at the edge: they go on when there is twice the room."""
    volume = Volume(100 * MIB)
    disk = Disk(free=volume)
    disk.needed = 40 * MIB
    answers = []
    for free in (100, 81, 79, 81, 159, 161, 81):
        volume.free = free * MIB
        answers.append(disk.refusal(tmp_path, 100, "rows") is None)
    assert answers == [True, True, False, False, False, True, True]


def test_no_files_left_and_small_files_only(tmp_path: Path) -> None:
    """Inodes run out before bytes do, and `ulimit -f` ends a process that does not look."""
    assert "3 files left" in str(Disk(free=Volume(1 << 40, files=3)).refusal(tmp_path, 1, "rows"))
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5000, old[1]))
    try:
        assert "ulimit -f" in str(Disk(free=Volume(1 << 40)).refusal(tmp_path, 5001, "bundles"))
        assert Disk(free=Volume(1 << 40)).refusal(tmp_path, 5000, "bundles") is None
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)


def test_a_disk_that_does_not_answer_is_not_written(tmp_path: Path) -> None:
    """A mount that has gone."""

    def gone(path: Path) -> Free:
        raise OSError(errno.ESTALE, "Stale file handle")

    assert "Stale" in str(Disk(free=gone).refusal(tmp_path, 1, "rows"))


def test_memory_is_not_disk() -> None:
    """A file system in memory has no more room than there is memory."""
    if not Path("/dev/shm").is_dir():
        pytest.skip("no file system in memory")
    lines = Path("/proc/meminfo").read_text().splitlines()
    total = next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemTotal:"))
    volumes = Volumes()
    assert volumes.in_memory(Path("/dev/shm"))
    assert not volumes.in_memory(Path("/proc"))
    assert 0 <= volumes(Path("/dev/shm/not/there")).bytes <= total


def test_the_control_group_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it has left of its memory is all that a file system in memory has."""
    if not Path("/dev/shm").is_dir():
        pytest.skip("no file system in memory")
    monkeypatch.setattr(module, "_group_memory", lambda: [12345])
    assert Volumes()(Path("/dev/shm")).bytes == min(12345, os.statvfs("/dev/shm").f_bavail * 4096)
    assert Volumes()(Path("/proc/self")).bytes == 0


# --- what was begun is not left ---------------------------------------------------------------------------------------


@pytest.fixture
def filling(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Let only so many bytes be written, in all files together."""
    room = {"bytes": 1 << 40}
    write = os.write

    def limited(descriptor: int, data: Any) -> int:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            return write(descriptor, data)
        taken = bytes(data)[: max(0, room["bytes"])]
        if data and not taken:
            raise OSError(errno.ENOSPC, "No space left on device")
        room["bytes"] -= len(taken)
        return write(descriptor, taken)

    monkeypatch.setattr(os, "write", limited)
    return room


@pytest.mark.parametrize("how", ["append", "write", "replace"])
def test_a_write_that_fails_leaves_nothing(tmp_path: Path, filling: dict[str, int], how: str) -> None:
    """No half of a line, no temporary file."""
    disk, file = Disk(), tmp_path / "file"
    if how != "write":
        disk.append(file, b"old\n")
    filling["bytes"] = 10
    with pytest.raises(OSError, match="No space"):
        getattr(disk, how)(file, [b"x" * 100] if how == "replace" else b"x" * 100)
    assert [path.name for path in tmp_path.iterdir()] == ([] if how == "write" else ["file"])
    assert how == "write" or file.read_bytes() == b"old\n"


def test_a_full_disk_ends_the_rows_and_not_the_findings(tmp_path: Path, filling: dict[str, int]) -> None:
    """What is tiny finds the room of the ballast; what stopped is said once and counted in run.json."""
    told: list[Trouble] = []
    sink = RunDirectory(tmp_path, 0, tell=told.append)
    sink.write(started(tmp_path))
    sink.write(judged(0))
    filling["bytes"] = 700  # of the next step's 1,296 bytes
    unlink = Path.unlink

    def give_back(path: Path, *, missing_ok: bool = False) -> None:
        filling["bytes"] += path.stat().st_size if path.exists() else 0
        unlink(path, missing_ok=missing_ok)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "unlink", give_back)
        for step in (1, 2, 3):
            sink.write(judged(step))
        sink.write(Saved(kind="fact", payload={"rank": 1, "topic": "structure:0", "value": "v" * 900}))
        sink.write(FindingRaised(finding=replace(FINDING, evidence={"text": "e" * 1000})))
        sink.write(ENDED)
    sink.close()
    assert [trouble.part for trouble in told] == ["sink:run_directory rows", "sink:run_directory observations"]
    assert "No space left" in told[0].message
    assert [row.step for row in run_files.read_rows(tmp_path)] == [0, 0]
    assert len(run_files.read_findings(tmp_path)) == 1
    outcome = run_files.read_run(tmp_path)["outcome"]
    assert outcome["not_written"] == {"rows": 3, "observations": 1}
    assert run_files.read_outcomes(tmp_path)[0]["reason"] == "finished"
    assert sorted(path.name for path in tmp_path.rglob(".*")) == []


def test_a_disk_without_any_room_raises_nothing(tmp_path: Path, filling: dict[str, int]) -> None:
    """Not even a finding: the fan-out keeps the other sinks, and each loss is said once."""
    heard: list[Any] = []

    class Listening:
        def write(self, record: Any) -> None:
            heard.append(record)

    fanout = Fanout(())
    fanout.add([RunDirectory(tmp_path, 0, tell=fanout.write), Listening()])
    fanout.write(started(tmp_path))
    (tmp_path / "ranks/0/.ballast").unlink()
    filling["bytes"] = 0
    for step in range(5):
        fanout.write(judged(step))
        fanout.write(FindingRaised(finding=replace(FINDING, step=step, id=f"RANK101-{step}")))
    filling["bytes"] = 1 << 20  # somebody has made room
    fanout.write(ENDED)
    fanout.close()
    troubles = [record.part for record in heard if isinstance(record, Trouble)]
    assert troubles == ["sink:run_directory rows", "sink:run_directory findings"]
    assert [finding.step for finding in run_files.read_findings(tmp_path)] == list(range(5))


def test_rows_that_were_left_to_the_job_are_a_gap(tmp_path: Path) -> None:
    """The numbers of the rows go on where there is room again."""
    volume = Volume(GIB)
    sink = RunDirectory(tmp_path, 0, disk=Disk(free=volume))
    sink.write(started(tmp_path))
    for step, free in enumerate((GIB, GIB, MIB, MIB, GIB)):
        volume.free = free
        sink.write(judged(step))
    volume.free = MIB
    sink.write(Saved(kind="fact", payload={"rank": 1, "topic": "end", "value": {"reason": "finished", "steps": {}}}))
    sink.write(ENDED)
    sink.close()
    assert [step.step for step in run_files.read_steps(tmp_path)] == [0, 1, 4]
    assert [number for number, _ in run_files.numbered_rows(tmp_path)] == [0, 1, 2, 3, 8, 9]
    assert list(run_files.read_ends(tmp_path)) == [1]


# --- who may read -----------------------------------------------------------------------------------------------------


def _modes(folder: Path) -> set[tuple[str, int]]:
    return {("d" if path.is_dir() else "f", stat.S_IMODE(path.stat().st_mode)) for path in folder.rglob("*")}


@pytest.mark.parametrize(
    ("setting", "umask", "file", "folder"),
    [
        ("private", 0o022, 0o600, 0o700),
        ("private", 0, 0o600, 0o700),
        ("umask", 0o022, 0o644, 0o755),
        ("umask", 0o077, 0o600, 0o700),
        ("0640", 0o077, 0o640, 0o750),
        ("644", 0o077, 0o644, 0o755),
    ],
)
def test_the_files_of_a_run_are_private(tmp_path: Path, setting: str, umask: int, file: int, folder: int) -> None:
    """Unless told otherwise, whatever the umask."""
    old = os.umask(umask)
    try:
        for _ in range(2):  # the second one sets the first aside
            sink = RunDirectory(tmp_path / "runs" / "r", 0, disk=Disk(mode_of(setting)))
            for record in (started(tmp_path), judged(0), Saved(kind="fact"), FindingRaised(finding=FINDING)):
                sink.write(record)
            sink.write(Trouble(part="x", message="y"))
            sink.write(ENDED)
            sink.close()
    finally:
        os.umask(old)
    assert _modes(tmp_path / "runs") == {("f", file), ("d", folder)}


@pytest.mark.parametrize("setting", ["", "rw", "0100", "0400", "0700", "0666x", "1666", "-600", "0o888"])
def test_a_mode_that_cannot_be(setting: str) -> None:
    """The owner reads and writes, and nothing is executable."""
    with pytest.raises(ValueError, match=r".*"):
        mode_of(setting)


def test_links_are_not_written_through(tmp_path: Path) -> None:
    """Somebody else may have laid them in a shared folder."""
    victim = tmp_path / "victim"
    victim.write_text("mine")
    run = tmp_path / "run"
    run.mkdir()
    (run / "findings.jsonl").symlink_to(victim)
    for how in (Disk().append, Disk().write):
        with pytest.raises(OSError, match="symbolic"):
            how(run / "findings.jsonl", b"theirs")
    Disk().replace(run / "findings.jsonl", [b"ours"])  # takes the place of the link
    assert victim.read_text() == "mine"
    (run / "ranks").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere").mkdir()
    with pytest.raises(OSError, match="is a link"):
        Disk().make_directory(run / "ranks" / "0", below=run)
    os.mkfifo(run / "fifo")
    with pytest.raises(OSError, match=r"No such device|no regular file"):
        Disk().append(run / "fifo", b"x")


# --- a real disk ------------------------------------------------------------------------------------------------------


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """Mount a file system of 2 MiB and 64 files."""
    place = tmp_path / "small"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=2m,nr_inodes=64", "tmpfs", str(place)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("needs to mount a file system")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


def test_on_a_small_file_system_only_what_is_tiny_is_written(small: Path) -> None:
    """The job's file fits afterwards as it does without us."""
    sink = RunDirectory(small / "run", 0)
    sink.write(started(small))
    for step in range(50):
        sink.write(judged(step))
    sink.write(FindingRaised(finding=FINDING))
    (small / "checkpoint").write_bytes(bytes(int(1.8 * MIB)))
    sink.write(ENDED)
    sink.close()
    outcome = run_files.read_run(small / "run")["outcome"]
    assert outcome["not_written"] == {"rows": 50}
    assert outcome["findings"] == {"critical": 1}


def test_on_a_full_file_system_findings_and_the_end_are_written(small: Path) -> None:
    """The job has filled it to the last byte: the ballast makes the room."""
    sink = RunDirectory(small / "run", 0)
    sink.write(started(small))
    with pytest.raises(OSError, match="No space"):
        (small / "checkpoint").write_bytes(bytes(3 * MIB))
    assert os.statvfs(small).f_bavail == 0
    sink.write(FindingRaised(finding=FINDING))
    sink.write(ENDED)
    sink.close()
    assert run_files.read_run(small / "run")["outcome"]["reason"] == "finished"
    assert len(run_files.read_findings(small / "run")) == 1
    assert run_files.read_outcomes(small / "run")[0]["exit_code"] == 0


def test_a_kept_descriptor_is_left_to_whoever_has_its_number(tmp_path: Path) -> None:
    """It is neither written to nor closed once it leads elsewhere."""
    ours, theirs = (os.open(tmp_path / name, os.O_CREAT | os.O_WRONLY) for name in ("ours", "theirs"))
    number = fcntl.fcntl(ours, fcntl.F_DUPFD, 200)  # far from the lowest that is free, which is the next to be taken
    kept = Kept(number)
    assert kept.write(b"one")
    os.close(number)
    assert not kept.write(b"two")
    os.dup2(theirs, number)
    assert not kept.write(b"three")
    kept.close()
    os.write(number, b"theirs")
    for one in (number, ours, theirs):
        os.close(one)
    assert [(tmp_path / name).read_bytes() for name in ("ours", "theirs")] == [b"one", b"theirs"]


def test_a_run_directory_that_is_new_ignores_itself(tmp_path: Path) -> None:
    """One that was there before is the user's."""
    (tmp_path / "old").mkdir()
    for name in ("old", "new"):
        Disk().begin(tmp_path / name)
    assert [path.name for path in tmp_path.rglob(".gitignore")] == [".gitignore"]
    assert (tmp_path / "new" / ".gitignore").read_text() == "*\n"


def test_nothing_is_written_where_the_run_directory_was(tmp_path: Path) -> None:
    """It is gone, or another one has its place, as after `os.chroot`."""
    disk, home = Disk(), tmp_path / "run"
    disk.begin(home)
    disk.append(home / "file", b"one")
    home.rename(tmp_path / "moved")
    for _ in range(2):
        for act in (
            lambda: disk.append(home / "file", b"two"),
            lambda: disk.make_directory(home / "bundles" / "one", below=home),
            lambda: disk.begin(home),
        ):
            with pytest.raises(FileNotFoundError, match="is gone"):
                act()
        assert not home.exists() or not list(home.iterdir())
        home.mkdir(exist_ok=True)
    disk.write(tmp_path / "elsewhere", b"fine")


def test_what_stays_open_leaves_the_lowest_numbers_to_the_script(tmp_path: Path) -> None:
    """It leads to the same file, and no child inherits it."""
    low = os.open(tmp_path / "file", os.O_CREAT | os.O_RDWR)
    high = module.moved_up(low)
    own = (tmp_path / "file").stat().st_ino
    try:
        with contextlib.suppress(OSError):  # it is closed, unless another thread of this process has it by now
            assert os.fstat(low).st_ino != own
        assert high >= module._FIRST
        assert os.fstat(high).st_ino == own
        assert not os.get_inheritable(high)
    finally:
        os.close(high)


def test_under_a_low_limit_it_stays_where_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And open."""
    monkeypatch.setattr(module, "_FIRST", resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    descriptor = os.open(tmp_path / "file", os.O_CREAT | os.O_RDWR)
    assert module.moved_up(descriptor) == descriptor
    os.close(descriptor)
