"""Recorded paths: where a run leaves them, and by how much it may differ elsewhere."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ddpdebug.ci.golden import Comparison, Course, Moment, compare, load, recording

_EPSILON = 1e-7


def _course(steps: int = 4, *, noise: float = 0.0, platform: str = "here") -> Course:
    moments = [
        Moment(
            optimizer=0,
            step=step,
            loss=1.0 / (step + 1) + noise * step,
            grad_norm=0.5 + noise * step,
            params={name: (f"{name}{step}{noise}", 2.0 + step + noise * step) for name in ("a.weight", "a.bias")},
        )
        for step in range(steps)
    ]
    return Course(platform={"processor": platform}, epsilon=_EPSILON, moments=moments)


def _golden(tmp_path: Path, first: Course, second: Course, shaken: Course) -> Mapping[str, Any]:
    file = tmp_path / "golden.json"
    file.write_text(json.dumps(recording(first, second, shaken, 2)), encoding="utf-8")
    return load(file)


def _changed(course: Course, step: int, **fields: Any) -> Course:
    moments = [replace(m, **fields) if m.step == step else m for m in course.moments]
    return replace(course, moments=moments)


def _param(course: Course, step: int, name: str, value: tuple[str, float]) -> Course:
    return _changed(course, step, params={**course.moments[step].params, name: value})


def test_same_platform_is_compared_bit_by_bit(tmp_path: Path) -> None:
    """One changed bit is named by step and parameter, also where the norm is the same."""
    golden = _golden(tmp_path, _course(), _course(), _course(noise=1e-6))
    assert compare(golden, _course(), 2) == Comparison(steps=4, exact=True)
    found = compare(golden, _param(_course(), 2, "a.bias", ("x", 4.0)), 2)
    assert (found.step, found.parameter, found.what) == (2, "a.bias", "fingerprint")
    found = compare(golden, _changed(_course(), 1, loss=0.5000001), 2)
    assert (found.step, found.parameter, found.what) == (1, None, "loss")


def test_the_first_parameter_of_the_first_step_is_named(tmp_path: Path) -> None:
    """Later steps and later parameters follow from it."""
    golden = _golden(tmp_path, _course(), _course(), _course())
    wrong = _param(
        _param(_param(_course(), 1, "a.weight", ("x", 9.0)), 1, "a.bias", ("x", 9.0)), 3, "a.bias", ("x", 9.0)
    )
    found = compare(golden, wrong, 2)
    assert (found.step, found.parameter) == (1, "a.weight")


@pytest.mark.parametrize("factor, leaves", [(1.0, False), (3.9, False), (4.6, True), (100.0, True)])
def test_elsewhere_the_shaken_run_is_the_measure(factor: float, leaves: bool, tmp_path: Path) -> None:
    """On another platform a run may differ four times as much as the shaken one did, up to that step, and no more."""
    golden = _golden(tmp_path, _course(), _course(), _course(noise=1e-4))
    found = compare(golden, _course(noise=factor * 1e-4, platform="there"), 2)
    assert not found.exact
    assert (found.what is not None) is leaves


def test_another_number_of_ranks_is_another_platform(tmp_path: Path) -> None:
    """Bits are compared only where they must be equal."""
    golden = _golden(tmp_path, _course(), _course(), _course(noise=1e-4))
    assert not compare(golden, _course(), 4).exact


def test_a_script_that_does_not_repeat_itself(tmp_path: Path) -> None:
    """Two different runs of the same script are never compared bit by bit, and may differ as those did."""
    golden = _golden(tmp_path, _course(), _course(noise=1e-3), _course(noise=1e-6))
    assert golden["exact"] is False
    assert compare(golden, _course(noise=2e-3), 2).what is None
    assert compare(golden, _course(noise=2e-2), 2).what is not None


def test_rounding_is_allowed_even_where_shaking_shows_nothing(tmp_path: Path) -> None:
    """The bound is never below the rounding error of a sum."""
    golden = _golden(tmp_path, _course(), _course(), _course())
    assert compare(golden, _course(noise=_EPSILON / 4, platform="there"), 2).what is None


def test_other_parameters_and_no_steps(tmp_path: Path) -> None:
    """A model that has changed and a run without steps are no runs on the path."""
    golden = _golden(tmp_path, _course(), _course(), _course())
    found = compare(golden, _changed(_course(), 0, params={"b": ("x", 1.0)}), 2)
    assert found.what == "other parameters"
    assert compare(golden, _course(0), 2).what is not None
    nan = compare(golden, _changed(_course(), 3, loss=None), 2)
    assert (nan.what, nan.step) == ("loss", 3)


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", '{"version": 2}', '{"version": 1}', '{"version": 1, "platform": {}, "exact": true, "steps": [1]}'],
)
def test_damaged_files_are_refused(text: str, tmp_path: Path) -> None:
    """What is no golden file is said to be none."""
    (tmp_path / "g.json").write_text(text, encoding="utf-8")
    with pytest.raises(ValueError):
        load(tmp_path / "g.json")
