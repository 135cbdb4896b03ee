"""A saved run can be judged again, without torch and with the same result."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ddpdebug.detectors.base import Detector
from ddpdebug.detectors.examples import step_at
from ddpdebug.diagnosis.engine import Diagnosis
from ddpdebug.diagnosis.rejudge import rejudge
from ddpdebug.exchange.partial import Partial
from ddpdebug.monitor.many_ranks import chosen_step
from ddpdebug.run_directory.reader import last_state, read_findings, read_steps
from ddpdebug.run_directory.writer import RunDirectory
from ddpdebug.schema.announcements import Loader
from ddpdebug.schema.details import Detail, HyperParameters, Parameters
from ddpdebug.schema.finding import Finding, Severity
from ddpdebug.schema.row import Flag, encode
from ddpdebug.schema.step import SUMS, Step, Summary
from ddpdebug.schema.wire import to_json
from ddpdebug.sinks import RunEnded, RunStarted, Saved, StepJudged

SUPPORT = Path(__file__).resolve().parent.parent / "support"
SCRIPT = SUPPORT / "scripts" / "train.py"


def key(finding: Finding) -> tuple[object, ...]:
    """Return what must be the same."""
    return (finding.code, finding.step, finding.ranks, finding.subject, finding.phase, finding.location)


@pytest.fixture(scope="module")
def runs(run_jobs: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train for a moment on two ranks under `ddpdebug run`: a folder for each mode of the script."""
    folder = tmp_path_factory.mktemp("runs")
    options = ["--metrics=off", "--quiet"]
    jobs = [
        {"script": str(SCRIPT), "args": [mode, "12"], "options": [f"--out={folder / mode}", *options]}
        for mode in ("lr", "clean")
    ]
    ranks = [rank for job in run_jobs([{**job, "cwd": str(folder)} for job in jobs]) for rank in job]
    assert {rank["status"] for rank in ranks} == {0}, ranks
    return folder


@pytest.mark.slow
@pytest.mark.jobs
@pytest.mark.parametrize(("mode", "codes"), [("lr", ["RANK104"]), ("clean", [])])
def test_a_real_run_has_the_same_findings_again(runs: Path, mode: str, codes: list[str]) -> None:
    """In a process that never loads torch."""
    directory = runs / mode
    live = read_findings(directory)
    assert [finding.code for finding in live] == codes
    code = (
        "import sys\nfrom pathlib import Path\nfrom ddpdebug.diagnosis.rejudge import rejudge\n"
        "for finding in rejudge(Path(sys.argv[1])): print(finding.to_json())\n"
        "assert not {'torch', 'rich', 'click', 'prometheus_client'} & {*sys.modules}"
    )
    done = subprocess.run([sys.executable, "-c", code, directory], capture_output=True, text=True, check=True)
    again = [Finding.from_json(line) for line in done.stdout.splitlines()]
    assert list(map(key, again)) == list(map(key, live))
    assert [(f.count, f.last_step) for f in again] == [(f.count, f.last_step) for f in live]


class Listener(Detector):
    """Reports whatever it hears."""

    code = "TEST001"
    severity = Severity.ERROR
    title = "heard"
    topics = ("loader",)

    def __init__(self, kind: str = "hyper") -> None:
        super().__init__()
        self.wants = (kind,)

    def suspects(self, step: Step) -> bool:
        return step.step == 1

    def incident_key(self, finding: Finding) -> tuple[object, ...]:
        return finding.subject

    def detect(self, step: Step) -> Iterator[Finding]:
        if step.details:
            yield self.finding(step=step.step, subject=("details",), evidence=step.details)

    def compare(self, topic: str, facts: object) -> Iterator[Finding]:
        yield self.finding(subject=(topic,), evidence={"facts": facts})

    def finish(self) -> Iterator[Finding]:
        yield self.finding(subject=("end",))


def fact(rank: int, value: object) -> Saved:
    return Saved(kind="fact", payload={"rank": rank, "kind": "fact", "topic": "loader:0", "value": value})


def hyper(rank: int, step: int, value: object) -> Saved:
    payload = {"rank": rank, "kind": "detail", "optimizer": 0, "step": step, "detail": "hyper", "value": value}
    return Saved(kind="detail", payload=payload)


def detail(rank: int, step: int, value: Detail | None) -> Saved:
    place = {"rank": rank, "kind": "detail", "optimizer": 0, "step": step}
    return Saved(kind="detail", payload={**place, "detail": "parameters", "value": to_json(value)})


def saved(directory: Path, *records: StepJudged | Saved, ended: bool = True, world: int = 2) -> Path:
    """Write a run, by default of two ranks."""
    sink = RunDirectory(directory, 0)
    sink.write(RunStarted(run_id="r1", rank=0, world=world, directory=directory, config={}, versions={}))
    for record in records:
        sink.write(record)
    if ended:
        sink.write(RunEnded(reason="finished", exit_code=0, steps={0: 3}))
    sink.close()
    return directory


STEPS = [StepJudged(step=replace(step_at(i, world=2), facts={})) for i in range(3)]


