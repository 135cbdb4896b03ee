"""Makes the pictures in docs/pictures/ from real runs of `demo/train.py`: `make pictures`.

Three runs are made: one in which a weight of rank 2 changes, one that is healthy, and one that still goes on. A
terminal is drawn from what a command really prints to one, colours included, but for the temporary folder and the
port; pages are photographed in chromium. Nothing is taken from Grafana.
"""

from __future__ import annotations

import argparse
import io
import os
import pty
import re
import shutil
import struct
import subprocess
import sys
import tempfile
import termios
import threading
from collections.abc import Sequence
from fcntl import ioctl
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import MONOKAI
from rich.text import Text

from tests.support.browser import Browser
from tests.support.machine import until

ROOT = Path(__file__).resolve().parent.parent
PICTURES = ROOT / "docs" / "pictures"
#: Columns and lines of the terminal.
COLUMNS, LINES = 100, 50
#: All pictures together may have so many bytes: they are cloned by everybody.
LIMIT = 600 << 10

# rich's own format loads a font from the network
_FORMAT = """\
<svg class="rich-terminal" viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg">
<style>
.{unique_id}-matrix {{ font-family: ui-monospace, Menlo, Consolas, "DejaVu Sans Mono", monospace;
  font-size: {char_height}px; line-height: {line_height}px; font-variant-east-asian: full-width; }}
.{unique_id}-title {{ font-size: 18px; font-weight: bold; font-family: sans-serif; }}
{styles}
</style>
<defs>
<clipPath id="{unique_id}-clip-terminal">
<rect x="0" y="0" width="{terminal_width}" height="{terminal_height}" />
</clipPath>
{lines}
</defs>
{chrome}
<g transform="translate({terminal_x}, {terminal_y})" clip-path="url(#{unique_id}-clip-terminal)">
{backgrounds}
<g class="{unique_id}-matrix">
{matrix}
</g>
</g>
</svg>
"""
#: The port is another one in each run.
_PORT = re.compile(r"127\.0\.0\.1:\d+")
_CONTROL = re.compile(r"\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)|\x1b\[[0-9;?]*[A-Za-ln-z]|\r")


def draw(printed: str, title: str, name: str) -> str:
    """Return an SVG of what was printed to a terminal; what moves the cursor or names the window is left out."""
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), color_system="truecolor", legacy_windows=False)
    console.print(
        Text.from_ansi(_PORT.sub("127.0.0.1:9400", _CONTROL.sub("", printed)).strip("\n")),
        overflow="fold",
        highlight=False,
    )
    svg = console.export_svg(title=title, theme=MONOKAI, code_format=_FORMAT, unique_id=name)
    return "\n".join(line.rstrip() for line in svg.splitlines()) + "\n"


class Terminal:
    """A command that runs in a terminal of its own, and what it has printed so far."""

    def __init__(self, words: Sequence[str], folder: Path) -> None:
        leader, follower = pty.openpty()
        ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", LINES, COLUMNS, 0, 0))
        environment = {
            **os.environ,
            "TERM": "xterm-256color",
            "COLORTERM": "truecolor",
            "USER": "demo",
            "OMP_NUM_THREADS": "1",
        }
        program = [sys.executable, "-m", "ddpdebug", *words]
        self.process = subprocess.Popen(  # noqa: S603 - our own words
            program,
            cwd=folder,
            env=environment,
            stdin=follower,
            stdout=follower,
            stderr=follower,
            start_new_session=True,
        )
        os.close(follower)
        self._leader, self._printed = leader, bytearray()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        try:
            while part := os.read(self._leader, 1 << 16):
                self._printed += part
        except OSError:  # nobody holds the other end any more
            pass
        os.close(self._leader)

    @property
    def printed(self) -> str:
        """What has been printed so far."""
        return self._printed.decode(errors="replace")

    def ended(self) -> str:
        """Wait for the end; return all that was printed."""
        self.process.wait()
        self._reader.join()
        return self.printed


def _run(folder: Path, name: str, ranks: int, *words: str) -> Terminal:
    shown = ["run", "--every-step", "--nproc-per-node", str(ranks), "--name", name, "--out", f"ddpdebug-runs/{name}"]
    return Terminal([*shown, "train.py", *words], folder)


def _photograph(folder: Path, address: str, file: Path, *, dark: bool, height: int) -> None:
    browser = Browser(shutil.which("chromium") or "chromium", folder / "profile")
    try:
        browser.look(1200, height, dark=dark)
        browser.open(address)
        browser.picture(file, whole=False)
    finally:
        browser.close()
        shutil.rmtree(folder / "profile", ignore_errors=True)


def make(folder: Path, pictures: Path) -> None:
    """Run the jobs in a folder, and write the pictures."""
    (folder / "LICENSE").symlink_to(ROOT / "LICENSE")
    (folder / "jobs").mkdir()
    shutil.copy(ROOT / "demo" / "train.py", folder / "jobs")
    jobs, runs = folder / "jobs", folder / "jobs" / "ddpdebug-runs"
    print("a run in which one weight of rank 2 changes", flush=True)
    changed = _run(jobs, "one-weight-changes", 4, "--steps", "60", "--break-weight", "30")
    until(lambda: "more about the finding" in changed.printed or changed.process.poll() is not None)
    top = Terminal(["top", "--once", "ddpdebug-runs/one-weight-changes"], jobs).ended()
    printed = changed.ended()
    print("a healthy run", flush=True)
    _run(jobs, "healthy", 2, "--steps", "30").ended()
    print("a run that goes on until its picture is taken", flush=True)
    alive = _run(jobs, "goes-on", 2, "--steps", "100000")
    until(lambda: "step   30" in alive.printed or alive.process.poll() is not None)

    pictures.mkdir(exist_ok=True)
    command = "ddpdebug run --every-step --nproc-per-node 4 train.py"
    (pictures / "finding.svg").write_text(draw(printed.replace(f"{jobs}/", ""), command, "finding"), encoding="utf-8")
    (pictures / "top.svg").write_text(draw(top, "ddpdebug top", "top"), encoding="utf-8")
    page = folder / "report.html"
    Terminal(["report", str(runs / "one-weight-changes"), "--output", str(page)], jobs).ended()
    _photograph(folder, page.as_uri(), pictures / "report.webp", dark=False, height=1200)
    hub = Terminal(["hub", "--port", "0", "--data", str(folder / "hub.sqlite"), "--watch", str(runs)], jobs)
    try:
        address = re.compile(r"http://127\.0\.0\.1:\d+")
        until(lambda: address.search(hub.printed) or hub.process.poll() is not None)
        found = address.search(hub.printed)
        assert found, hub.printed
        _photograph(folder, found[0], pictures / "hub.webp", dark=True, height=480)
    finally:
        for each in (alive, hub):
            each.process.terminate()
            each.ended()


def main() -> int:
    """Make all pictures; fail where they are larger than the limit."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    with tempfile.TemporaryDirectory(prefix="pictures") as folder:
        make(Path(folder), PICTURES)
    size = sum(file.stat().st_size for file in PICTURES.iterdir())
    print(f"docs/pictures: {size >> 10} KiB of {LIMIT >> 10}")
    return int(size > LIMIT)


if __name__ == "__main__":
    sys.exit(main())
