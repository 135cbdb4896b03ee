"""Dashboards and annotations in a Grafana: a small one of our own, and a real one behind --grafana-url."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

pytest.importorskip("grafana_api")

from ddpdebug.commands import main
from ddpdebug.errors import UsageError
from ddpdebug.grafana import annotations
from ddpdebug.grafana.annotations import Annotation, Annotations, Courier
from ddpdebug.grafana.client import Grafana, GrafanaError, read_token
from ddpdebug.grafana.dashboards import NAMES, shipped
from ddpdebug.run_directory.reader import ANNOTATIONS
from ddpdebug.run_directory.writer import RunDirectory
from ddpdebug.schema.finding import Finding, Severity
from ddpdebug.sinks import FindingRaised, Record, RunEnded, RunStarted, Trouble
from ddpdebug.sinks.fanout import Fanout

TOKEN = "glsa_secret"
FINDING = Finding(
    code="RANK101",
    severity=Severity.CRITICAL,
    title="parameters differ",
    step=3,
    ranks=(2,),
    subject=("layers.0 & more=#?",),
    id="RANK101-1",
)
STARTED = RunStarted(run_id="r 1&x", rank=0, world=4, directory=None, config={}, versions={})
ENDED = RunEnded(reason="finished", exit_code=0, steps={})


class Handler(BaseHTTPRequestHandler):
    """Answers as Grafana does, below a path."""

    fake: FakeGrafana

    def log_message(self, *args: Any) -> None:
        pass

    def answer(self, status: int, value: Any) -> None:
        data = json.dumps(value).encode()
        self.send_response(status)
        if self.fake.retry_after:
            self.send_header("Retry-After", self.fake.retry_after)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def refused(self) -> bool:
        self.fake.asked.release()
        if self.fake.held is not None:
            assert self.fake.held.wait(300)
        if self.fake.hangs_up:
            self.close_connection = True
            self.connection.close()
            return True
        if self.fake.text:
            self.answer(200, self.fake.text)
            return True
        if self.headers["Authorization"] != f"Bearer {TOKEN}":
            self.answer(401, {"message": f"Unauthorized {self.headers['Authorization']}"})
        elif self.fake.status:
            self.answer(self.fake.status, {"message": "no"})
        else:
            return False
        return True

    def do_GET(self) -> None:
        if self.refused():
            return
        parts = urlsplit(self.path)
        if parts.path.startswith("/sub/api/dashboards/uid/"):
            found = self.fake.dashboards.get(parts.path.rpartition("/")[2])
            self.answer(*((404, {"message": "not found"}) if found is None else (200, found)))
        elif parts.path == "/sub/api/folders":
            asked = {name: int(value) for name, (value,) in parse_qs(parts.query).items()}
            first = (asked["page"] - 1) * asked["limit"]
            self.answer(200, self.fake.folders[first : first + asked["limit"]])
        else:
            wanted = set(parse_qs(parts.query)["tags"])
            self.answer(200, [a for a in self.fake.annotations if wanted <= set(a["tags"])])

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.refused():
            return
        if self.path == "/sub/api/annotations":
            if self.fake.unwanted and self.fake.unwanted in body["text"]:
                self.answer(400, {"message": "bad request data"})
                return
            self.fake.annotations.append(body)
            if self.fake.dies:
                self.fake.dies -= 1
                self.close_connection = True
                self.connection.close()
                return
            self.answer(200, {"id": len(self.fake.annotations)})
        elif self.path == "/sub/api/folders":
            self.fake.folders.append({"uid": f"f{len(self.fake.folders)}", "title": body["title"]})
            self.answer(200, self.fake.folders[-1])
        else:
            board = body["dashboard"]
            self.fake.dashboards[board["uid"]] = {"dashboard": board, "meta": {"folderUid": body["folderUid"]}}
            self.answer(200, {"url": f"/d/{board['uid']}"})


class FakeGrafana:
    """Keeps dashboards and annotations as Grafana does."""

    def __init__(self) -> None:
        self.dashboards: dict[str, dict[str, Any]] = {}
        self.annotations: list[dict[str, Any]] = []
        self.folders: list[dict[str, Any]] = []
        self.status = 0  # answer everything with this
        self.text: Any = None  # or with this, as a proxy does
        self.retry_after = ""
        self.hangs_up = False
        self.held: threading.Event | None = None  # answers nothing until then
        self.unwanted = ""  # annotations with this text are refused
        self.dies = 0  # so many times after it has taken an annotation
        self.asked = threading.Semaphore(0)  # released by each request
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), type("_Handler", (Handler,), {"fake": self}))
        self.url = f"http://127.0.0.1:{self.server.server_port}/sub/"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def fail(self, fault: str) -> None:
        """Begin to fail in a way, or to work again."""
        self.status = {"starting": 503, "broken": 500, "too many": 429, "token": 401, "moved": 404}.get(fault, 0)
        self.retry_after = "1" if fault == "too many" else ""
        self.hangs_up = fault == "restarting"
        self.text = {"message": "back soon"} if fault == "proxy" else None

    @property
    def incidents(self) -> list[str]:
        """What the annotations are about, in the order in which they came."""
        return [each["text"].partition(":")[0] for each in self.annotations]


@pytest.fixture
def fake() -> Iterator[FakeGrafana]:
    """Serve on any port, below a path."""
    made = FakeGrafana()
    yield made
    made.server.shutdown()
    made.server.server_close()


def test_dashboards_are_pushed_and_pushed_again(
    fake: FakeGrafana, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """All six, under their uids, without a numeric id."""
    monkeypatch.setenv("GRAFANA_TOKEN", TOKEN)
    for _ in range(2):
        assert main(["dashboards", "push", "--url", fake.url]) == 0
    assert set(fake.dashboards) == {f"ddpdebug-{name}" for name in NAMES}
    assert all(entry["dashboard"]["id"] is None for entry in fake.dashboards.values())
    assert "/d/ddpdebug-overview" in capsys.readouterr().out


def test_dashboards_are_pushed_into_a_folder_which_is_made_once(
    fake: FakeGrafana, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also behind a thousand others; without the option they stay where they are, at first in General."""
    monkeypatch.setenv("GRAFANA_TOKEN", TOKEN)
    words = ["dashboards", "push", "--url", fake.url]

    def folders() -> set[str]:
        return {entry["meta"]["folderUid"] for entry in fake.dashboards.values()}

    assert main(words) == 0
    assert folders() == {""}
    fake.folders = [{"uid": f"f{i}", "title": f"folder {i}"} for i in range(1000)]
    for _ in range(2):
        assert main([*words, "--folder", "Training runs"]) == 0
    assert [each["title"] for each in fake.folders[1000:]] == ["Training runs"]
    assert folders() == {"f1000"}
    assert main(words) == 0
    assert folders() == {"f1000"}
    assert main([*words, "--folder", "General"]) == 0
    assert folders() == {""}


