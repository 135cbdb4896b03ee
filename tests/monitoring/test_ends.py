"""What is heard of a job when it ends, or falls ill, through the shipped rules and the shipped Alertmanager's settings.

A real Prometheus, a real Alertmanager and a webhook that counts what would wake a person. What happens to one run is a
function here; several of them run at a time, as most of the time is waiting for what may still come.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import datetime
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from machine import PATIENCE, until

#: The limit is high so that this file, which takes minutes, is among the first to begin.
pytestmark = [pytest.mark.jobs, pytest.mark.slow, pytest.mark.timeout(1500)]

HERE = Path(__file__).parent
DEPLOY = HERE.parent.parent / "deploy"
#: What a person waits for in minutes; the windows over which is looked back stay as they are.
_HASTE = {r"for: 15s\b": "for: 5s", r"for: (?:30s|2m)\b": "for: 15s"}
_HASTE_OF_MANAGER = {r"group_wait: 10s": "group_wait: 5s", r"group_interval: 1m": "group_interval: 5s"}
#: Alertmanager hears of a second alarm of a run in this time, seconds.
_SETTLED = 25.0


class Webhook:
    """Where Alertmanager sends its notifications."""

    def __init__(self) -> None:
        self.notifications: list[dict[str, Any]] = []
        seen = self.notifications

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *args: Any) -> None:
                pass

            def do_POST(self) -> None:
                seen.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
                self.send_response(200)
                self.send_header("Content-Length", "0")
                self.end_headers()

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}/"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def about(self, run: str) -> list[list[dict[str, Any]]]:
        """Return the alerts of each notification about a run."""
        return [each["alerts"] for each in self.notifications if each["groupLabels"].get("run") == run]

    def stop(self) -> None:
        """Take no more."""
        self._server.shutdown()
        self._server.server_close()


class Watch:
    """Prometheus, Alertmanager and the webhook over one folder of targets."""

    def __init__(self, prometheus: Any, webhook: Webhook, targets: Path) -> None:
        self.prometheus, self.webhook, self.targets = prometheus, webhook, targets

    def settle(self) -> None:
        """Wait until the rules have been looked at for so long that whatever is to be heard has been."""
        begun = time.time()
        assert until(lambda: self._evaluated() > begun + _SETTLED, pause=0.5)

    def _evaluated(self) -> float:
        groups = self.prometheus.get("/api/v1/rules")["data"]["groups"]
        return min(datetime.fromisoformat(group["lastEvaluation"]).timestamp() for group in groups)

    def alarms(self, run: str) -> set[str]:
        """Return the names of all alerts that have fired for a run, whether anybody was told or not."""
        found = self.prometheus.query(
            f'max by (alertname) (last_over_time(ALERTS{{run="{run}", alertstate="firing"}}[1h]))'
        )
        return {each["metric"]["alertname"] for each in found}


@pytest.fixture(scope="module")
def watch(
    start_prometheus: Callable[..., Any],
    start_alertmanager: Callable[..., Any],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Watch]:
    """Watch a folder of targets as is shipped, but for the pauses."""
    folder = tmp_path_factory.mktemp("watch")
    webhook = Webhook()
    settings = _hastened((DEPLOY / "compose" / "alertmanager.yml").read_text(), _HASTE_OF_MANAGER)
    receiver = f"- name: nobody\n    webhook_configs: [{{url: '{webhook.url}', send_resolved: false}}]"
    alertmanager = start_alertmanager(settings.replace("- name: nobody", receiver))
    for file in (DEPLOY / "prometheus" / "rules").iterdir():
        text = file.read_text()
        (folder / file.name).write_text(_hastened(text, _HASTE) if "alerts" in file.name else text)
    server = start_prometheus(
        "global: {scrape_interval: 1s, evaluation_interval: 1s, external_labels: {ddpdebug_docs: 'http://docs/'}}\n"
        f"rule_files: ['{folder}/*.yml']\n"
        f"alerting: {{alertmanagers: [{{static_configs: [{{targets: ['{alertmanager.url[7:]}']}}]}}]}}\n"
        "scrape_configs:\n- job_name: ddpdebug\n  file_sd_configs:\n"
        f"  - {{files: ['{folder}/targets/ddpdebug-*.json'], refresh_interval: 1s}}\n"
    )
    yield Watch(server, webhook, folder / "targets")
    webhook.stop()


def _hastened(text: str, haste: dict[str, str]) -> str:
    for pattern, shorter in haste.items():
        text, count = re.subn(pattern, shorter, text)
        assert count, pattern
    return text


class Job:
    """A job by its name: the launcher, and the ranks that it has started."""

    def __init__(self, watch: Watch, folder: Path, how: str, ranks: int) -> None:
        self.run, self._folder = how, folder
        words = [sys.executable, "-m", "ddpdebug", "run", "--nproc-per-node", str(ranks), "--every-step", "--quiet"]
        words += ["--name", how, "--sd-dir", str(watch.targets), "--out", str(folder / "run")]
        words += [str(HERE / "scripts" / "ends.py"), how, str(folder)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        with (folder / "log").open("wb") as log:
            self.process = subprocess.Popen(words, env=environment, stdout=log, stderr=subprocess.STDOUT)

    def kill_rank(self, rank: int) -> None:
        """Kill a rank as the kernel does that wants memory."""
        os.kill(int((self._folder / f"pid-{rank}").read_text()), signal.SIGKILL)

    def let_go(self) -> None:
        """End what keeps a rank."""
        (self._folder / "go").touch()

    def cancel(self) -> None:
        """Ask the launcher to end, as a scheduler does."""
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(PATIENCE)

    def stop(self) -> None:
        """End what is left."""
        if self.process.poll() is None:
            self.cancel()


Start = Callable[..., Job]


class Jobs:
    """Starts jobs, each with a folder of its own, and ends what is left of them."""

    def __init__(self, watch: Watch, folder: Path) -> None:
        self._watch, self._folder, self._started = watch, folder, list[Job]()

    def start(self, how: str, ranks: int = 2) -> Job:
        """Start a job and wait until Prometheus has seen all its ranks step."""
        folder = self._folder / how
        folder.mkdir()
        job = Job(self._watch, folder, how, ranks)
        self._started.append(job)
        metric = "ddpdebug_run_state" if how == "unchecked" else "ddpdebug_step"
        self._watch.prometheus.wait_for(f"count(last_over_time({metric}{{run='{how}'}}[1h])) == {ranks}")
        return job

    def stop(self) -> None:
        """End all."""
        for job in self._started:
            job.stop()


# --- what happens to a run, and what is heard of it ---------------------------------------------------------------


def _one_nan_on_four_ranks_is_one_notification(watch: Watch, start: Start) -> None:
    """Whatever it shows in and however many findings follow; and none more when somebody cancels the job for it."""
    job = start("nan", ranks=4)
    assert until(lambda: watch.webhook.about("nan"), pause=0.5)
    watch.settle()
    job.cancel()
    watch.prometheus.wait_for("max(last_over_time(ddpdebug_run_state{run='nan'}[1h])) == 3")
    watch.settle()
    ((alert,),) = watch.webhook.about("nan")
    assert alert["labels"]["alertname"] == "DdpdebugNonfinite"
    run = f"run nan ({alert['labels']['run_id']})"
    assert alert["annotations"]["summary"] == f"NaN or infinity in {run}, first on rank 1"
    assert " is NUM" in alert["annotations"]["description"]
    assert alert["annotations"]["runbook_url"] == "http://docs/runbooks/DdpdebugNonfinite.md"


def _a_job_that_dies_is_one_notification_that_names_the_cause(
    how: str, alarm: str, words: str, watch: Watch, start: Start
) -> None:
    """And the rank of which it died, not those that were ended by the launcher or failed for want of it."""
    job = start(how)
    if how == "killed":
        job.kill_rank(1)
    assert until(lambda: watch.webhook.about(how), pause=0.5)
    watch.settle()
    ((alert,),) = watch.webhook.about(how)
    assert alert["labels"]["alertname"] == alarm
    assert alert["annotations"]["summary"] == f"run {how} ({alert['labels']['run_id']}) {words}"


def _a_hang_is_one_notification_that_names_the_rank_and_its_line(watch: Watch, start: Start) -> None:
    """And none more while it lasts, nor when it is over and somebody cancels the job."""
    job = start("hangs")
    assert until(lambda: watch.webhook.about("hangs"), pause=0.5)
    watch.settle()
    job.let_go()
    watch.prometheus.wait_for("max(ddpdebug_hang_state{run='hangs'}) == 0")
    watch.prometheus.wait_for("absent(ALERTS{run='hangs', alertname='DdpdebugHang', alertstate='firing'})")
    watch.prometheus.wait_for("max(ddpdebug_run_state{run='hangs'}) == 1")  # it is ill no more
    job.cancel()
    watch.settle()
    ((alert,),) = watch.webhook.about("hangs")
    assert alert["labels"]["alertname"] == "DdpdebugHang"
    notes = alert["annotations"]
    run = re.escape(f"run hangs ({alert['labels']['run_id']})")
    assert re.fullmatch(rf"{run} hangs: rank 1 not moving in script at \S*ends\.py:\d+", notes["summary"]), notes
    assert re.search(r"have waited for \S+s: rank 1 not moving .* is HANG501 on rank 1", notes["description"]), notes
    assert notes["runbook_url"] == "http://docs/runbooks/DdpdebugHang.md"
    assert watch.alarms("hangs") == {"DdpdebugHang"}


def _a_rank_at_work_wakes_nobody(watch: Watch, start: Start) -> None:
    """For as long as an evaluation takes, although the others wait for it and that is seen."""
    start("evaluates")
    (found,) = watch.prometheus.wait_for("max by (missing) (ddpdebug_missing_rank{run='evaluates'}) == 1")
    assert found["metric"]["missing"] == "1"
    watch.settle()
    assert watch.alarms("evaluates") == set()


def _a_critical_finding_that_no_other_alert_tells_of_is_one(watch: Watch, start: Start) -> None:
    """Gradients that are equal on all ranks and nobody's mean."""
    start("summed")
    assert until(lambda: watch.webhook.about("summed"), pause=0.5)
    watch.settle()
    ((alert,),) = watch.webhook.about("summed")
    assert (alert["labels"]["alertname"], alert["labels"]["code"]) == ("DdpdebugFindingCritical", "SYNC204")
    assert f"SYNC204 in run summed ({alert['labels']['run_id']})" in alert["annotations"]["summary"]


