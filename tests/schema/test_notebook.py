"""What a notebook shows of findings and of a monitor."""

from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path

import pytest

import ddpdebug
from ddpdebug.schema.finding import Finding, Severity

_EVIL = "</td><script>alert(1)</script>\x1b[31m\ud800&"


class _Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags, self.open = set[str](), list[str]()

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.tags.add(tag)
        if tag != "br":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def _tags(text: str) -> set[str]:
    parser = _Tags()
    parser.feed(text)
    parser.close()
    assert parser.open == []
    text.encode()
    return parser.tags


def test_a_finding_is_escaped_and_complete() -> None:
    """Whatever names the job has given, they are text; unknown fields have no row."""
    finding = Finding(
        code="RANK101",
        severity=Severity.ERROR,
        title=_EVIL,
        subject=(_EVIL,),
        location=f"{_EVIL}:7",
        evidence={_EVIL: _EVIL, "norm": float("nan")},
        causes=("because",),
        actions=("do this",),
    )
    text = finding._repr_html_()
    assert _tags(text) == {"details", "summary", "b", "table", "tr", "th", "td"}
    assert "because" in text
    assert "do this" in text
    assert "phase" not in text


def test_a_monitor_shows_what_it_watches(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The rank, what was looked at, and each finding."""
    found = [Finding(code="RANK101", severity=Severity.ERROR, title=_EVIL)]
    monkeypatch.setattr(ddpdebug.Monitor, "findings", property(lambda _: found))
    with ddpdebug.watch(metrics="off", quiet=True, out=tmp_path / "run") as monitor:
        text = monitor._repr_html_()
    assert _tags(text) >= {"div", "p", "details"}
    assert "watching rank 0 of 1" in text
    assert "RANK101" in text
    assert "ended" in monitor._repr_html_()
