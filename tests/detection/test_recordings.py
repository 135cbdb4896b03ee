"""A recording judged offline gives the findings of its live run, and stands in for it in the score."""

from __future__ import annotations

import json
import lzma
import math
import os
import subprocess
import sys
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

from ddpdebug.detectors.examples import step_at
from ddpdebug.schema.finding import Finding, Severity
from ddpdebug.schema.row import Row

sys.path.append(str(Path(__file__).resolve().parent))
import recorded_runs
import score
from recorded_runs import Recording

_SCORE = Path(__file__).with_name("score.py")
_CORPUS = Path(__file__).resolve().parent.parent / "corpus"
_FAMILIES = sorted({recorded_runs.family(path.stem) for path in _CORPUS.glob("*.py")})
_CAUSES = tomllib.loads(Path(__file__).with_name("causes.toml").read_text())
#: A fault that needs details of a step, and one that a rank announces.
_LIVE = ("num301_row_of_padding", "rcp819_hand_written_huber")


@pytest.mark.smoke  # `make recorded` is the same
@pytest.mark.parametrize("family", _FAMILIES)
def test_recordings_are_judged_as_their_runs_were(family: str) -> None:
    """By the rules of today, and rightly; where a rule was changed on purpose, `--recorded --accept` says so."""
    found = [one for one in recorded_runs.read(recorded_runs.FOLDER, family, _CORPUS) if not one.stale]
    assert found, "no run of this family has a recording of today: make recordings"
    otherwise, wrong, misled = {}, {}, {}
    for one in found:
        findings = recorded_runs.judge(one)
        before, now = ([*map(recorded_runs.decided, judged)] for judged in (one.findings, findings))
        if before != now:
            otherwise[one.name] = (before, now)
        case = score.load(_CORPUS / f"{one.script}.py")
        result = score.Result(case, one.fault, findings, seconds=0.0)
        result.judge()
        if result.problems:
            wrong[one.name] = result.problems
        shown = [finding.causes[0] for finding in findings if finding.code in case.codes and finding.causes]
        if one.fault and not any(_CAUSES.get(one.script, "") in cause for cause in shown):
            misled[one.script] = shown
        for finding in findings:  # they agreed before they parted
            assert finding.evidence.get("agreed_after_step", -1) < (finding.step or 0), (one.name, finding)
    assert otherwise == {}
    assert wrong == {}
    assert misled == {}


def test_recordings_stay_small() -> None:
    """All families together: git keeps each version of them."""
    assert sum(file.stat().st_size for file in recorded_runs.FOLDER.iterdir()) <= 8 << 20


