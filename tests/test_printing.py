"""What is printed comes in order, to where stderr goes, and is never left in a buffer."""

from __future__ import annotations

import io
import os
import pty
import subprocess
import sys
import termios
from pathlib import Path

import pytest

from ddpdebug.printing import say

_SAYS = """
import sys
from ddpdebug.printing import say
sys.stderr = {stream}
{before}
say("ours é\\n")
print("theirs", file=sys.stderr, end="")
"""


def _run(target: str, *, stream: str = "sys.stderr", before: str = "") -> int:
    with open(target, "wb") as file:  # noqa: PTH123 - also a device
        code = _SAYS.format(stream=stream, before=before)
        return subprocess.run([sys.executable, "-c", code], stderr=file, check=False).returncode


def test_in_order(tmp_path: Path) -> None:
    """What the script has printed before stands before, also where its stream keeps it."""
    kept = "open(2, 'w', closefd=False, encoding='utf-8')"
    assert _run(str(tmp_path / "log"), stream=kept, before="print('before', file=sys.stderr)") == 0
    assert (tmp_path / "log").read_text("utf-8") == "before\nours é\ntheirs"


def test_an_encoding_that_lacks_a_character(tmp_path: Path) -> None:
    """It is written as an escape."""
    assert _run(str(tmp_path / "log"), stream="open(2, 'w', closefd=False, encoding='ascii')") == 0
    assert (tmp_path / "log").read_text("utf-8") == "ours \\xe9\ntheirs"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux has it")
def test_a_full_disk_changes_no_exit_status() -> None:
    """The interpreter's last flush finds nothing of ours."""
    for stream in ("sys.stderr", "open(2, 'w', closefd=False)"):
        assert _run("/dev/full", stream=stream, before="print = lambda *_, **__: None") == 0


@pytest.mark.parametrize("stream", ["None", "open(0, 'r')"])
def test_nowhere_to_print(stream: str, tmp_path: Path) -> None:
    """Where there is no stderr, or none that can be written, nothing happens."""
    assert _run(str(tmp_path / "log"), stream=stream, before="print = lambda *_, **__: None") == 0


def test_a_stream_in_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that a notebook or a test has put there gets it."""
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    say("ours\n")
    assert stream.getvalue() == "ours\n"


@pytest.mark.parametrize(
    ("before", "after"), [("", "ours é\n"), ("a\n", "a\nours é\n"), ("bar: 3%", "bar: 3%\nours é\n")]
)
def test_a_line_of_ours_begins_in_the_first_column_of_a_log(tmp_path: Path, before: str, after: str) -> None:
    """A progress bar ends no line before it is full."""
    assert _run(str(tmp_path / "log"), before=f"print({before!r}, end='', file=sys.stderr)") == 0
    assert (tmp_path / "log").read_text("utf-8") == f"{after}theirs"


def test_a_line_of_ours_begins_in_the_first_column_of_a_pipe() -> None:
    """Of a pipe nothing can be read; a bar of tqdm that is open is known."""
    tqdm = pytest.importorskip("tqdm").__name__
    before = f"import {tqdm}; bar = {tqdm}.tqdm(total=3)"
    code = _SAYS.format(stream="sys.stderr", before=before)
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False).stderr
    assert "\nours é\n" in told


_MOVED = """
import os, sys
from ddpdebug.printing import be_launched, file_of, say
be_launched(file_of(2))
sys.stderr = open("replaced", "w")
say("first\\n")
kept = os.dup(2)
os.dup2(os.open("own", os.O_CREAT | os.O_WRONLY), 2)
say("nowhere\\n")
os.dup2(1, 2)
say("nowhere\\n")
os.dup2(kept, 2)
say("last\\n")
"""


def test_what_the_script_puts_there_gets_nothing(tmp_path: Path) -> None:
    """What is said goes to where standard error led before, whatever the script puts in its place."""
    told = subprocess.run([sys.executable, "-c", _MOVED], capture_output=True, text=True, check=True, cwd=tmp_path)
    assert (told.stdout, told.stderr) == ("", "first\nlast\n")
    assert [(tmp_path / name).read_text() for name in ("own", "replaced")] == ["", ""]


_JOB = """
import os, signal, sys
from ddpdebug.printing import be_brief, say
{before}
be_brief()
for _ in range(40):
    say("x" * 5000 + "\\n")
{after}
os._exit(7)
"""


def test_nobody_reads() -> None:
    """A job goes on, and what was said first is there when somebody reads at last."""
    for before in ("", "signal.signal(signal.SIGPIPE, signal.SIG_DFL)"):
        reading, writing = os.pipe()
        done = subprocess.run(
            [sys.executable, "-c", _JOB.format(before=before, after="")], stderr=writing, check=False, timeout=60
        )
        os.close(writing)
        assert done.returncode == 7
        with open(reading, "rb") as file:  # noqa: PTH123 - a pipe
            assert 0 < len(file.read()) < 40 * 5000


def test_nobody_is_there_to_read() -> None:
    """SIGPIPE at its default would end the process; a signal that the script waits for is left to it."""
    reading, writing = os.pipe()
    os.close(reading)
    before = "signal.signal(signal.SIGPIPE, signal.SIG_DFL)"
    after = "assert not signal.sigpending() and not signal.pthread_sigmask(signal.SIG_BLOCK, ())"
    code = _JOB.format(before=before, after=after)
    assert subprocess.run([sys.executable, "-c", code], stderr=writing, check=False, timeout=60).returncode == 7
    os.close(writing)


def test_a_terminal_without_room_for_the_end_of_a_line() -> None:
    """It says that it has room, and takes nothing: a newline becomes two characters there."""
    code = _JOB.format(before="write = os.write\ndef full(*_):\n    raise BlockingIOError\nos.write = full", after="")
    leader, follower = pty.openpty()
    done = subprocess.run(
        [sys.executable, "-c", code.replace("range(40)", "range(2)")], stderr=follower, check=False, timeout=60
    )
    assert done.returncode == 7
    os.close(leader)
    os.close(follower)


def test_a_terminal_whose_foreground_is_another_job() -> None:
    """With `stty tostop` a write from the background stops who writes."""
    leader, follower = pty.openpty()
    attributes = termios.tcgetattr(follower)
    attributes[3] |= termios.TOSTOP
    termios.tcsetattr(follower, termios.TCSANOW, attributes)
    code = f"""
import fcntl, os, signal, subprocess, sys, termios
fcntl.ioctl(2, termios.TIOCSCTTY, 0)
job = subprocess.Popen([sys.executable, "-c", {_JOB.format(before="", after="")!r}], process_group=0)
status = os.waitpid(job.pid, os.WUNTRACED)[1]
if os.WIFSTOPPED(status):
    job.kill()
os._exit(3 if os.WIFSTOPPED(status) else os.waitstatus_to_exitcode(status))
"""
    done = subprocess.Popen([sys.executable, "-c", code], stderr=follower, start_new_session=True)
    assert done.wait(60) == 7
    os.close(leader)
    os.close(follower)
