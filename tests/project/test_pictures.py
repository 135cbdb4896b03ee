"""The pictures of the documentation: few bytes, each is shown, and a terminal is drawn as it looks."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tools.pictures import LIMIT, PICTURES, draw

ROOT = Path(__file__).parent.parent.parent


def test_pictures_are_small_and_shown() -> None:
    """All together, since everybody who clones has them; README shows four at least, with words for who sees none."""
    files = {file.name: file.stat().st_size for file in PICTURES.iterdir()}
    assert sum(files.values()) <= LIMIT
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    shown = {page: re.findall(r"!\[([^\]]+)\]\([\w/]*pictures/([\w.-]+)\)", page.read_text("utf-8")) for page in pages}
    assert {name for found in shown.values() for _, name in found} == {*files}
    assert len({name for _, name in shown[ROOT / "README.md"]}) >= 4


def test_a_terminal_is_drawn_with_its_colours() -> None:
    """Without what moves the cursor and names the window; nothing of the machine stands in it."""
    printed = "\x1b]0;step 3\x07\x1b[?25lplain \x1b[31mred\x1b[0m <b> http://127.0.0.1:40113/metrics\r\n"
    svg = draw(printed, "title", "name")
    text = "".join(ElementTree.fromstring(svg).itertext()).replace("\xa0", " ")
    assert "plain " in text
    assert "red" in text
    assert "<b> http://127.0.0.1:9400/metrics" in text
    assert not re.search(r"step 3|\[31m|25l", text)
    red = re.search(r'class="name-(r\d+)"[^>]*>red<', svg)
    assert red
    assert re.search(rf"\.name-{red[1]} {{ fill: #[0-9a-f]{{6}}", svg)


@pytest.mark.parametrize("file", sorted(PICTURES.glob("*.svg")), ids=lambda file: file.name)
def test_drawings_load_nothing_and_name_no_folder(file: Path) -> None:
    """A host that shows them forbids both, and who looks at them need not know where they were made."""
    svg = file.read_text("utf-8")
    text = "".join(ElementTree.fromstring(svg).itertext())
    assert not re.search(r"url\((?!#)|href|@import|<script", svg)
    assert not re.search(r"/(tmp|home|root|work)/", text)
