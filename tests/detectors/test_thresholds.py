"""The table of thresholds: complete, adjustable from every source, and wrong names are refused."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ddpdebug.config.settings import Config, to_flags
from ddpdebug.detectors.data.data906_repeated_batch import RepeatedBatch
from ddpdebug.detectors.hlth.hlth703_dead_units import DeadUnits
from ddpdebug.detectors.pages import pages
from ddpdebug.detectors.thresholds import assignments, readers, thresholds
from ddpdebug.errors import UsageError


@pytest.mark.smoke
def test_the_table_is_sorted_and_names_known_codes() -> None:
    """Every entry says what it is, where it comes from, and who uses it."""
    names = list(thresholds())
    assert names == sorted(set(names))
    for entry in thresholds().values():
        assert entry.meaning
        assert entry.source
        assert set(readers(entry.name)) <= pages().keys()
    assert readers("update_small") == ("HLTH705", "HLTH709")


def test_defaults_and_settings() -> None:
    """A rule reads its own default unless the run's settings have another value."""
    assert DeadUnits().dead_share == 0.6
    assert DeadUnits({"threshold": None}).dead_share == 0.6
    assert DeadUnits({"threshold": {"dead_share": 0.7}}).dead_share == 0.7
    assert DeadUnits({"threshold": {"clip_ratio": 0.7}}).dead_share == 0.6


def test_settings_without_thresholds_import_no_rules() -> None:
    """A job that adjusts nothing does not pay for the table when its settings are read."""
    code = """
import sys
from pathlib import Path
from ddpdebug.config.settings import Config
Config.load({}, {}, Path("/"))
print([name for name in sys.modules if name.startswith("ddpdebug.detectors.") and name.count(".") > 2])
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout == "[]\n"


@pytest.mark.parametrize(
    "given", [{"dead_share": 0.7, "clip_ratio": 2}, ["dead_share=0.7", "clip_ratio=2"], "dead_share=0.7, clip_ratio=2"]
)
def test_forms(given: Any) -> None:
    """A table, a list of texts and one text mean the same."""
    assert assignments(given) == {"dead_share": 0.7, "clip_ratio": 2.0}


def test_a_rule_judges_by_the_settings() -> None:
    """Eleven equal batches are nothing by default, and a finding where eleven are enough."""
    again = RepeatedBatch.silent_on[1]
    assert len(again) == 11
    for found, config in ((0, {}), (1, {"threshold": {"repeated_batch_steps": 11}})):
        rule = RepeatedBatch(config)
        assert sum(len(list(rule.detect(step))) for step in again) == found


def test_sources_are_merged(tmp_path: Path) -> None:
    """A threshold of the command line leaves the others of pyproject.toml in place."""
    (tmp_path / "pyproject.toml").write_text("[tool.ddpdebug.threshold]\ndead_share = 0.7\nclip_ratio = 3\n")
    config = Config.load({"threshold": ("clip_ratio=4",)}, {}, tmp_path, flags=True)
    assert config.threshold == {"dead_share": 0.7, "clip_ratio": 4.0}
    assert to_flags({"threshold": ("clip_ratio=4", "dead_share=1")}, "run") == [
        "--threshold=clip_ratio=4",
        "--threshold=dead_share=1",
    ]


@pytest.mark.parametrize(
    "given, words",
    [
        (("dead_shar=1",), ["--threshold", "no threshold 'dead_shar'", "did you mean dead_share"]),
        (("dead_share",), ["--threshold", "NAME=VALUE"]),
        (("dead_share=x",), ["NAME=VALUE"]),
        (("dead_share=inf",), ["NAME=VALUE"]),
        (("dead_share=nan",), ["NAME=VALUE"]),
    ],
)
def test_wrong_ones_are_refused(given: Any, words: list[str], tmp_path: Path) -> None:
    """With a near name, before anything runs."""
    with pytest.raises(UsageError) as error:
        Config.load({"threshold": given}, {}, tmp_path, flags=True)
    for word in words:
        assert word in str(error.value)
    assert sum(name in str(error.value) for name in thresholds()) < 8, "the list of all is long"
