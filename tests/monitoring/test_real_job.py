"""A real job on four ranks, a real Prometheus that finds it, a real Alertmanager that hears of its illnesses."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from machine import PATIENCE, free_port, until

from ddpdebug.grafana.dashboards import shipped

#: The limit is high so that this file, which takes minutes, is among the first to begin.
pytestmark = [pytest.mark.jobs, pytest.mark.slow, pytest.mark.timeout(1500)]

HERE = Path(__file__).parent
RULES = HERE.parent.parent / "deploy" / "prometheus" / "rules"
#: Jobs of test_ends.py raise these: here other alerts tell of what is found, ranks are compared, and nobody fails.
_ELSEWHERE = {"DdpdebugFindingCritical", "DdpdebugNotChecked", "DdpdebugRunFailed"}
#: Minutes become seconds, so that an alert that takes an hour shows in a test.
_HASTE = {
    r"\[5m\]": "[15s]",
    r"\[15m\]": "[20s]",
    r"offset 15m": "offset 20s",
    r"for: \d+[ms]": "for: 1s",
    r"min > 300": "min > 5",
    r"> 20 \*": "> 8 *",
}


#: Panels that show something only while it is so; test_situations.py has them.
_OF_NOW = {"Outvoted ranks", "Full in", "Missing ranks", "Waiting for others"}


class Job:
    """The ill job: the launcher and its ranks."""

    def __init__(self, folder: Path, steps: int, *options: str) -> None:
        self.targets, self._folder = folder / "targets", folder
        words = [sys.executable, "-m", "ddpdebug", "run", "--nproc-per-node", "4", "--every-step", "--quiet"]
        words += ["--memory-limit", "1500000000"]  # so small that what the job keeps will not fit
        words += ["--metrics-port", str(free_port()), "--sd-dir", str(self.targets), "--out", str(folder / "run")]
        script = [str(HERE / "scripts" / "ill.py"), str(steps), str(folder)]
        words += [*options, *script]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        with (folder / "log").open("wb") as log:
            self.process = subprocess.Popen(words, env=environment, stdout=log, stderr=subprocess.STDOUT)

    def ended(self) -> bool:
        """Return whether the launcher has gone."""
        return self.process.poll() is not None

    def signal_rank(self, rank: int, number: signal.Signals) -> None:
        """Send a signal to one rank."""
        os.kill(self._pid(rank), number)

    def lose_rank(self, rank: int) -> None:
        """Kill one rank while its launcher, which would end the others, is stopped: as where its node is lost."""
        status = Path(f"/proc/{self._pid(rank)}/status").read_text()
        os.kill(int(re.findall(r"^PPid:\s+(\d+)", status, re.MULTILINE)[0]), signal.SIGSTOP)
        self.signal_rank(rank, signal.SIGKILL)

    def _pid(self, rank: int) -> int:
        return int((self._folder / f"pid-{rank}").read_text())

    def kill(self) -> None:
        """End all its processes at once; torch's launcher gives each rank a session of its own."""
        _kill(self.process)


def _kill(process: subprocess.Popen[bytes]) -> None:
    for pid in _family(process) if process.poll() is None else ():
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.wait(PATIENCE)


def _family(process: subprocess.Popen[bytes]) -> list[int]:
    """Return the process and what it has started."""
    ours = [process.pid]
    for pid in ours:  # grows while it is read
        for task in Path(f"/proc/{pid}/task").glob("*/children"):
            ours += map(int, task.read_text().split())
    return ours


@pytest.fixture
def job(tmp_path: Path, need: Callable[[str], str]) -> Iterator[Job]:
    """Start the job; end it with the test."""
    need("prometheus")
    need("prometheus-alertmanager")
    made = Job(tmp_path, 100_000)
    yield made
    made.kill()


