"""Causes and remedies are shown in the order in which a finding speaks for them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ddpdebug.detectors.base import runbook
from ddpdebug.detectors.catalog import catalog
from ddpdebug.schema.finding import Finding, Severity
from ddpdebug.schema.likeliest import fitting, likeliest_first, untagged

_CAUSES = ("`data`: a", "`sqrt`, `float16`: b", "any", "`of its own`: c", "`later`: d", "`weight`: e")


def first(**fields: Any) -> list[str]:
    """Return the causes of a finding in their order, without tags."""
    finding = Finding(code="NUM301", severity=Severity.ERROR, title="data of its own", causes=_CAUSES, **fields)
    return [untagged(cause) for cause in likeliest_first(finding)[0]]


@pytest.mark.parametrize(
    "fields, expected",
    [
        ({}, "any"),  # what the title says, it says of each finding of the rule
        ({"phase": "data", "evidence": {"dtype": "float16"}}, "ab"),
        ({"evidence": {"operation": "SqrtBackward0"}}, "b"),
        ({"evidence": {"operation": "aten.sqrt.default"}}, "b"),
        ({"evidence": {"operands": [{"name": "x", "dtype": "float16"}]}}, "b"),
        ({"evidence": {"operands": [{"data": 3, "float16": 0}]}}, "a"),
        ({"evidence": {"of_its_own": 3}}, "c"),
        ({"evidence": {"weight": float("nan")}}, "e"),
        ({"evidence": {"of_its_own": 0}}, "any"),  # an entry that says nothing
        ({"evidence": {"observed": "by a rule of its own"}}, "c"),
        ({"evidence": {"by_phase": {"data": 0.3}}}, "any"),  # one of all phases, in a table
        ({"evidence": {"operation": "rsqrt"}}, "any"),
        ({"step": 0}, "any"),
        ({"step": 1}, "d"),
        ({"subject": ("head.weight",)}, "any"),
        ({"evidence": {"called_at": "/sqrt/train.py:3"}}, "any"),
        ({"evidence": {"operation": "aten.sqrt_.default"}}, "b"),
        ({"evidence": {"operation": "aten.sqrt.default", "backward_of": "PowBackward0"}}, "any"),
        ({"phase": "data", "evidence": {"of_its_own": 3}}, "ac"),
        ({"phase": "weight", "evidence": {"dtype": "float16"}}, "eb"),
    ],
)
def test_what_fits_comes_first(fields: dict[str, Any], expected: str) -> None:
    """By phase, evidence and step; then what fits always."""
    shown = first(**fields)
    assert "".join(shown).startswith(expected)
    assert sorted(shown) == sorted(map(untagged, _CAUSES))


def test_what_belongs_to_others_is_left_out_of_the_report() -> None:
    """But for a finding that nothing fits and of which nothing holds always."""
    finding = Finding(code="X", severity=Severity.ERROR, title="t", phase="data", causes=_CAUSES, actions=_CAUSES[:2])
    assert fitting(finding) == (["a", "any"], ["a"])
    nothing = replace(finding, phase=None, causes=_CAUSES[:2])
    assert fitting(nothing) == (["a", "b"], ["a", "b"])


def test_a_flipped_bit_says_more_than_the_phase() -> None:
    """It is what has changed the parameter, between two steps of the optimizer or within one."""
    causes = ("`optimizer`: a", "`flipped bits`: b")
    finding = Finding(code="RANK101", severity=Severity.ERROR, title="t", phase="optimizer", causes=causes)
    assert likeliest_first(finding)[0] == [*causes]
    flipped = replace(finding, evidence={"flipped_bits": [3]})
    assert likeliest_first(flipped)[0] == [*reversed(causes)]


def test_tags_of_remedies_are_those_of_causes() -> None:
    """A remedy whose tag no cause has would be shown below the cause of something else."""
    odd = {}
    for rule in catalog():
        prose = runbook(rule)
        tags, used = (
            {tag for text in prose[part] for tag in text[: len(text) - len(untagged(text))].split("`")[1::2]}
            for part in ("causes", "remedy")
        )
        if used - tags:
            odd[rule.code] = used - tags
    assert odd == {}
