"""Entries of `ignore`: what they cover, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ddpdebug.detectors.ignored import Ignored, entries, read
from ddpdebug.errors import UsageError
from ddpdebug.schema.finding import Finding, Severity

_FOUND = Finding(
    code="RANK104",
    severity=Severity.CRITICAL,
    title="settings differ",
    subject=("encoder.0.weight", "encoder.0.bias"),
    location="/home/me/project/train.py:88",
)


@pytest.mark.parametrize(
    "entry, covers",
    [
        ("RANK104", True),
        ("rank104 # meant so", True),
        ("RANK101", False),
        ("RANK104:encoder", True),  # a module, with all that is in it
        ("RANK104:encoder.0.*", True),
        ("RANK104:encoder.0.weight", False),  # the bias is another thing
        ("RANK104:enc", False),
        ("RANK104:train.py", True),
        ("RANK104:project/train.py:88", True),
        ("RANK104:train.py:8", False),
        ("RANK104:rain.py", False),
    ],
)
def test_what_an_entry_covers(entry: str, covers: bool) -> None:
    assert Ignored.parse(entry).covers(_FOUND) is covers


def test_what_a_finding_does_not_list_may_be_something_else() -> None:
    """Lists of names are cut; and names with brackets are given as they are shown."""
    entry = Ignored.parse("RANK104:encoder")
    assert not entry.covers(replace(_FOUND, subject=tuple(f"encoder.{n}" for n in range(20))))
    assert not entry.covers(replace(_FOUND, evidence={"parameters": 3}))
    assert entry.covers(replace(_FOUND, evidence={"parameters": 2}))
    shown = replace(_FOUND, subject=("param_groups[0].lr",))
    assert Ignored.parse("RANK104:param_groups[0].lr").covers(shown)
    assert not Ignored.parse("RANK104:param_groups[1].lr").covers(shown)


def test_forms() -> None:
    """A text, several in one, a list: each entry once, in one form, with its reason."""
    assert entries("rank104: encoder  #  each   its own\n") == ("RANK104:encoder # each its own",)
    assert entries("RANK104; RCP805 # evaluation; RANK104") == ("RANK104", "RCP805 # evaluation")
    assert entries(["RANK104 # a; b"]) == ("RANK104 # a; b",)
    assert [entry.reason for entry in read(["RANK104 # a", "NOSUCH9", 7, "?"])] == ["a"]
    assert read({"a": 1}) == ()


@pytest.mark.parametrize("wrong", ["", "RANK104:", "RANK104: # why", "104", "RANK104 encoder"])
def test_what_is_no_entry(wrong: str) -> None:
    with pytest.raises(ValueError):
        entries([wrong])


def test_a_code_that_is_none() -> None:
    with pytest.raises(UsageError, match=r"there is no finding 'RANK94'; did you mean .*RANK104"):
        entries(["RANK94"])
