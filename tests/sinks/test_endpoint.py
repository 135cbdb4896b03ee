"""The server of the metrics against scrapers that are slow, silent, malformed, or not allowed in."""

from __future__ import annotations

import base64
import errno
import gzip
import http.client
import json
import os
import shutil
import signal
import socket
import ssl
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest

from ddpdebug.monitor.sinks import ports_of_the_job
from ddpdebug.sinks.prometheus import listening, server as serving
from ddpdebug.sinks.prometheus.exporter import PrometheusSink
from ddpdebug.sinks.prometheus.exposition import OPENMETRICS, TEXT
from ddpdebug.sinks.prometheus.server import Endpoint, Form, Page, Serving, json_app
from tests.support.machine import until


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a certificate for 127.0.0.1 that signs itself, with its key in the same file."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    folder = tmp_path_factory.mktemp("tls")
    words = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    words += ["-days", "2", "-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run([*words, "-keyout", folder / "key", "-out", folder / "cert"], check=True, capture_output=True)
    both = folder / "both.pem"
    both.write_bytes((folder / "cert").read_bytes() + (folder / "key").read_bytes())
    return both


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    """Close what a test opens."""
    with ExitStack() as made:
        yield made


def served(stack: ExitStack, **serving: Path | None) -> PrometheusSink:
    """Serve on any free port."""
    sink = PrometheusSink(0, serving=Serving(**serving))  # type: ignore[arg-type]
    sink.serve()
    stack.callback(sink.close)
    return sink


def get(url: str | None, **options: object) -> str:
    """Fetch."""
    assert url is not None
    with urllib.request.urlopen(url, timeout=60, **options) as answer:  # type: ignore[arg-type]
        return str(answer.read().decode())


def place_of(sink: PrometheusSink) -> tuple[str, int]:
    """Return host and port."""
    host, _, port = sink.url.split("/")[2].partition(":")
    return host, int(port)


def test_tls_is_served_to_those_who_trust_the_certificate(stack: ExitStack, certificate: Path) -> None:
    """And a client that speaks no TLS gets nothing."""
    sink = served(stack, certificate=certificate)
    assert sink.url.startswith("https://")
    assert "ddpdebug_" in get(sink.url, context=ssl.create_default_context(cafile=str(certificate)))
    with pytest.raises(OSError):
        get(sink.url.replace("https", "http"))


def test_a_client_certificate_can_be_demanded(stack: ExitStack, certificate: Path) -> None:
    """Who has none is not served."""
    sink = served(stack, certificate=certificate, client_ca=certificate)
    context = ssl.create_default_context(cafile=str(certificate))
    with pytest.raises(OSError):
        get(sink.url, context=context)
    context.load_cert_chain(certificate)
    assert "ddpdebug_" in get(sink.url, context=context)


def test_a_client_that_never_finishes_its_handshake_stops_nobody(stack: ExitStack, certificate: Path) -> None:
    """The server goes on while it waits for the handshake."""
    sink = served(stack, certificate=certificate)
    silent = [stack.enter_context(socket.create_connection(place_of(sink))) for _ in range(3)]
    assert silent
    assert "ddpdebug_" in get(sink.url, context=ssl.create_default_context(cafile=str(certificate)))


def test_a_password_is_asked_for(stack: ExitStack, tmp_path: Path) -> None:
    """For the metrics and for the list of targets; wrong and broken ones are refused."""
    file = tmp_path / "password"
    file.write_text("prometheus:geheim:ü\nignored\n", encoding="utf-8")
    sink = served(stack, password_file=file)
    right = base64.b64encode("prometheus:geheim:ü".encode()).decode()
    for path in ("metrics", "sd"):
        url = sink.url.replace("metrics", path)
        for header in (None, "Basic", "Basic !", "Basic ü", "Basic cHJvbWV0aGV1czp4", f"Bearer {right}"):
            request = urllib.request.Request(url, headers={} if header is None else {"Authorization": header})
            with pytest.raises(urllib.error.HTTPError) as refused:
                get(request)  # type: ignore[arg-type]
            assert refused.value.code == 401
            refused.value.close()
        assert get(urllib.request.Request(url, headers={"Authorization": f"Basic {right}"}))  # type: ignore[arg-type]


@pytest.mark.parametrize("content", ["", "\n", "name", "name:"])
def test_a_password_file_without_a_password_is_reported_and_nothing_is_served(tmp_path: Path, content: str) -> None:
    """Never fall back to serving everybody."""
    file = tmp_path / "password"
    file.write_text(content)
    with pytest.raises(OSError, match="name:password"):
        PrometheusSink(0, serving=Serving(password_file=file)).serve()


_NONSENSE = (
    b"\x00\xff\r\n\r\n",
    b"GET\r\n\r\n",
    b"GET / HTTP/9.9\r\n\r\n",
    b"POST /metrics HTTP/1.1\r\n\r\n",
    b"GET /" + b"x" * 100_000,
    b"GET /metrics HTTP/1.1\r\nA: " + b"y" * 70_000 + b"\r\n\r\n",
)


@pytest.mark.parametrize("sent", _NONSENSE)
def test_nonsense_is_survived_in_silence(stack: ExitStack, sent: bytes, capfd: pytest.CaptureFixture[str]) -> None:
    """The next scraper is served, and the job's terminal shows nothing."""
    sink = served(stack)
    with socket.create_connection(place_of(sink), timeout=60) as client:
        try:
            client.sendall(sent)
            client.shutdown(socket.SHUT_WR)
            while client.recv(65536):
                pass
        except OSError:
            pass  # it hung up, which is right
    assert "ddpdebug_" in get(sink.url)
    assert capfd.readouterr() == ("", "")


def test_scrapers_that_hang_cannot_use_up_the_process(stack: ExitStack) -> None:
    """There is a limit on connections, hence on threads, and a place is free again when one goes."""
    sink = served(stack)
    hanging = []
    for _ in range(80):
        client = socket.create_connection(place_of(sink), timeout=60)
        stack.callback(client.close)
        with suppress(OSError):
            client.sendall(b"GET /metrics HT")
        hanging.append(client)
    refused = 80 - serving._MAX_CONNECTIONS
    assert until(lambda: sum(map(_is_hung_up_on, hanging)) >= refused)
    for client in hanging:
        client.close()
    assert until(lambda: _answers(sink.url))


def _is_hung_up_on(client: socket.socket) -> bool:
    client.setblocking(False)
    try:
        return client.recv(1) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True


def _answers(url: str) -> bool:
    try:
        return "ddpdebug_" in get(url)
    except OSError:
        return False


def test_fifty_scrapers_at_once_get_an_answer_or_none(stack: ExitStack) -> None:
    """Nobody waits: who finds no place is hung up on, and most find one; the job's own threads keep their numbers."""
    sink = served(stack)
    answers: list[bytes] = []
    place, number = place_of(sink), int(threading.Thread().name.rpartition("-")[2])
    together = threading.Barrier(50)

    def scrape() -> None:
        together.wait(60)
        with suppress(OSError), socket.create_connection(place, timeout=60) as client:
            client.sendall(b"GET /sd HTTP/1.0\r\n\r\n")
            received = b""
            while data := client.recv(65536):
                received += data
            answers.append(received)

    threads = [threading.Thread(target=scrape, name="scraper") for _ in range(50)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    whole = [answer for answer in answers if answer.startswith(b"HTTP/1.0 200 OK") and answer.endswith(b"[]")]
    assert whole
    assert all(answer == b"" or answer in whole for answer in answers)
    assert int(threading.Thread().name.rpartition("-")[2]) == number + 1


def test_what_a_server_has_open_is_shut_when_it_closes(stack: ExitStack) -> None:
    """Also where a forked child holds the same sockets: nobody waits for an answer that does not come."""
    sink = served(stack)
    client = stack.enter_context(socket.create_connection(place_of(sink), timeout=60))
    client.sendall(b"GET /metrics HT")
    get(sink.url)  # so that the client before it was accepted
    child = os.fork()
    if child == 0:
        time.sleep(60)
        os._exit(0)
    stack.callback(os.waitpid, child, 0)
    stack.callback(os.kill, child, signal.SIGKILL)
    sink.close()
    assert client.recv(1) == b""
    with pytest.raises(OSError):
        socket.create_connection(place_of(sink), timeout=60)


@pytest.mark.parametrize("sent", [b"", b"GET /metrics HTTP/1.1\r\n"])
def test_who_does_not_finish_is_hung_up_on(stack: ExitStack, sent: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a time limit that dribbling does not extend."""
    monkeypatch.setattr(serving, "_TIMEOUT", 1.0)
    sink = served(stack)
    with socket.create_connection(place_of(sink), timeout=0.3) as client:
        client.sendall(sent)
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            try:
                assert client.recv(1) == b""
                return
            except TimeoutError:
                if sent:
                    client.sendall(b"a")
            except ConnectionError:
                return
    pytest.fail("it may dribble for ever")


def test_who_does_not_read_is_hung_up_on(stack: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
    """The answer is not kept for ever."""
    monkeypatch.setattr(serving, "_TIMEOUT", 1.0)
    much = Endpoint({"/x": json_app(lambda: "x" * (32 << 20))}, "127.0.0.1", 0, Serving())
    stack.callback(much.close)
    ended, end = threading.Event(), much._server.shutdown_request
    monkeypatch.setattr(much._server, "shutdown_request", lambda request: (end(request), ended.set()))
    with socket.create_connection(("127.0.0.1", much.port), timeout=60) as client:
        client.sendall(b"GET /x HTTP/1.1\r\n\r\n")
        assert ended.wait(60)
        received = 0
        with suppress(ConnectionResetError):
            while data := client.recv(1 << 20):
                received += len(data)
        assert received < 32 << 20


class _Full(socket.socket):
    """A listening socket of a process that may open no more files."""

    asked = 0
    full = True

    def accept(self) -> tuple[socket.socket, object]:
        self.asked += 1
        if self.full:
            raise OSError(errno.EMFILE, "too many open files")
        return super().accept()


@pytest.mark.smoke
def test_without_free_files_the_server_does_not_spin(stack: ExitStack) -> None:
    """It asks again now and then, and serves who has waited."""
    listener = _Full()
    listener.bind(("127.0.0.1", 0))
    listener.listen()
    ticks, again = [0], threading.Event()

    def every() -> None:
        ticks[0] += 1
        if listener.asked >= 3:
            again.set()

    server = serving.Server(listener, json_app(lambda: [1]), None, every)
    stack.callback(server.close)
    client = stack.enter_context(socket.create_connection(listener.getsockname(), timeout=60))
    assert again.wait(60)
    assert listener.asked <= ticks[0] + 1
    listener.full = False
    client.sendall(b"GET /x HTTP/1.0\r\n\r\n")
    assert client.recv(65536).startswith(b"HTTP/1.0 200 OK")


def test_unknown_paths_are_told_what_there_is(stack: ExitStack) -> None:
    """For who opens the address in a browser."""
    sink = served(stack)
    with pytest.raises(urllib.error.HTTPError) as error:
        get(sink.url.replace("metrics", "nothing"))
    assert error.value.code == 404
    assert error.value.read() == b"there is /metrics, /sd\n"
    error.value.close()


def test_what_is_called_regularly_may_fail(stack: ExitStack) -> None:
    """The server goes on."""
    called = threading.Event()

    def fails() -> None:
        called.set()
        raise ValueError

    endpoint = Endpoint({"/x": json_app(lambda: [1])}, "127.0.0.1", 0, Serving(every=fails))
    stack.callback(endpoint.close)
    assert called.wait(60)
    assert json.loads(get(f"http://{endpoint.address}/x")) == [1]


class Counted:
    """A page whose text is the number of its renderings, on a clock of its own."""

    def __init__(self, cost: float = 0.01) -> None:
        self.now = self.spent = 0.0
        self.rendered, self.made, self.cost = 0, 0, cost
        self.page = Page(self._take, self._form, clock=lambda: self.now, spent=lambda: self.spent)

    def _take(self) -> bytes:
        self.rendered += 1
        self.spent += self.cost
        return str(self.rendered).encode()

    def _form(self, environ: Mapping[str, Any]) -> Form:
        kind = environ.get("HTTP_ACCEPT", "plain")
        return kind, lambda text: self._make(text + kind[:1].encode())

    def _make(self, body: bytes) -> bytes:
        self.made += 1
        self.spent += self.cost / 10
        return body

    def ask(self, **environ: str) -> tuple[str, dict[str, str], bytes]:
        """Return status, headers and body."""
        head: list[Any] = []
        body = b"".join(self.page(environ, lambda status, headers: head.extend((status, dict(headers)))))
        return head[0], head[1], body


def test_rendering_has_a_budget_however_often_somebody_asks() -> None:
    """A hundred scrapes a second get the last answer; in the long run 0.5 % of the time goes into rendering."""
    counted = Counted()
    answers = []
    for _ in range(100 * 60):
        counted.now += 0.01
        answers.append(counted.ask()[2])
    assert answers[8] == b"9p"  # at first every answer is new
    assert 36 <= counted.rendered <= 39  # 0.1 s at once, then 0.3 s of a minute, each 11 ms
    counted.now += 60
    assert counted.ask()[2] == b"%dp" % counted.rendered


def test_every_client_is_answered_from_the_same_text_also_without_budget() -> None:
    """Other headers are another form of it, made once; nobody is refused."""
    counted = Counted(cost=5.0)
    clients = [{"HTTP_ACCEPT": kind, "HTTP_ACCEPT_ENCODING": way} for kind in ("plain", "open") for way in ("", "gzip")]
    for _ in range(3):
        for client in clients:
            status, headers, body = counted.ask(**client, HTTP_USER_AGENT="x", QUERY_STRING=str(counted.made))
            assert (status, headers["Content-Type"]) == ("200 OK", client["HTTP_ACCEPT"])
            assert (headers.get("Content-Encoding") == "gzip") is bool(client["HTTP_ACCEPT_ENCODING"])
            plain = gzip.decompress(body) if client["HTTP_ACCEPT_ENCODING"] else body
            assert plain == b"1" + client["HTTP_ACCEPT"][:1].encode()
    assert (counted.rendered, counted.made) == (1, 2)
    assert counted.spent == pytest.approx(6)


def test_forms_are_paid_for_from_the_same_budget() -> None:
    """Who asks in many ways makes the text older, and costs no more."""
    counted = Counted(cost=0.1)
    for second in range(1000):
        counted.now = float(second)
        for kind in ("plain", "open"):
            counted.ask(HTTP_ACCEPT=kind)
    assert counted.spent <= 0.1 + 0.005 * 1000 + 0.12


def test_a_text_that_cannot_be_taken_costs_one_answer() -> None:
    """The lock is free again, and the last text stays."""
    counted = Counted(cost=0.0)
    counted.ask()
    taken = counted.page._take
    counted.page._take = lambda: taken() + (1 // 0).to_bytes()
    with pytest.raises(ZeroDivisionError):
        counted.ask()
    counted.page._take = taken
    assert counted.ask()[0] == "200 OK"


def test_who_can_be_answered_does_not_wait_for_a_rendering() -> None:
    """One renders for long, another one gets the last text meanwhile."""
    begun, go = threading.Event(), threading.Event()
    texts = iter([b"old", b"new"])

    def take() -> bytes:
        text = next(texts)
        if text == b"new":
            begun.set()
            assert go.wait(60)
        return text

    page = Page(take, lambda _: ("plain", bytes))
    answers: list[bytes] = []
    head = lambda status, headers: None  # noqa: E731 - a start_response
    assert b"".join(page({}, head)) == b"old"
    slow = threading.Thread(target=lambda: answers.append(b"".join(page({}, head))))
    slow.start()
    assert begun.wait(60)
    assert b"".join(page({}, head)) == b"old"
    go.set()
    slow.join(60)
    assert answers == [b"new"]


@pytest.mark.parametrize(
    ("accept", "kind"),
    [
        ("*/*", TEXT),
        ("text/html,application/xhtml+xml,*/*;q=0.8", TEXT),
        ("text/plain;version=0.0.4;q=0.5", TEXT),
        ("application/openmetrics-text;version=0.0.1;q=0.75,text/plain;version=0.0.4;q=0.5", TEXT),
        ("application/openmetrics-text", OPENMETRICS),
        ("application/openmetrics-text;version=1.0.0;q=0.8,text/plain;version=0.0.4;q=0.5", OPENMETRICS),
        ("application/vnd.google.protobuf,application/openmetrics-text;version=1.0.0;escaping=dots", OPENMETRICS),
    ],
)  # fmt: skip
def test_curl_browsers_and_prometheus_get_what_they_read(stack: ExitStack, accept: str, kind: str) -> None:
    """OpenMetrics for those who ask for it, packed for those who can unpack it."""
    sink = served(stack)
    for packed in (False, True):
        headers = {"Accept": accept, **({"Accept-Encoding": "deflate, gzip;q=1.0"} if packed else {})}
        with urllib.request.urlopen(urllib.request.Request(sink.url, headers=headers), timeout=60) as reply:
            body = gzip.decompress(reply.read()) if packed else reply.read()
            assert reply.headers["Content-Type"] == kind
            assert (reply.headers["Content-Encoding"] == "gzip") is packed
        assert body.endswith(b"# EOF\n") is (kind == OPENMETRICS)
        assert body.count(b"\nddpdebug_steps_total{") == 1


def test_only_get_is_answered(stack: ExitStack) -> None:
    """Nothing can be changed here."""
    sink = served(stack)
    with pytest.raises(urllib.error.HTTPError) as refused:
        get(urllib.request.Request(sink.url, data=b"x", method="POST"))  # type: ignore[arg-type]
    assert refused.value.code == 405
    refused.value.close()


def test_a_port_that_the_job_will_want_is_not_taken(stack: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the system chooses it, the next one is taken instead, and the other one is free again."""
    bound = listening._bound
    first = bound("127.0.0.1", 0)
    port = first.getsockname()[1]
    choices = [first]
    monkeypatch.setattr(listening, "_bound", lambda host, port: choices.pop() if choices else bound(host, port))
    served = Endpoint({"/x": json_app(lambda: 1)}, "127.0.0.1", 0, Serving(avoid=frozenset({port})))
    stack.callback(served.close)
    assert choices == []
    assert served.port != port
    assert first.fileno() == -1  # closed


def test_the_ports_of_the_job_are_read_from_its_environment() -> None:
    """MASTER_PORT and what else ends so; addresses and nonsense are no ports."""
    environ = {"MASTER_PORT": "29500", "API_PORT": "41000", "REDIS_PORT": "tcp://1.2.3.4:6379", "A_PORT": "9" * 99}
    assert ports_of_the_job({**environ, "DDPDEBUG_METRICS_PORT": "1", "PORTS": "7"}) == {29500, 41000}


@pytest.mark.parametrize("name", ["127.0.0.1", "localhost", "LOCALHOST:9400", "[::1]:9400", "10.0.0.1:80", None])
def test_this_machine_is_served_by_its_names(stack: ExitStack, name: str | None) -> None:
    """Addresses, localhost, its own name, and scrapers that send no name."""
    assert _status(stack, name) == 200
    assert _status(stack, socket.gethostname()) == 200


@pytest.mark.parametrize("name", ["evil.example", "evil.example:9400", "127.0.0.1.evil.example", "x@localhost"])
def test_a_name_that_was_pointed_here_is_refused(stack: ExitStack, name: str) -> None:
    """A web page that resolves to 127.0.0.1 cannot read the metrics."""
    assert _status(stack, name) == 421


def test_an_endpoint_for_everybody_goes_by_any_name(stack: ExitStack) -> None:
    """Only the loopback address has names of its own."""
    assert _status(stack, "node7.cluster", host="0.0.0.0") == 200


def _status(stack: ExitStack, name: str | None, host: str = "127.0.0.1") -> int:
    served = Endpoint({"/x": json_app(lambda: 1)}, host, 0, Serving())
    stack.callback(served.close)
    connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=60)
    stack.callback(connection.close)
    connection.putrequest("GET", "/x", skip_host=True)
    if name is not None:
        connection.putheader("Host", name)
    connection.endheaders()
    return connection.getresponse().status