def test_every_alert_fires_and_resolves_and_every_panel_has_data(
    job: Job, start_prometheus: Callable[..., Any], start_alertmanager: Callable[[], Any], tmp_path: Path
) -> None:
    """From the fault in the script to the alert with its runbook, and back."""
    alertmanager = start_alertmanager()
    files = {file.name: file.read_text() for file in RULES.iterdir()}
    assert all(re.search(pattern, "".join(files.values())) for pattern in _HASTE)
    (tmp_path / "rules").mkdir()
    for name, text in files.items():
        for pattern, shorter in _HASTE.items():
            text = re.sub(pattern, shorter, text)  # noqa: PLW2901
        (tmp_path / "rules" / name).write_text(text)
    prometheus = start_prometheus(
        "global: {scrape_interval: 1s, evaluation_interval: 1s, external_labels: {ddpdebug_docs: 'http://docs/'}}\n"
        f"rule_files: ['{tmp_path}/rules/*.yml']\n"
        f"alerting: {{alertmanagers: [{{static_configs: [{{targets: ['{alertmanager.url[7:]}']}}]}}]}}\n"
        "scrape_configs:\n- job_name: ddpdebug\n  file_sd_configs:\n"
        f"  - {{files: ['{job.targets}/ddpdebug-*.json'], refresh_interval: 1s}}\n"
    )
    wanted = set(re.findall(r"alert: (\w+)", "".join(files.values()))) - _ELSEWHERE
    at_last = {"DdpdebugHang", "DdpdebugRanksMissing", "DdpdebugRunLost"}
    fired: dict[str, dict[str, Any]] = {}
    resolved: set[str] = set()

    def look() -> None:
        active = {alert["labels"]["alertname"]: alert for alert in alertmanager.get("/api/v2/alerts", active="true")}
        resolved.update({name for name in fired if name not in active})
        fired.update(active)

    prometheus.wait_for("count(ddpdebug_step) == 4")
    until(lambda: look() or job.ended() or wanted - at_last <= {*fired}, pause=0.5)
    assert not job.ended(), (tmp_path / "log").read_text()[-3000:]
    assert wanted - {*fired} == at_last
    until(lambda: not _empty_panels(prometheus), pause=1)  # a scrape may have come too late
    empty = _empty_panels(prometheus)
    job.signal_rank(3, signal.SIGSTOP)
    until(lambda: look() or "DdpdebugHang" in fired, pause=0.5)
    assert wanted - {*fired} == {"DdpdebugRanksMissing", "DdpdebugRunLost"}
    hang = fired["DdpdebugHang"]["annotations"]
    assert re.search(r"hangs: rank 3 without a sign of life in interpreter at \S*ill\.py:\d+$", hang["summary"]), hang
    assert " is HANG501 on rank 3" in hang["description"]
    job.lose_rank(3)
    until(lambda: look() or "DdpdebugRanksMissing" in fired, pause=0.5)
    assert fired["DdpdebugRanksMissing"]["annotations"]["summary"].startswith("rank 3 is missing from run ill (")
    assert wanted - {*fired} == {"DdpdebugRunLost"}
    job.kill()
    until(lambda: look() or wanted <= {*fired}, pause=0.5)
    assert wanted <= {*fired}
    shutil.rmtree(job.targets, ignore_errors=True)  # as the next run's sweep would
    until(lambda: look() or wanted <= resolved, pause=0.5)
    assert wanted - resolved == set()
    for name in wanted:
        notes = fired[name]["annotations"]
        assert notes["runbook_url"] == f"http://docs/runbooks/{name}.md"
        assert fired[name]["labels"]["run_id"] in notes["summary"]
        assert "<no value>" not in str(notes)
    assert empty == []


def _empty_panels(prometheus: Any) -> list[tuple[str, str]]:
    run = prometheus.query("ddpdebug_run_info")[0]["metric"]["run_id"]
    values = {"$__rate_interval": "10s", "$__range": "5m", "$__interval": "5s", "$run": run, "$rank": ".+"}
    empty = []
    for name, board in shipped().items():
        for panel in board["panels"]:
            found = []
            for target in panel.get("targets", ()):
                query = target["expr"]
                for variable, value in values.items():
                    query = query.replace(variable, value)
                found += prometheus.query(query) if target.get("instant") else prometheus.range(query, 300)
            if panel.get("targets") and not found and panel["title"] not in _OF_NOW:
                empty.append((name, panel["title"]))
    return empty


