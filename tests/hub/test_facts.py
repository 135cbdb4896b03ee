"""What ran."""

from __future__ import annotations

from hypothesis import given, strategies as st

from ddpdebug.hub.facts import facts

_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=10,
)


def test_a_command_line_becomes_facts() -> None:
    """Options with their values, switches, words by their place, negative numbers as values; no secrets."""
    words = [
        "train.py",
        "--lr=0.1",
        "--amp",
        "--shift",
        "-1",
        "--token",
        "hf_abcdefghijklmnopqrst",
        "-v",
        "config.yaml",
    ]
    found = facts(
        {"command": words, "world": 8, "versions": {"torch": "2.13"}, "config": {"budget": 0.01, "out": None}}
    )
    assert found == {
        "script": "train.py", "--lr": "0.1", "--amp": "yes", "--shift": "-1", "--token": "***", "-v": "config.yaml",
        "ranks": "8", "torch": "2.13", "ddpdebug budget": "0.01",
    }  # fmt: skip
    assert facts({"command": ["a.py", "one", "--x"]}) == {"script": "a.py", "argument 1": "one", "--x": "yes"}


@given(st.dictionaries(st.sampled_from(["command", "world", "node", "place", "versions", "config", "owner"]), _JSON))
def test_any_document_has_facts(document: dict[str, object]) -> None:
    """A run directory may hold anything: texts on one line, and bounded."""
    found = facts(document)
    assert all(text.isprintable() and len(text) <= 200 for fact in found.items() for text in fact)
    assert len(found) <= 400
