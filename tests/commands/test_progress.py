"""The line on a terminal that says what takes so long."""

from __future__ import annotations

import io
import threading

import pytest

from ddpdebug.commands import _progress
from ddpdebug.commands._progress import progress


class Terminal(io.StringIO):
    """A terminal that waits for its first line."""

    def __init__(self, *, tty: bool) -> None:
        super().__init__()
        self._tty, self.wrote = tty, threading.Event()

    def isatty(self) -> bool:
        """Pretend."""
        return self._tty

    def write(self, text: str) -> int:
        """Remember that there was one."""
        done = super().write(text)
        self.wrote.set()
        return done


def test_what_takes_long_is_shown_and_wiped(monkeypatch: pytest.MonkeyPatch) -> None:
    """With what is done now."""
    terminal = Terminal(tty=True)
    monkeypatch.setattr("sys.stderr", terminal)
    monkeypatch.setattr(_progress, "_PATIENCE_SECONDS", 0.0)
    with progress("looking") as now:
        now("comparing")
        assert terminal.wrote.wait(60)
    assert "ddpdebug: " in terminal.getvalue()
    assert terminal.getvalue().endswith("\r\x1b[K")


@pytest.mark.parametrize(("tty", "patience"), [(False, 0.0), (True, 600.0)])
def test_what_is_quick_or_has_no_terminal_is_silent(
    tty: bool, patience: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A log has no line that is wiped."""
    terminal = Terminal(tty=tty)
    monkeypatch.setattr("sys.stderr", terminal)
    monkeypatch.setattr(_progress, "_PATIENCE_SECONDS", patience)
    with progress("looking") as now:
        now("comparing")
    assert terminal.getvalue() == ""
