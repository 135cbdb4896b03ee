"""What is printed comes in order, to where stderr goes, and is never left in a buffer."""

from __future__ import annotations

import io
import subprocess
import sys
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
