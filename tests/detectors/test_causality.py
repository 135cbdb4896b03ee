"""The order of causes: every code has a place, explanations go downstream, and what does not has a reason."""

from __future__ import annotations

import tomllib
from importlib import resources

import pytest

from ddpdebug import detectors
from ddpdebug.detectors import causality
from ddpdebug.detectors.catalog import catalog

ORDER = causality.order()
CODES = [rule.code for rule in catalog()]
TABLES = tomllib.loads(resources.files(detectors).joinpath("causality.toml").read_text(encoding="utf-8"))


def test_every_code_has_one_place() -> None:
    """Each rule stands in one phase, and the file names no code that no rule has."""
    assert sorted(code for codes in ORDER.phases.values() for code in codes) == CODES


def test_what_explains_stands_upstream_or_in_the_same_phase() -> None:
    """A consequence comes after its causes, apart from what the file lists as going against the order."""
    for code, causes in ORDER.explained_by.items():
        assert code not in causes
        late = {cause for cause in causes - ORDER.against.get(code, set()) if ORDER.ranks[cause] > ORDER.ranks[code]}
        assert late == set(), code


def test_no_code_explains_itself_by_way_of_others() -> None:
    """Without what goes against the order, the relation has no circle."""
    left = {code: set(causes - ORDER.against.get(code, set())) for code, causes in ORDER.explained_by.items()}
    while first := [code for code, causes in left.items() if not causes & left.keys()]:
        for code in first:
            del left[code]
    assert left == {}


def test_exceptions_are_exceptions_and_have_a_reason() -> None:
    """What goes against the order could not stand in a row, and says why it holds."""
    for entry in TABLES["against"]:
        assert len(entry["reason"]) > 20
    for code, causes in ORDER.against.items():
        assert causes
        assert all(ORDER.ranks[cause] >= ORDER.ranks[code] for cause in causes), code


def test_an_upstream_rule_explains_what_is_broken_downstream() -> None:
    """What makes the ranks do different things explains every later comparison of what training made."""
    chain = ["RANK112", "SYNC202", "SYNC201", "RANK103", "RANK101", "RANK108"]
    for place, code in enumerate(chain):
        assert set(chain[:place]) <= ORDER.explained_by[code]
    health = [code for code in CODES if code.startswith("HLTH")]
    assert all(set(causality.group("broken")) <= ORDER.explained_by[code] for code in health)


def test_groups_and_unknown_names() -> None:
    """A name in a row must be known; a code without a row comes last and follows from nothing."""
    with pytest.raises(KeyError, match="nowhere"):
        causality.parse({"groups": {}, "against": [], "first": {"A1": ["nowhere"]}})
    assert causality.rank("TEST999") == len(ORDER.phases)
    assert causality.explained_by("TEST999") == frozenset()