#: Two ranks that step until they are ended, or meet a NaN at step 5 in the one that is told so.
_TRAIN = """
import sys, time
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(4, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
generator = torch.Generator().manual_seed(dist.get_rank())
for step in range(100_000):
    batch = torch.randn(8, 4, generator=generator)
    if step == 5 and sys.argv[1] == "nan":
        batch[0, 0] = float("nan")
    model(batch).pow(2).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    time.sleep(0.1 if step > 20 else 0)
"""


@pytest.mark.parametrize(
    ("how", "state", "outcome", "cause"),
    [
        ("nan", 4, "findings", "NUM305"),  # ends itself, before anybody may have looked at it
        pytest.param("killed", 5, "lost", "SIGKILL", marks=pytest.mark.thorough),
        pytest.param("cancelled", 3, "cancelled", "SIGTERM", marks=pytest.mark.thorough),
    ],
)
def test_how_a_run_has_ended_is_seen(
    how: str, state: int, outcome: str, cause: str, start_prometheus: Callable[..., Any], tmp_path: Path
) -> None:
    """By its state, its outcome and its findings, with its name; then it is no target any more."""
    (tmp_path / "train.py").write_text(_TRAIN)
    targets = tmp_path / "targets"
    prometheus = start_prometheus(
        "global: {scrape_interval: 1s}\nscrape_configs:\n- job_name: ddpdebug\n  file_sd_configs:\n"
        f"  - {{files: ['{targets}/ddpdebug-*.json'], refresh_interval: 1s}}\n"
    )
    words = [sys.executable, "-m", "ddpdebug", "run", "--nproc-per-node", "2", "--guard", "stop", "--linger", "300"]
    words += ["--sd-dir", str(targets), "--out", str(tmp_path / "run"), "--name", how, str(tmp_path / "train.py"), how]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(words, env=environment, stdout=log, stderr=subprocess.STDOUT)
    try:
        if how != "nan":
            prometheus.wait_for(f"count(ddpdebug_step{{run='{how}'}} > 10) == 2")
            started = _family(process)[1:]
            ranks = [pid for pid in started if b"--guard" in Path(f"/proc/{pid}/cmdline").read_bytes()]
            os.kill(*((ranks[1], signal.SIGKILL) if how == "killed" else (process.pid, signal.SIGTERM)))
        assert process.wait(PATIENCE) == 1, (tmp_path / "log").read_text()
    finally:
        _kill(process)
    prometheus.wait_for(f"max by (run) (last_over_time(ddpdebug_run_state{{run='{how}'}}[1h])) == {state}")
    wanted = f"run='{how}', outcome='{outcome}', cause='{cause}'"
    (told,) = prometheus.wait_for(f"count by (run_id) (last_over_time(ddpdebug_run_outcome_info{{{wanted}}}[1h]))")
    assert json.loads((tmp_path / "run" / "run.json").read_text())["run"] == told["metric"]["run_id"]
    assert prometheus.query("count({exported_run_id!=''})") == []
    if how == "nan":
        prometheus.wait_for(f"last_over_time(ddpdebug_incident_step{{run='{how}', code='{cause}'}}[1h]) == 5")
        prometheus.wait_for(f"last_over_time(ddpdebug_findings_total{{run='{how}', code='{cause}'}}[1h]) == 1")
    prometheus.wait_for(f"absent(ddpdebug_run_state{{run='{how}'}})")
    assert until(lambda: not [*targets.iterdir()])


@pytest.mark.smoke
def test_a_run_that_ends_leaves_no_target(tmp_path: Path) -> None:
    """Nothing is left to be scraped for long; the verdicts stay in the run directory."""
    job = Job(tmp_path, 20, "--linger", "1")
    try:
        assert job.process.wait(PATIENCE) == 0, (tmp_path / "log").read_text()
    finally:
        job.kill()
    assert until(lambda: not list(job.targets.iterdir()))  # what it came to is served for a while
    assert json.loads((tmp_path / "run" / "run.json").read_text())["outcome"]["reason"] == "finished"