@pytest.mark.smoke
@pytest.mark.jobs
def test_a_live_run_and_its_recording_have_the_same_findings(tmp_path: Path) -> None:
    """The whole of each finding, in order, also after the recording was written and read."""
    code = (
        "import sys\nfrom pathlib import Path\n"
        "sys.path.insert(0, sys.argv[1])\nimport score, recorded_runs\nscore.zygote.preload()\n"
        "for name in sys.argv[3:]:\n"
        "    case = score.load(score._CORPUS / f'{name}.py')\n"
        "    results = [score.run(case, fault=fault, launch=False, record=True) for fault in (True, False)]\n"
        "    assert all(result.recording for result in results), [result.problems for result in results]\n"
        "    recorded_runs.write(Path(sys.argv[2]), [result.recording for result in results])\n"
    )
    words = [sys.executable, "-c", code, str(_SCORE.parent), str(tmp_path), *_LIVE]
    subprocess.run(words, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    back = recorded_runs.read(tmp_path, scripts=_CORPUS)
    assert {one.name for one in back} == {(name, fault) for name in _LIVE for fault in (True, False)}
    assert not any(one.stale for one in back)
    for one in back:
        assert [*map(_whole, recorded_runs.judge(one))] == [*map(_whole, one.findings)], one.name
    assert all(one.findings for one in back if one.fault)
    texts = [lzma.decompress(file.read_bytes()) for file in tmp_path.glob("*.jsonl.xz")]
    assert not any(str(_CORPUS.parent).encode() in text for text in texts)


def _whole(finding: Finding) -> Finding:
    """Return a finding without its prose and its time."""
    again = Finding.from_json(finding.to_json())
    return replace(again, causes=(), actions=(), time=None)


def recording(script: Path, *, fault: bool = False, steps: int = 3, **odd: object) -> Recording:
    """Return a recording of two healthy ranks."""
    rows = [row for number in range(steps) for row in step_at(number, world=2, **odd).rows.values()]
    run = {"run": "r1", "world": 2, "config": {}, "versions": {}, "outcome": {"reason": "finished"}}
    told = [{"rows": 0, "kind": "fact", "payload": {"rank": 0, "topic": "place", "value": {"node": "a\u2028b"}}}]
    return Recording(script.stem, fault, recorded_runs.source_of(script), run, told, rows, [])


def script(folder: Path, name: str) -> Path:
    """Write a script."""
    path = folder / f"{name}.py"
    path.write_text("# title: x\n# nproc: 2\n# expect.codes: none\n")
    return path


def test_rows_come_back_from_an_archive(tmp_path: Path) -> None:
    """All bits of digests and numbers, whatever is not known, and times to a microsecond."""
    values = {"grads_digest": (1 << 64) - 1, "loss": 0.1, "step_seconds": 0.0123456789, "host_bytes": -1}
    one = recording(script(tmp_path, "num_a"), **values)
    recorded_runs.write(tmp_path / "recorded", [one])
    (back,) = recorded_runs.read(tmp_path / "recorded")
    for before, now in zip(one.rows, back.rows, strict=True):
        times = {field for field in Row._fields if field.endswith("_seconds")}
        assert repr([getattr(before, field) for field in Row._fields if field not in times]) == repr(
            [getattr(now, field) for field in Row._fields if field not in times]
        )
        assert now.step_seconds == pytest.approx(0.012346, abs=1e-12)
        assert math.isnan(before.copy_seconds)
        assert math.isnan(now.copy_seconds)
    assert replace(back, rows=[]) == replace(one, rows=[])


def test_one_script_is_recorded_again(tmp_path: Path) -> None:
    """The other runs of its family stay, and so do the files of other families."""
    scripts = [script(tmp_path, name) for name in ("num_a", "num_b", "mem_a")]
    folder = tmp_path / "recorded"
    recorded_runs.write(folder, [recording(path) for path in scripts])
    before = {file.name: file.read_bytes() for file in folder.iterdir()}
    recorded_runs.write(folder, [recording(scripts[1], steps=5)])
    after = {file.name: file.read_bytes() for file in folder.iterdir()}
    assert before.keys() == after.keys()
    assert {name for name in before if before[name] != after[name]} == {"num.jsonl.xz", "num.rows.xz"}
    assert {one.script: len(one.rows) for one in recorded_runs.read(folder)} == {"mem_a": 6, "num_a": 6, "num_b": 10}


def test_a_recording_is_stale_when_its_script_or_the_rows_have_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new field of rows is not known in it; one that is gone may be what was looked at."""
    changed, gone, kept = (script(tmp_path, name) for name in ("num_a", "num_b", "num_c"))
    recorded_runs.write(tmp_path / "recorded", [recording(path) for path in (changed, gone, kept)])
    changed.write_text("# title: y\n")
    gone.unlink()

    def stale() -> dict[str, str]:
        return {one.script: one.stale for one in recorded_runs.read(tmp_path / "recorded", scripts=tmp_path)}

    assert stale() == {"num_a": "the script has changed", "num_b": "the script is gone", "num_c": ""}
    about, *runs = lzma.decompress((tmp_path / "recorded" / "num.jsonl.xz").read_bytes()).splitlines()
    told = json.loads(about)
    told["fields"]["old_digest"] = told["fields"].pop("class_3_params")
    (tmp_path / "recorded" / "num.jsonl.xz").write_bytes(lzma.compress(b"\n".join([json.dumps(told).encode(), *runs])))
    assert stale()["num_c"] == "rows have no old_digest any more"
    del told["fields"]["old_digest"]
    (tmp_path / "recorded" / "num.jsonl.xz").write_bytes(lzma.compress(b"\n".join([json.dumps(told).encode(), *runs])))
    assert stale()["num_c"] == ""
    (one,) = (one for one in recorded_runs.read(tmp_path / "recorded", scripts=tmp_path) if not one.stale)
    assert {row.class_3_params for row in one.rows} == {0}
    assert recorded_runs.judge(one) == []


def test_recordings_stand_in_for_their_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A rule that raises a false alarm fails the score, and what was not judged is named."""
    names = ("num_quiet", "num_loud", "num_new", "num_changed")
    quiet, loud, _, changed = (script(tmp_path, name) for name in names)
    monkeypatch.setattr(recorded_runs, "FOLDER", tmp_path / "recorded")
    monkeypatch.setattr(score, "_CORPUS", tmp_path)
    recorded_runs.write(recorded_runs.FOLDER, [recording(path) for path in (quiet, loud, changed)])
    changed.write_text(changed.read_text() + "\n")
    alarm = Finding(code="NUM301", severity=Severity.ERROR, title="t", step=1, ranks=(0,))
    monkeypatch.setattr(recorded_runs, "judge", lambda one: [alarm] if one.script == "num_loud" else [])

    def scored(*words: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["score.py", "--recorded", *words])
        return score.main(), capsys.readouterr().out

    status, out = scored()
    assert status == 1
    assert "FAIL clean num_loud" in out
    assert "judged otherwise than in its run: num_loud, clean" in out
    assert "not judged: num_new, clean: not recorded" in out
    assert "not judged: num_changed, clean: the script has changed" in out
    assert "1 passed, 1 failed" in out
    assert scored("--require", "0.5", "--accept")[0] == 0
    assert "judged otherwise" not in scored()[1]
    assert {one.script: len(one.findings) for one in recorded_runs.read(recorded_runs.FOLDER)}["num_loud"] == 1


def test_the_sample_is_always_the_same() -> None:
    """Both kinds of run of each family are in it, and a new script does not change the rest."""
    cases = [score.load(path) for path in sorted(_CORPUS.glob("*.py"))]
    jobs = [(case, fault) for case in cases for fault in ((True, False) if case.codes else (False,))]
    names = [(case.path.stem, fault) for case, fault in score.sample(jobs, 40)]
    assert len(names) == len({*names}) == 40
    assert {(recorded_runs.family(name), fault) for name, fault in names} >= {
        (family, fault) for family in _FAMILIES for fault in (True, False) if fault is False or family != "clean"
    }
    fewer = [(case, fault) for case, fault in jobs if case.path.stem != names[0][0]]
    assert len({(case.path.stem, fault) for case, fault in score.sample(fewer, 40)} & {*names}) >= 36


def test_a_sample_runs_what_has_no_recording(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to as many as the sample has: when all have become stale at once, that is left to the run of everything."""
    paths = [script(tmp_path, f"num_{letter}") for letter in "abcdefgh"]
    monkeypatch.setattr(recorded_runs, "FOLDER", tmp_path / "recorded")
    monkeypatch.setattr(score, "_CORPUS", tmp_path)
    monkeypatch.setattr(score, "_live", lambda args, jobs: [case.path for case, _ in jobs])
    monkeypatch.setattr(sys, "argv", ["score.py", "--sample", "2"])
    args, cases = score._arguments(), [score.load(path) for path in paths]
    chosen = [case.path for case, _ in score.sample([(case, False) for case in cases], 2)]
    assert len(score._results(args, cases)) == 4
    stale = next(path for path in paths if path not in chosen)
    recorded_runs.write(recorded_runs.FOLDER, [recording(path) for path in paths])
    assert score._results(args, cases) == chosen
    stale.write_text(stale.read_text() + "\n")
    assert score._results(args, cases) == sorted([*chosen, stale])