def test_answers_and_announcements_come_where_they_came(tmp_path: Path) -> None:
    """Details reach their step though they lie behind later rows; the order of findings is that of the run."""
    answers = [hyper(rank, 1, [{"lr": 0.1}]) for rank in range(2)]
    told = [{"seed": rank} for rank in range(2)]
    directory = saved(tmp_path, fact(0, told[0]), STEPS[0], fact(1, told[1]), *STEPS[1:], *answers)
    found = rejudge(directory, detectors=[Listener()])
    assert [(f.subject, f.step) for f in found] == [(("loader:0",), None), (("details",), 1), (("end",), None)]
    assert found[0].evidence == {"facts": {rank: Loader(seed=rank) for rank in range(2)}}
    assert found[1].evidence == {"hyper": {rank: HyperParameters(groups=({"lr": 0.1},)) for rank in range(2)}}
    assert {f.run for f in found} == {"r1"}


def test_answers_that_never_came_hold_nothing_up(tmp_path: Path) -> None:
    """A rule of a later version may ask what nobody asked in the run."""
    found = rejudge(saved(tmp_path, *STEPS), detectors=[Listener()])
    assert [(f.subject, f.evidence) for f in found] == [(("details",), {"hyper": {}}), (("end",), {})]


def test_a_run_that_was_killed_has_no_end(tmp_path: Path) -> None:
    """What only the end shows is not concluded from a file that stops."""
    directory = saved(tmp_path, *STEPS, hyper(0, 1, []), hyper(1, 1, []), ended=False)
    assert [f.subject for f in rejudge(directory, detectors=[Listener()])] == [("details",)]


def test_numbers_that_json_lacks_come_back(tmp_path: Path) -> None:
    """The files hold them as texts; a name that looks like one stays a name."""
    told = Parameters(norms={"w": math.nan, "b": -math.inf}, order=("inf", "nan"), before={"w": "nan"})
    records = [detail(0, 1, told), detail(1, 1, None)]
    (found, _) = rejudge(saved(tmp_path, *STEPS, *records), detectors=[Listener("parameters")])
    again = found.evidence["parameters"][0]
    assert math.isnan(again.norms["w"])
    assert again == replace(told, norms=again.norms)
    assert again.norms["b"] == -math.inf
    assert found.evidence["parameters"].keys() == {0}


def chosen(step: Step) -> Step:
    """Return the step of the rows that are kept of very many ranks."""
    partial = Partial()
    for row in step.rows.values():
        partial.add_row(encode(row))
    ((key, part),) = partial.steps.items()
    return chosen_step(key, part, step.world)


def of_many(number: int) -> Step:
    """Return a step of 80 ranks: two kinds, a loss that is high on one for a while, NaN on every third in the end."""
    odd: dict[int, dict[str, object]] = {rank: {"modes_digest": 5} for rank in range(1, 80, 2)}
    if 40 <= number < 44:
        odd[7] = {"loss": 4000.0, "modes_digest": 5}
    if number == 59:
        odd |= {rank: {**odd.get(rank, {}), "flags": Flag.LOCAL_GRADS_NONFINITE} for rank in range(0, 80, 3)}
    return step_at(number, world=80, odd=odd)


def test_chosen_rows_are_judged_again_with_what_they_stand_for(tmp_path: Path) -> None:
    """Means are those of all ranks, a kind is named with all ranks of it, also at the end of the run."""
    steps = [chosen(of_many(number)) for number in range(60)]
    last = chosen(step_at(60, world=80, odd={3: {"params_after_digest": 9}}, flags=Flag.LAST_STATE))
    live = Diagnosis(world=80, config={"world": 80})
    found: list[Finding] = []
    for step in (*steps, last):
        for request in live.feed(step):
            for rank in request.ranks:
                live.answer(rank, request.optimizer, request.step, request.kind, None, last=request.last)
        found += [finding for finding, new in live.tick() if new]
    found += [finding for finding, new in live.finish() if new]
    assert {finding.code for finding in found} == {"HLTH708", "NUM303"}
    assert next(finding for finding in found if finding.code == "NUM303").ranks == tuple(range(0, 80, 3))
    records = [*(StepJudged(step=step) for step in steps), Saved(kind="last_state", payload=last_state(last))]
    directory = saved(tmp_path, *records, world=80)
    assert list(map(key, rejudge(directory))) == list(map(key, found))
    again = list(read_steps(directory))
    assert [(step.kinds, step.others, step.told, step.world) for step in again] == [
        (step.kinds, step.others, step.told, step.world) for step in steps
    ]
    assert len(steps[0].kinds) == 2