def test_a_grafana_that_is_not_there_is_one_error_in_plain_words(
    fake: FakeGrafana, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not six, and without the insides of a library."""
    monkeypatch.setenv("GRAFANA_TOKEN", TOKEN)
    fake.server.shutdown()
    fake.server.server_close()
    for more in ([], ["--folder", "Training runs"]):
        assert main(["dashboards", "push", "--url", fake.url, *more]) == 1
        (line,) = capsys.readouterr().err.splitlines()
        assert line == f"ddpdebug: error: Grafana did not answer at {fake.url.rstrip('/')}: connection refused"


def test_what_others_made_is_left_alone_unless_forced(
    fake: FakeGrafana, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also what that Grafana reads from files; the rest is pushed all the same."""
    file = tmp_path / "token"
    file.write_text(f"{TOKEN}\n")
    foreign = {"dashboard": {"title": "mine", "tags": None}, "meta": {}}
    fake.dashboards["ddpdebug-overview"] = foreign
    fake.dashboards["ddpdebug-fleet"] = {"dashboard": {"tags": ["ddpdebug"]}, "meta": {"provisioned": True}}
    words = ["dashboards", "push", "--url", fake.url, "--token-file", str(file)]
    assert main(words) == 1
    message = capsys.readouterr().err
    assert "did not make" in message
    assert "comes from a file" in message
    assert fake.dashboards["ddpdebug-overview"] is foreign
    assert "title" in fake.dashboards["ddpdebug-ranks"]["dashboard"]
    assert main([*words, "--force"]) == 0
    assert fake.dashboards["ddpdebug-overview"] is not foreign


def test_the_token_is_never_shown_and_never_on_the_command_line(
    fake: FakeGrafana, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not even when Grafana repeats it."""
    monkeypatch.setenv("GRAFANA_TOKEN", "wrong-secret")
    assert main(["dashboards", "push", "--url", fake.url]) == 1
    shown = capsys.readouterr()
    assert "refused" in shown.err
    assert "wrong-secret" not in shown.err + shown.out
    monkeypatch.delenv("GRAFANA_TOKEN")
    assert main(["dashboards", "push", "--url", fake.url]) == 2
    assert main(["dashboards", "push", "--url", fake.url, "--token", "x"]) == 2


@pytest.mark.parametrize("url", ["grafana:3000", "ftp://x", "http://", "http://user:secret@host"])
def test_an_address_that_is_none_is_refused(url: str) -> None:
    """Before anything is sent."""
    with pytest.raises(UsageError):
        Grafana(url, TOKEN)


def test_a_finding_becomes_one_annotation_however_often_it_is_sent(fake: FakeGrafana) -> None:
    """Two monitors, a restart: the incident's tag is looked up first; odd names survive the query string."""
    for _ in range(2):
        sink = Annotations(lambda: Grafana(fake.url, TOKEN), clock=lambda: 1000.5)
        for record in (STARTED, FindingRaised(finding=FINDING), FindingRaised(finding=FINDING, new=False), ENDED):
            sink.write(record)
    (annotation,) = fake.annotations
    assert annotation["time"] == 1_000_500
    assert set(annotation["tags"]) == {
        "ddpdebug", "run:r 1&x", "code:RANK101", "severity:critical", "rank:2", "incident:r 1&x/RANK101-1",
    }  # fmt: skip
    assert "layers.0 & more=#?" in annotation["text"]


def about(number: int) -> Finding:
    """Return one finding of many."""
    return replace(FINDING, code=f"TEST{number}", id=f"TEST{number}-1", time=f"2026-11-21T02:09:0{number}Z")


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Try again soon."""
    monkeypatch.setattr(annotations, "_PAUSE", 0.01)


FAULTS = ("starting", "broken", "too many", "token", "moved", "restarting", "proxy")


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("fault", FAULTS)
def test_what_grafana_does_not_take_waits_until_it_does(fake: FakeGrafana, fault: str) -> None:
    """Each finding once, in their order, also those that were raised meanwhile."""
    fake.fail(fault)
    sink = Annotations(lambda: Grafana(fake.url, TOKEN, timeout=60))
    sink.write(STARTED)
    for number in range(3):
        sink.write(FindingRaised(finding=about(number)))
    for _ in range(3):
        assert fake.asked.acquire(timeout=60)
    assert fake.incidents == []
    fake.fail("not any more")
    until(lambda: not sink.unsent)
    sink.write(FindingRaised(finding=about(3)))
    until(lambda: not sink.unsent)
    sink.write(ENDED)
    assert fake.incidents == ["TEST0", "TEST1", "TEST2", "TEST3"]
    assert [each["time"] % 10_000 for each in fake.annotations] == [0, 1000, 2000, 3000]


def until(done: Callable[[], bool]) -> None:
    """Wait."""
    deadline = time.monotonic() + 120
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.usefixtures("quick")
def test_an_annotation_whose_answer_was_lost_is_there_once(fake: FakeGrafana) -> None:
    """Grafana has taken it and died."""
    fake.dies = 1
    sink = Annotations(lambda: Grafana(fake.url, TOKEN, timeout=60))
    sink.write(STARTED)
    for number in range(2):
        sink.write(FindingRaised(finding=about(number)))
    until(lambda: not sink.unsent)
    sink.write(ENDED)
    assert fake.incidents == ["TEST0", "TEST1"]


@pytest.mark.parametrize(("wish", "least"), [("7", 7), ("999999", 600), ("0", 0.5), ("soon", 0.5), ("", 0.5)])
def test_grafana_says_how_long_it_wants_to_be_left_alone(fake: FakeGrafana, wish: str, least: float) -> None:
    """Up to ten minutes; otherwise pauses grow, up to one."""
    fake.status, fake.retry_after = 429, wish
    pauses: list[float] = []

    def pause(seconds: float) -> bool:
        pauses.append(seconds)
        return len(pauses) > 9

    courier = Courier(lambda: Grafana(fake.url, TOKEN, timeout=60), pause)
    assert courier.deliver(Annotation.of(FINDING, "r", 4)) is None
    assert pauses == [max(least, min(60, 0.5 * 2**tried)) for tried in range(10)]


def test_a_date_can_be_asked_for(fake: FakeGrafana) -> None:
    """As HTTP allows; one that is over asks for nothing."""
    for shift, expected in ((3600, 3600), (-3600, 0)):
        fake.status, fake.retry_after = 503, formatdate(time.time() + shift, usegmt=True)
        with pytest.raises(GrafanaError) as refused:
            Grafana(fake.url, TOKEN, timeout=60).annotate("i", "t", (), 1)
        assert refused.value.retry_after == pytest.approx(expected, abs=300)


def test_one_that_grafana_does_not_want_holds_up_no_other(fake: FakeGrafana) -> None:
    """And is told of at the end."""
    fake.unwanted = "TEST1"
    troubles: list[Trouble] = []
    sink = Annotations(lambda: Grafana(fake.url, TOKEN, timeout=60), tell=troubles.append)
    sink.write(STARTED)
    for number in range(3):
        sink.write(FindingRaised(finding=about(number)))
    until(lambda: sink.unsent == 1 and len(fake.annotations) == 2)
    sink.write(ENDED)
    assert fake.incidents == ["TEST0", "TEST2"]
    assert "1 finding not sent to Grafana" in troubles[0].message


@pytest.mark.usefixtures("quick")
def test_a_new_token_is_read_from_its_file(fake: FakeGrafana, tmp_path: Path) -> None:
    """Whoever replaces it does not restart the job; that it is refused is said once."""
    file, troubles = tmp_path / "token", list[Trouble]()
    file.write_text("old-secret")
    sink = Annotations(lambda: Grafana(fake.url, read_token(file), timeout=60), tell=troubles.append)
    sink.write(STARTED)
    sink.write(FindingRaised(finding=FINDING))
    until(lambda: bool(troubles))
    for _ in range(3):
        assert fake.asked.acquire(timeout=60)
    file.write_text(TOKEN)
    until(lambda: not sink.unsent)
    sink.write(ENDED)
    (trouble,) = troubles
    assert not trouble.is_failure
    assert "Unauthorized" in trouble.message
    assert "old-secret" not in trouble.message
    assert len(fake.annotations) == 1


def test_a_sink_that_can_send_nothing_is_given_up_with_one_line() -> None:
    """Where what it needs is not installed, or no token is given: it would be the same later."""

    def connect() -> Grafana:
        raise UsageError("grafana-api is not installed")

    class Listening:
        def write(self, record: Record) -> None:
            troubles.extend([record] if isinstance(record, Trouble) else [])

    sink, troubles = Annotations(connect), list[Trouble]()
    fanout = Fanout([sink, Listening()])
    fanout.write(STARTED)
    deadline = time.monotonic() + 60
    while not troubles and time.monotonic() < deadline:
        fanout.write(FindingRaised(finding=FINDING))
        time.sleep(0.02)
    (trouble,) = troubles
    assert (trouble.part, trouble.is_failure) == ("sink:annotations", True)
    assert "not sent to Grafana" in trouble.message
    assert "grafana-api is not installed" in trouble.message


def test_a_grafana_that_never_answers_holds_up_nobody(fake: FakeGrafana) -> None:
    """The run ends while the first request still waits for its answer; so does one that was never taken."""
    fake.held = threading.Event()
    troubles: list[Trouble] = []
    sink = Annotations(lambda: Grafana(fake.url, TOKEN, timeout=300), tell=troubles.append)
    sink.write(STARTED)
    for number in range(3):
        sink.write(FindingRaised(finding=about(number)))
    assert fake.asked.acquire(timeout=60)
    sink.write(ENDED)
    assert not fake.held.is_set()
    assert fake.incidents == []
    assert "3 findings not sent to Grafana" in troubles[0].message
    fake.held.set()


def test_findings_wait_up_to_a_number(fake: FakeGrafana, monkeypatch: pytest.MonkeyPatch) -> None:
    """Later ones are counted, and left for later: nothing overtakes them."""
    monkeypatch.setattr(annotations, "_WAITING", 2)
    fake.fail("starting")
    sink = Annotations(lambda: Grafana(fake.url, TOKEN, timeout=60))
    sink.write(STARTED)
    for number in range(5):
        sink.write(FindingRaised(finding=about(number)))
    assert (len(sink._waiting), sink.unsent) == (2, 5)
    sink.write(ENDED)


class Run:
    """A run directory whose findings Grafana did not take."""

    def __init__(self, directory: Path, fake: FakeGrafana, findings: int = 3, run_id: str = "r1") -> None:
        self.directory = directory
        self.troubles: list[Trouble] = []
        sink = Annotations(
            lambda: Grafana(fake.url, TOKEN, timeout=60), directory / ANNOTATIONS, tell=self.troubles.append
        )
        fanout = Fanout([RunDirectory(directory, 0), sink])
        fanout.write(replace(STARTED, run_id=run_id, directory=directory, config={"grafana_url": fake.url}))
        for number in range(findings):
            fanout.write(FindingRaised(finding=about(number)))
        fanout.write(ENDED)
        fanout.close()
        sink._thread.join(60)  # as the process's end would


@pytest.fixture
def _token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRAFANA_TOKEN", TOKEN)


@pytest.mark.usefixtures("_token", "quick")
def test_what_a_run_has_left_is_sent_by_the_command_that_it_names(
    fake: FakeGrafana, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In its order, each once, however often; the token is in no file."""
    fake.fail("starting")
    run = Run(tmp_path / "run", fake)
    (trouble,) = run.troubles
    assert f"ddpdebug annotations flush {run.directory}" in trouble.message[:300]
    fake.fail("not any more")
    for sent, there in ((3, 0), (0, 3)):
        assert main(["annotations", "flush", str(run.directory)]) == 0
        assert f"{sent} annotations sent, {there} were there" in capsys.readouterr().out
    (run.directory / ANNOTATIONS).write_text('x\n{"sent": 3}\n[]\n')  # damaged: Grafana is asked
    assert main(["annotations", "flush", str(run.directory)]) == 0
    assert fake.incidents == ["TEST0", "TEST1", "TEST2"]
    assert [each["time"] % 10_000 for each in fake.annotations] == [0, 1000, 2000]
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and TOKEN in path.read_text(errors="replace")]


@pytest.mark.usefixtures("_token", "quick")
def test_a_command_that_cannot_send_says_so_and_can_be_called_again(
    fake: FakeGrafana, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was sent before Grafana went stays sent."""
    fake.fail("starting")
    run = Run(tmp_path / "run", fake)
    monkeypatch.setattr("ddpdebug.commands.annotations._PATIENCE", 0.2)
    assert main(["annotations", "flush", str(run.directory)]) == 1
    shown = capsys.readouterr()
    assert "3 were not sent" in shown.err
    assert "0 annotations sent" in shown.out
    fake.fail("not any more")
    fake.unwanted = "TEST1"
    assert main(["annotations", "flush", str(run.directory)]) == 1
    assert "refused 1: " in capsys.readouterr().err
    fake.unwanted = ""
    assert main(["annotations", "flush", str(run.directory)]) == 0
    assert fake.incidents == ["TEST0", "TEST2", "TEST1"]


@pytest.mark.usefixtures("_token", "quick")
def test_runs_that_were_set_aside_are_sent_too(fake: FakeGrafana, tmp_path: Path) -> None:
    """A restart in the same directory has moved the first run away, with its marks."""
    fake.fail("starting")
    Run(tmp_path / "run", fake, findings=2, run_id="first")
    Run(tmp_path / "run", fake, findings=1, run_id="second")
    fake.fail("not any more")
    for _ in range(2):
        assert main(["annotations", "flush", str(tmp_path / "run")]) == 0
    runs = [tag for each in fake.annotations for tag in each["tags"] if tag.startswith("run:")]
    assert runs == ["run:first", "run:first", "run:second"]


_HOLDS = """
import sys
from pathlib import Path
from ddpdebug.disk import Disk
from ddpdebug.grafana.annotations import Sent
sent = Sent(Path(sys.argv[1]), Disk())
print("held", flush=True)
sys.stdin.read()
"""


@pytest.mark.usefixtures("_token", "quick")
def test_a_run_that_goes_on_sends_by_itself(
    fake: FakeGrafana, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two that ask Grafana at once would both send."""
    fake.fail("starting")
    run = Run(tmp_path / "run", fake)
    fake.fail("not any more")
    words = [sys.executable, "-c", _HOLDS, str(run.directory / ANNOTATIONS)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        assert main(["annotations", "flush", str(run.directory)]) == 2
        assert "goes on and sends its findings by itself" in capsys.readouterr().err
        other.communicate()
    assert main(["annotations", "flush", str(run.directory)]) == 0
    assert len(fake.annotations) == 3


@pytest.mark.usefixtures("_token")
@pytest.mark.parametrize("wrong", ["no run", "no address", "no token"])
def test_a_command_that_lacks_something_says_what(
    tmp_path: Path, wrong: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before anything is sent."""
    if wrong != "no run":
        config = {"grafana_url": "http://127.0.0.1:1"} if wrong == "no token" else {}
        RunDirectory(tmp_path, 0).write(replace(STARTED, config=config))
    if wrong == "no token":
        monkeypatch.delenv("GRAFANA_TOKEN")
    assert main(["annotations", "flush", str(tmp_path)]) == 2
    message = {"no run": "not a run directory", "no address": "--url", "no token": "GRAFANA_TOKEN"}[wrong]
    assert message in capsys.readouterr().err


_HANGS_UP = """
import signal, socket, sys
from ddpdebug.grafana.annotations import Annotations
from ddpdebug.schema.finding import Finding, Severity
from ddpdebug.sinks import FindingRaised, RunEnded

class HangsUp:
    def annotate(self, *args):
        ours, theirs = socket.socketpair()
        theirs.close()
        ours.send(b"POST")

signal.signal(signal.SIGPIPE, signal.SIG_DFL)
if "attached" in sys.argv:
    told = []
    sink = Annotations(HangsUp, tell=told.append)
    sink.write(FindingRaised(finding=Finding(code="RANK101", severity=Severity.ERROR, title="x", id="RANK101-1")))
    sink.write(RunEnded(reason="finished", exit_code=0, steps={}))
    assert "BrokenPipeError" in told[0].message
print("trained to the end")
"""


@pytest.mark.parametrize("attached", [False, True])
def test_a_grafana_that_hangs_up_does_not_end_a_job_with_sigpipe_at_its_default(*, attached: bool) -> None:
    """Python ignores that signal; a job may not."""
    words = [sys.executable, "-c", _HANGS_UP, *(["attached"] if attached else [])]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, "trained to the end\n"), done.stderr


def test_a_real_grafana_takes_all_and_gives_it_back(request: pytest.FixtureRequest) -> None:
    """Behind --grafana-url; the token is that of GRAFANA_TOKEN."""
    url = request.config.getoption("--grafana-url")
    if not url:
        pytest.skip("no --grafana-url")
    import os

    grafana = Grafana(url, os.environ["GRAFANA_TOKEN"])
    for name, dashboard in shipped().items():
        grafana.push(dashboard)
        back = grafana._call("GET", f"/dashboards/uid/ddpdebug-{name}")["dashboard"]
        assert [panel["title"] for panel in back["panels"]] == [panel["title"] for panel in dashboard["panels"]]
    incident = f"test-{time.time_ns()}"
    assert grafana.annotate(incident, "a test", ["run:test"], time.time_ns() // 1_000_000)
    assert not grafana.annotate(incident, "a test", ["run:test"], time.time_ns() // 1_000_000)
    with pytest.raises(GrafanaError):
        Grafana(url, "wrong").push(shipped()["fleet"])
