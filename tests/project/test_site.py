"""The site of the documentation: no link leads nowhere, and people can read it from a disk, on a phone, in the dark."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from tests.support.browser import Browser

ROOT = Path(__file__).parent.parent.parent


def build(source: Path, site: Path) -> subprocess.CompletedProcess[str]:
    """Run what `make site` runs."""
    words = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "--quiet", "--conf-dir", str(ROOT / "docs")]
    return subprocess.run([*words, str(source), str(site)], capture_output=True, text=True, check=False)


class Page(HTMLParser):
    """What one page of the site names, refers to and loads."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids, self.links, self.loaded = set[str](), list[str](), list[str]()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = {name: value or "" for name, value in attrs}
        self.ids.add(found.get("id", ""))
        if tag == "a" and "href" in found:
            self.links.append(found["href"])
        elif tag != "a":
            self.loaded += [found[name] for name in ("src", "href") if name in found]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build it once."""
    made = tmp_path_factory.mktemp("site")
    done = build(ROOT, made)
    assert done.returncode == 0, done.stderr
    return made


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[Path, Page]:
    """Read all of its pages."""
    files = {file.resolve() for file in site.rglob("*.html")}
    return {file: Page(file.read_text(encoding="utf-8")) for file in files}


def test_what_leads_nowhere_is_an_error(tmp_path: Path) -> None:
    """A page, a file, an anchor here and on another page, and a page that nobody comes to."""
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "index.md").write_text(
        "# I\n## S\n- [other](other.md)\n\n[a](none.md) [b](../deploy/none.yml) [c](#none) [d](other.md#none)\n"
    )
    (tmp_path / "docs" / "other.md").write_text("# O\n")
    (tmp_path / "docs" / "lost.md").write_text("# L\n")
    done = build(tmp_path, tmp_path / "site")
    assert done.returncode != 0
    assert done.stderr.count("[myst.xref_missing]") == 4, done.stderr
    assert "lost.md" in done.stderr


@pytest.mark.slow
def test_every_page_of_the_repository_is_in_it(pages: dict[Path, Page], site: Path) -> None:
    """And each is reached from the first by following links."""
    texts = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), ROOT / "deploy" / "README.md"]
    wanted = {(site / text.relative_to(ROOT)).with_suffix(".html").resolve() for text in texts}
    assert len(wanted) > 80
    reached, todo = set[Path](), [site.resolve() / "index.html"]
    while todo:
        file = todo.pop()
        if file in reached or file not in pages:
            continue
        reached.add(file)
        todo += [(file.parent / unquote(urlsplit(link).path)).resolve() for link in pages[file].links]
    assert wanted <= reached


@pytest.mark.slow
def test_all_links_between_its_pages_lead_somewhere(pages: dict[Path, Page]) -> None:
    """Also those of the theme, and those to files of the repository."""
    for file, page in pages.items():
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or file.name == "search.html":
                continue
            other = (file.parent / unquote(parts.path)).resolve() if parts.path else file
            assert other.exists(), (file, link)
            assert not parts.fragment or unquote(parts.fragment) in pages[other].ids, (file, link)


@pytest.mark.slow
def test_nothing_is_loaded_from_elsewhere(pages: dict[Path, Page]) -> None:
    """So that it works from a disk and tells nobody who reads it."""
    assert [one for page in pages.values() for one in page.loaded if urlsplit(one).netloc] == []


@pytest.fixture
def browser(tmp_path: Path, need: Callable[[str], str]) -> Iterator[Browser]:
    """Start one."""
    found = Browser(need("chromium"), tmp_path / "profile")
    yield found
    found.close()


@pytest.mark.slow
def test_a_real_browser_shows_it_from_the_disk(site: Path, browser: Browser) -> None:
    """At the width of a desk and of a phone, bright and dark; the search finds pages without a server."""
    for width, dark in ((1280, False), (390, True)):
        browser.look(width, 844, dark=dark, phone=dark)
        for name in ("docs/index", "README", "docs/ci", "docs/findings"):
            browser.open((site / f"{name}.html").as_uri())
            assert browser.run("document.documentElement.scrollWidth") <= width, (name, width)
            shade = browser.run("getComputedStyle(document.body).backgroundColor")
            assert (max(map(int, re.findall(r"\d+", shade)[:3])) < 64) is dark, shade
    browser.open((site / "search.html").as_uri() + "?q=straggler")
    wanted = 'ul.search a[href="docs/runbooks/DdpdebugStraggler.html"]'
    complete = "document.querySelector('.search-summary')?.textContent.includes('found')"  # the list grows until then
    browser.run(f"new Promise(done => {{ const look = () => {complete} ? done() : setTimeout(look, 50); look() }})")
    assert browser.run(f"document.querySelectorAll(`{wanted}`).length") == 1
    assert browser.said == []