def test_kinds_of_scattered_ranks_take_little_room(tmp_path: Path) -> None:
    """Eight kinds of 8,192 ranks that lie without order are 18 KB of a step, not a hundred, and are read again."""
    whole = step_at(3, world=8)
    parts: dict[int, set[int]] = {rank: {rank} for rank in range(8)}
    for rank in range(8, 8192):
        parts[rank * rank // 7 % 8].add(rank)
    kinds = {rank: frozenset(ranks) for rank, ranks in parts.items()}
    told = Summary(some=0, common=0, sums=dict.fromkeys(SUMS, (0, 0.0)))
    step = replace(whole, world=8192, chosen=True, kinds=kinds, told=told)
    directory = saved(tmp_path, StepJudged(step=step), world=8192)
    assert (directory / "observations.jsonl").stat().st_size < 18_000
    assert [one.kinds for one in read_steps(directory)] == [kinds]


def test_a_few_rows_of_a_large_job_may_be_all(tmp_path: Path) -> None:
    """Those of ranks that others have left alone; and where it is not known what rows stand for, few are chosen."""
    step = replace(step_at(5, world=4), world=80)
    directory = saved(tmp_path, StepJudged(step=step), world=80)
    assert [one.chosen for one in read_steps(directory)] == [False]
    (directory / "observations.jsonl").unlink()
    assert [one.chosen for one in read_steps(directory)] == [True]


@pytest.mark.parametrize(
    "malformed",
    [
        *({"kinds": kinds} for kinds in (None, {"x": ""}, {"99": "0-3"}, {"0": "0-y"}, {"0": [[0, 3]]}, {"0": 5})),
        {"others": ",".join(["0-1048575"] * 1000)},
        {"others": "0xz"},
        {"told": {"some": math.inf, "common": 0, "sums": {}}},
    ],
)
def test_malformed_kinds_are_left_out(tmp_path: Path, malformed: dict[str, object]) -> None:
    """The rows are chosen ones all the same."""
    directory = saved(tmp_path, StepJudged(step=chosen(of_many(3))), world=80)
    path = directory / "observations.jsonl"
    record = json.loads(path.read_text())
    record["payload"] |= malformed
    path.write_text(json.dumps(record) + "\n")
    (step,) = read_steps(directory)
    assert (step.chosen, step.kinds) == (True, {})


def test_malformed_observations_are_left_out(tmp_path: Path) -> None:
    """The directory may be anybody's."""
    directory = saved(tmp_path, fact(0, {}))
    lines = [
        {"rows": 0, "kind": "detail", "payload": {"rank": "0", "optimizer": 0, "step": 1, "detail": "hyper"}},
        {"rows": 0, "kind": "detail", "payload": {"rank": 0, "optimizer": None, "step": 1, "detail": "hyper"}},
        {"rows": 0, "kind": "fact", "payload": {"rank": 1}},
        {"rows": 0, "kind": "other", "payload": {}},
    ]
    with (directory / "observations.jsonl").open("a") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)
    assert [f.subject for f in rejudge(directory, detectors=[Listener()])] == [("end",)]
    with pytest.raises(ValueError, match="is not a run directory"):
        rejudge(tmp_path / "elsewhere")


@pytest.mark.parametrize(
    ("topic", "value", "codes"),
    [
        ("alone:loss", {"kind": "double-softmax", "step": 0, "loss": "NllLoss", "before": "softmax"}, []),
        (
            "alone:loss",
            {"kind": "range", "step": 0, "loss": "BinaryCrossEntropy", "low": -1.0, "high": 1.0},
            ["DATA903"],
        ),
        (
            "alone:loss",
            {"kind": "broadcast", "step": 0, "loss": "Mean", "prediction": [8, 1], "result": [8, 8]},
            ["RCP819"],
        ),
        ("inputs:0", {"layer": "Linear", "mean": 0.002, "std": 0.001, "min": 0.0, "max": 0.0039, "twice": True}, []),
        ("alone:audit", {"kind": "frozen", "step": 32, "share": 0.9}, ["RCP812"]),
        ("alone:audit", {"kind": "no_grad", "step": 3, "names": ["a.weight"], "modules": ["a"], "location": None}, []),
        ("alone:chance", {"step": 2, "function": "dropout", "p": 0.1, "module": "a", "class": "A", "others": []}, []),
        ("alone:schedule", {"step": 90, "class": "StepLR"}, []),
        ("alone:leak", {"kind": "moved", "step": 9, "change": 0.6, "position": 7, "length": 8}, []),
    ],
)
def test_what_older_versions_announced(tmp_path: Path, topic: str, value: object, codes: list[str]) -> None:
    """They announced verdicts: what still says what it is about is one; what lacks its numbers raises no alarm."""
    told = [
        Saved(kind="fact", payload={"rank": rank, "kind": "fact", "topic": topic, "value": value}) for rank in (0, 1)
    ]
    assert [finding.code for finding in rejudge(saved(tmp_path, *told, *STEPS))] == codes


@pytest.mark.parametrize(("bit", "code"), [(30, "RCP804"), (32, "RCP816"), (33, "RCP803"), (37, "RCP809")])
def test_flags_of_older_versions(tmp_path: Path, bit: int, code: str) -> None:
    """They stood for what is a flag with exceptions now, none of which those rows have."""
    rows = [StepJudged(step=replace(step_at(i, world=2, flags=1 << bit), facts={})) for i in range(5)]
    assert [finding.code for finding in rejudge(saved(tmp_path, *rows))] == [code]
