"""`ddpdebug explain` knows every code."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ddpdebug import preflight
from ddpdebug.commands import main
from ddpdebug.detectors.pages import pages

_KNOWN = pages()


@pytest.mark.parametrize("code", _KNOWN)
def test_page(code: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Every code has a page with meaning, impact, diagnosis, causes and remedy, and says whether it is detected."""
    assert main(["explain", code.lower()]) == 0
    text = capsys.readouterr().out
    assert text.startswith(f"{code}  {_KNOWN[code].severity.label}  ")
    for section in ("meaning", "impact", "diagnosis", "causes", "remedy"):
        assert re.search(rf"^{section}\n  \S", text, re.MULTILINE), section
    assert ("not detected yet" in text) is not _KNOWN[code].detected
    assert ("found by `ddpdebug preflight`" in text) is (_KNOWN[code].found_by == "preflight")
    assert max(map(len, text.splitlines())) <= 110
    assert not re.search(r" $", text, re.MULTILINE)


def test_what_only_the_preflight_finds_is_found() -> None:
    """A batch that cannot be overfitted, and runs that part: no rule sees them while training."""
    promised = {code for code, page in _KNOWN.items() if page.found_by == "preflight"}
    assert {"RCP814", "RCP815", "DATA909"} <= promised
    sources = "".join(file.read_text(encoding="utf-8") for file in Path(preflight.__file__).parent.rglob("*.py"))
    assert promised <= set(re.findall(r'"([A-Z]+\d{3})"', sources))


def test_list(capsys: pytest.CaptureFixture[str]) -> None:
    """Without a code, all codes are listed with severity and title."""
    assert main(["explain"]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line]
    assert [line.split()[0] for line in lines] == list(_KNOWN)
    assert len(lines) >= 90


def test_unknown_code(capsys: pytest.CaptureFixture[str]) -> None:
    """A wrong code is an error with near matches."""
    assert main(["explain", "RNK101"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("ddpdebug: error: unknown code 'RNK101'; did you mean RANK101")
    assert err.count("\n") == 1


def test_explain_needs_no_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It works anywhere, whatever the settings there are."""
    (tmp_path / "pyproject.toml").write_text("[tool.ddpdebug]\nno_such = 1\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    assert main(["explain", "RANK101"]) == 0