def _a_job_of_which_nothing_can_be_checked_says_so(watch: Watch, start: Start) -> None:
    """It has no findings, and that means nothing."""
    start("unchecked")
    assert until(lambda: watch.webhook.about("unchecked"), pause=0.5)
    assert "DdpdebugNotChecked" in watch.alarms("unchecked")


def _a_job_that_finished_or_was_cancelled_alarms_nobody(how: str, state: int, watch: Watch, start: Start) -> None:
    """Its end is seen, and nothing fires."""
    job = start(how)
    if how == "cancelled":
        job.cancel()
    watch.prometheus.wait_for(f"max(last_over_time(ddpdebug_run_state{{run='{how}'}}[1h])) == {state}")
    watch.settle()
    assert watch.webhook.about(how) == []
    assert {name for name in watch.alarms(how) if not name.startswith("DdpdebugFinding")} == set()
    assert list(watch.targets.glob(f"*{how}*")) == []


# --- several at a time --------------------------------------------------------------------------------------------

_FLOWS: dict[str, Callable[[Watch, Start], None]] = {
    "nan": _one_nan_on_four_ranks_is_one_notification,
    "failed": partial(
        _a_job_that_dies_is_one_notification_that_names_the_cause,
        "failed",
        "DdpdebugRunFailed",
        "has failed: ValueError on rank 1",
    ),
    "killed": partial(
        _a_job_that_dies_is_one_notification_that_names_the_cause,
        "killed",
        "DdpdebugRunLost",
        "is lost: rank 1 has ended without a word",
    ),
    "hangs": _a_hang_is_one_notification_that_names_the_rank_and_its_line,
    "evaluates": _a_rank_at_work_wakes_nobody,
    "summed": _a_critical_finding_that_no_other_alert_tells_of_is_one,
    "unchecked": _a_job_of_which_nothing_can_be_checked_says_so,
    "finished": partial(_a_job_that_finished_or_was_cancelled_alarms_nobody, "finished", 0),
    "cancelled": partial(_a_job_that_finished_or_was_cancelled_alarms_nobody, "cancelled", 3),
}
#: Two cores start so many jobs in a time in which each is still seen to step.
_AT_A_TIME = 4


def _happens(how: str, watch: Watch, folder: Path) -> None:
    jobs = Jobs(watch, folder)
    try:
        _FLOWS[how](watch, jobs.start)
    finally:
        jobs.stop()


@pytest.fixture(scope="module")
def heard(
    request: pytest.FixtureRequest, watch: Watch, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Future[None]]]:
    """Let what was selected happen."""
    items = [item for item in request.session.items if item.path == request.path and hasattr(item, "callspec")]
    folder = tmp_path_factory.mktemp("jobs")
    with ThreadPoolExecutor(_AT_A_TIME) as pool:
        names = [item.callspec.params["how"] for item in items]
        yield {how: pool.submit(_happens, how, watch, folder) for how in names}


@pytest.mark.parametrize("how", _FLOWS)
def test_what_is_heard_of_a_run(how: str, heard: dict[str, Future[None]]) -> None:
    """One notification for what is ill, none for what is well."""
    heard[how].result()
