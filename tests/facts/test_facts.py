"""Facts of recorded runs: what a fault has changed shows first, and a shorter run of the same script shows nothing."""

from __future__ import annotations

import dataclasses
import json
import sys
from functools import cache
from pathlib import Path

import pytest

from ddpdebug.ci.golden_facts import CODE, hold_to
from ddpdebug.disk import Disk
from ddpdebug.errors import UsageError
from ddpdebug.facts.comparison import differences, facts_of, listed
from ddpdebug.facts.fact import Fact, Facts, about, how_much, how_often, over
from ddpdebug.run_directory.reader import FINDINGS, read_findings

sys.path.append(str(Path(__file__).parent.parent / "detection"))
import recorded_runs
from recorded_runs import Recording

_TOPIC_OF_END = {"end", "coverage"}


@cache
def _family(name: str) -> dict[tuple[str, bool], Recording]:
    return {one.name: one for one in recorded_runs.read(recorded_runs.FOLDER, name)}


def recorded(script: str, *, fault: bool) -> Recording:
    """Return a recording of the corpus."""
    return _family(recorded_runs.family(script))[script, fault]


def stopped(recording: Recording, steps: int) -> Recording:
    """Return the same run as if it had been stopped after so many steps."""
    count = next((i for i, row in enumerate(recording.rows) if row.step >= steps), len(recording.rows))

    def is_kept(line: dict[str, object]) -> bool:
        payload = line["payload"]
        assert isinstance(payload, dict)
        value = payload.get("value")
        step = payload.get("step", value.get("step") if isinstance(value, dict) else None)
        early = (
            isinstance(line["rows"], int) and line["rows"] <= count and not (isinstance(step, int) and step >= steps)
        )
        return early or payload.get("topic") in _TOPIC_OF_END

    lines = [line for line in recording.observations if is_kept(line)]
    return dataclasses.replace(recording, rows=recording.rows[:count], observations=lines)


def facts(recording: Recording, directory: Path) -> Facts:
    """Return the facts of a recording, laid out as a run directory."""
    directory.mkdir(exist_ok=True)
    recorded_runs.lay_out(recording, directory)
    return facts_of(directory)


@pytest.mark.parametrize(
    ("script", "contract", "words"),
    [
        ("rcp810_detach_between_encoder_and_decoder", 1, "encoder (4): moved by the optimizer was yes, now no"),
        ("rcp812_freezing_by_the_wrong_prefix", 1, "encoder (4): needs a gradient was yes, now no"),
        ("rcp804_encoder_unpickled_in_eval", 2, "in eval mode was never, now in each step"),
        ("rcp805_accuracy_of_the_training_set", 2, "lines that evaluate in train mode was 1, now 2"),
        ("data901_stream_not_split", 4, "that of another rank in the same step was rarely or never, now often"),
        ("data907_balancing_sampler_not_used", 4, "sampler was WeightedRandomSampler, now RandomSampler"),
        ("rcp809_window_not_divided", 5, "not weighted as one mean was never, now in each step"),
        ("rcp806_schedule_never_stepped", 5, "learning rate at step 16 was 0.04665, now 0.05"),
        ("sync204_hook_sums", 5, "reduced gradient as a multiple of the mean was 1, now 4"),
        ("rcp808_zero_grad_missing", 6, "gradients that are not its own, or a loss twice was never, now in"),
        ("sync211_group_of_the_node", 8, "ddp0: reduces over was all ranks, now 2 ranks"),
    ],
)
def test_a_fault_shows_against_its_clean_twin(script: str, contract: int, words: str, tmp_path: Path) -> None:
    """What was changed is said, under its contract; what stands before it in their order follows from it too."""
    clean = facts(recorded(script, fault=False), tmp_path / "clean")
    found = differences(clean, facts(recorded(script, fault=True), tmp_path / "fault"))
    assert [one.contract for one in found] == sorted(one.contract for one in found)
    assert (contract, True) in [(one.contract, words in one.words) for one in found], [one.words for one in found]


@pytest.mark.parametrize(
    "script", ["rcp806_schedule_never_stepped", "data902_set_epoch_missing", "sync203_unfrozen_after_wrap"]
)
def test_a_shorter_run_of_the_same_script_differs_in_nothing(script: str, tmp_path: Path) -> None:
    """Neither in what only a longer run comes to, nor in shares of steps."""
    whole = recorded(script, fault=False)
    short = stopped(whole, max(row.step for row in whole.rows) // 3)
    known, cut = facts(whole, tmp_path / "whole"), facts(short, tmp_path / "short")
    assert cut.steps < known.steps / 2
    assert differences(known, cut) == []
    assert differences(cut, known) == []


def test_the_file_holds_what_the_run_does(tmp_path: Path) -> None:
    """A file of facts is read as it was written, and is compared as the run is."""
    known = facts(recorded("rcp812_freezing_by_the_wrong_prefix", fault=False), tmp_path / "run")
    file = tmp_path / "facts.json"
    file.write_text(known.text(), encoding="utf-8")
    assert facts_of(file) == known
    assert len(file.read_text(encoding="utf-8").splitlines()) == len(known.facts) + 2
    lines = list(listed(known))
    assert lines[0] == "1. who moves"
    assert any(line.endswith("needs a gradient: yes") for line in lines)
    assert len(lines) < len(known.facts)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[]", "is no file of facts"),
        ("{", "is no file of facts"),
        ('{"version": 2, "world": 2, "steps": 3, "facts": []}', "is no file of facts of version 1"),
        ({"contract": 77}, "has facts that no run has"),
        ({"value": float("nan")}, "has facts that no run has"),
        ({"first": -3}, "has facts that no run has"),
        ({"within": 0.5}, "has facts that no run has"),
        ({"value": [1]}, "is no file of facts of version 1"),
    ],
)
def test_other_files_are_refused(content: str | dict[str, object], message: str, tmp_path: Path) -> None:
    """Nothing of a file is believed."""
    fact = {"contract": 1, "statement": "moves", "value": "yes", **(content if isinstance(content, dict) else {})}
    text = content if isinstance(content, str) else json.dumps({"version": 1, "world": 2, "steps": 3, "facts": [fact]})
    (tmp_path / "facts.json").write_text(text, encoding="utf-8")
    with pytest.raises(UsageError, match=message):
        facts_of(tmp_path / "facts.json")


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    """A folder without a run, a run without steps, a file that is not there."""
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match="not a run directory"):
        facts_of(tmp_path / "empty")
    with pytest.raises(UsageError, match="has recorded no steps"):
        facts(dataclasses.replace(recorded("rcp808_zero_grad_missing", fault=False), rows=[]), tmp_path / "none")
    with pytest.raises(UsageError, match="cannot be read"):
        facts_of(tmp_path / "gone.json")


