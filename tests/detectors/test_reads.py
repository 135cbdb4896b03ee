"""What a rule says that it reads is all that it reads: steps that do not show it change nothing in it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from ddpdebug.detectors.base import Detector, Facts
from ddpdebug.detectors.catalog import catalog
from ddpdebug.detectors.examples import step_at
from ddpdebug.detectors.kinds import ComparisonRule, Findings, Severity
from ddpdebug.diagnosis.engine import Diagnosis
from ddpdebug.schema.row import Flag, Row
from ddpdebug.schema.step import Signs, Step

#: The fields of a row of which nothing is known.
BLANK = {**{k: v for k, v in Row._field_defaults.items() if k not in {"rank", "step", "optimizer"}}, "flags": Flag(0)}
READING = [rule for rule in catalog() if rule.reads is not None or rule.of_several]


def sparse(start: int) -> Iterator[Step]:
    """Yield steps that hold what every step holds, and few of the other columns and flags."""
    for number, world in enumerate((1, 2, 4)):
        yield step_at(start + 2 * number, world=world, **BLANK)
        yield step_at(start + 2 * number + 1, world=world, **{**BLANK, "flags": Flag.SKIPPED, "loss": 1.0})


def memory(rule: Detector) -> str:
    """Return what a rule remembers."""
    return repr({name: value for name, value in vars(rule).items() if name.startswith("_")})


@pytest.mark.parametrize("kind", READING, ids=lambda kind: kind.code)
def test_a_step_without_what_a_rule_reads_means_nothing_to_it(kind: type[Detector]) -> None:
    """It finds nothing in it, wants no details of it and remembers nothing of it, unless it is awake."""
    signs = Signs(kind.reads or ())
    own = signs.of(kind.reads or (), differing=False)
    passed = 0
    for example in (*kind.fires_on, *kind.silent_on):
        rule = kind()
        steps = [replace(item, details={}) for item in example[:40] if not isinstance(item, Facts)]
        for step in (*steps, *sparse(40)):
            alone = kind.of_several and step.world == 1
            if not alone and (kind.reads is None or signs.shown(step) & own or rule.awake):
                list(rule.detect(step))
                continue
            before = memory(rule)
            assert not isinstance(rule, ComparisonRule) or not rule.rank_classes(step)
            assert not rule.suspects(step)
            assert list(rule.detect(step)) == []
            assert alone or memory(rule) == before
            passed += 1
    assert passed


def test_a_rule_is_given_the_steps_that_show_what_it_reads() -> None:
    """And no others, while it is not awake; one that does not say what it reads is given all."""
    given: list[tuple[str, int]] = []

    class Plain(Detector):
        code, severity, title = "TEST001", Severity.INFO, "a rule that looks at every step"

        def detect(self, step: Step) -> Findings:
            given.append((self.code, step.step))
            yield from ()

    class Reader(Plain):
        code, reads = "TEST002", (Flag.SKIPPED, "clip_norm")

        @property
        def awake(self) -> bool:
            return bool(given) and given[-1] == ("TEST002", 4)

    diagnosis = Diagnosis(world=1, detectors=[Plain(), Reader()])
    for number, more in enumerate(({}, {"flags": Flag.SKIPPED}, {"clip_norm": 1.0}, {}, {"clip_norm": 0.0}, {}, {})):
        diagnosis.feed(step_at(number, world=1, **{**BLANK, "loss": 1.0, **more}))
        diagnosis.tick()
    assert [step for code, step in given if code == "TEST001"] == [*range(7)]
    assert [step for code, step in given if code == "TEST002"] == [1, 2, 4, 5]