def test_what_only_one_run_came_to_is_not_compared() -> None:
    """A value that shows at step 30 says nothing of a run of 20 steps; one that shows at 10 does."""
    flags = [(step, step == 30) for step in range(60)]
    (late,) = how_often(about(6, "", "is called"), flags)
    (never,) = how_often(about(6, "", "is called"), flags[:20])
    assert (late.value, late.first, never.value) == ("in some steps", 30, "never")
    assert differences(_of(late, 60), _of(never, 20)) == []
    early = dataclasses.replace(late, first=10)
    assert [one.words for one in differences(_of(early, 60), _of(never, 20))] == [
        "is called was in some steps, now never"
    ]


def test_values_are_folded_over_steps() -> None:
    """As they came first; more than a few are not told; few and many steps are told from each other with a gap."""
    (fact,) = over(about(5, "", "micro-batches"), enumerate([4, 4, 3, 4]))
    assert (fact.value, fact.first, fact.last) == ("4, then 3", 2, 3)
    (fact,) = over(about(5, "", "micro-batches"), enumerate(range(9)))
    assert (fact.value, fact.first) == ("changes all the time", 4)
    assert list(over(about(5, "", "nothing"), [])) == []
    shares = {20: "rarely or never", 3: "often"}
    for every, word in shares.items():
        (fact,) = how_much(about(4, "", "again"), ((step, step % every == every - 1) for step in range(90)))
        assert fact.value == word
    assert list(how_much(about(4, "", "again"), ((step, step % 5 == 4) for step in range(100)))) == []


def test_numbers_are_equal_within_their_factor_and_new_subjects_are_said() -> None:
    """A number that one run lacks is no difference: it is there where it could be measured."""
    norm = about(5, "", "norm", 1.0, within=4.0)
    assert differences(_of(norm), _of(dataclasses.replace(norm, value=3.9))) == []
    for value in (4.1, 0.2, -1.0, 0.0):
        assert len(differences(_of(norm), _of(dataclasses.replace(norm, value=value)))) == 1
    trains = [about(1, f"encoder.{name}", "needs a gradient", "yes") for name in ("a", "b")]
    (found,) = differences(_of(norm, 9, trains[0]), _of(trains[0], 9, trains[1]))
    assert found.words == "encoder.b: needs a gradient is new: yes"


def test_what_changes_alike_is_said_together() -> None:
    """By what the names of all have in common, also where not all of them are named."""
    names = [*(f"backbone.{i}" for i in range(30)), "head"]
    one, other = ([about(2, name, "mode", mode) for name in names] for mode in ("train", "eval"))
    (found,) = differences(_of(one[0], 9, *one[:30]), _of(other[0], 9, *other[:30]))
    assert found.words == "backbone (30): mode was train, now eval"
    (found,) = differences(_of(one[0], 9, *one), _of(other[0], 9, *other))
    assert found.words == "backbone.0 and 30 more: mode was train, now eval"


def test_the_finding_names_the_first_difference(tmp_path: Path) -> None:
    """It is added to the findings of the run, once, with all differences as evidence; a run that holds has a note."""
    clean, fault = (recorded("rcp810_encoder_under_no_grad", fault=fault) for fault in (False, True))
    golden = facts(clean, tmp_path / "good")
    assert "facts of the good run hold" in hold_to(golden, tmp_path / "good", Disk(None))
    assert not (tmp_path / "good" / FINDINGS).exists()
    facts(fault, tmp_path / "bad")
    assert hold_to(golden, tmp_path / "bad", Disk(None)) == ""
    (finding,) = read_findings(tmp_path / "bad")
    assert (finding.code, finding.severity.label, finding.phase) == (CODE, "error", "who moves")
    assert finding.subject[0].startswith("encoder.")
    assert finding.evidence["number"] == len(finding.evidence["differences"])
    assert "modules that train and run without gradients was none, now encoder" in finding.evidence["differences"]


def _of(fact: Fact, steps: int = 9, *more: Fact) -> Facts:
    return Facts(world=2, steps=steps, facts=(fact, *more))
