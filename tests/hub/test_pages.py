"""The pages of the hub: what they show is in the run directories, hostile names stay text, notes are kept."""

from __future__ import annotations

import html.parser
import re
import threading
import urllib.parse
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ddpdebug.hub.app import create
from ddpdebug.hub.auth import COOKIE, Auth
from ddpdebug.hub.pages import routes
from ddpdebug.hub.store import Store
from ddpdebug.reports.html import COLORS
from ddpdebug.reports.page import report
from tests.hub.runs import HUNG, Answer, MadeUp, Site, bring, finding, serving
from tests.support.browser import Browser
from tests.support.machine import until

EVIL = '"><script>document.title="taken"</script><img src="http://198.51.100.1/x.png" onerror="alert(1)">\n\x1b[2J'
METRICS = "http://node01:9400/metrics"
HEALTHY = MadeUp(run="healthy", time="2026-11-21T08:01:00Z", metrics_url=METRICS)
ILL = MadeUp(run="ill001", time="2026-11-21T08:02:00Z", findings=[finding()], ended=None, metrics_url=METRICS)
STUCK = MadeUp(
    run="stuck1", time="2026-11-21T08:03:00Z", waits=HUNG, ended=None, metrics_url="javascript:alert(1)",
    findings=[finding("HANG501", title="a rank waits", evidence={"hang": 1, "stacks": {"1": ["train.py:88 load"]}})],
)  # fmt: skip
HOSTILE = MadeUp(
    run="evil01", time="2026-11-21T08:04:00Z", command=("train.py", EVIL), node=EVIL, versions={EVIL: EVIL},
    ended=EVIL,
    findings=[finding(title=EVIL, subject=(EVIL,), location=EVIL, evidence={EVIL: EVIL, "bundle": EVIL}, causes=[EVIL],
                      actions=[EVIL], phase=EVIL), finding("NUM301", title=EVIL, subject=("layer",), id=EVIL)],
)  # fmt: skip
RUNS = (HEALTHY, ILL, STUCK, HOSTILE)


class Hub:
    """A store with runs, and its site."""

    def __init__(self, folder: Path, store: Store, site: Site) -> None:
        self.folder, self.store, self.site = folder, store, site

    def add(self, run: MadeUp, source: str = "push") -> None:
        bring(self.store, run.write(self.folder / run.run), source)


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    store = Store(tmp_path / "hub.db")
    with serving(create(store, Auth(), pages=routes(store))) as site:
        yield Hub(tmp_path, store, site)
    store.close()


@pytest.fixture
def full(hub: Hub) -> Hub:
    for run in RUNS:
        hub.add(run)
    return hub


class Elements(html.parser.HTMLParser):
    """Collects elements, attributes and addresses of a page, and checks that what is opened is closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: set[str] = set()
        self.addresses: list[str] = []
        self.open: list[str] = []
        self.text = ""
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_startendtag(tag, attrs)
        if tag not in {"meta", "link", "br", "input", "img"}:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes |= {name for name, _ in attrs}
        self.addresses += [value or "" for name, value in attrs if name in {"src", "href", "action", "data"}]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += f" {data}"


def seen(hub: Hub, path: str) -> str:
    """Return the text of a page that must be there."""
    answer = hub.site.get(path)
    assert answer.status == 200, answer.text
    return " ".join(Elements(answer.text).text.split())


def order(hub: Hub, path: str) -> list[str]:
    """Return the runs of a list as it has them."""
    found = re.findall(r'class="who"><a href="/runs/([^"]+)"', hub.site.get(path).text)
    return [key.partition("-")[2] for key in found]


def test_the_list_of_runs_has_what_is_needed_to_see_who_is_ill(full: Hub) -> None:
    """State, finding, step and curve of each; those first that somebody should look at."""
    text = seen(full, "/")
    assert "all 4 running" not in text
    for part in ("hung 1", "ill 1", "finished 2", "RANK104", "HANG501", "node01", "2 ranks", "39", "5 steps/s"):
        assert part in text
    assert order(full, "/") == ["stuck1", "ill001", "evil01", "healthy"]  # of those that have ended, findings first
    assert "2 runs need attention: 1 hung, 1 ill." in text
    assert full.site.get("/").text.count("<title>loss from 2 to ") == len(RUNS)


def test_the_list_is_filtered_and_sorted(full: Hub) -> None:
    """By state, by words, by the code of a finding; what is wrong in the question is said."""
    assert order(full, "/?sort=newest") == ["evil01", "stuck1", "ill001", "healthy"]
    assert order(full, "/?state=ill") == ["ill001"]
    assert order(full, "/?code=hang") == ["stuck1"]
    assert order(full, "/?q=STUCK1") == ["stuck1"]
    assert order(full, "/?q=%25") == []  # no wildcard
    assert order(full, "/?q=_") == []
    assert order(full, "/?q=" + urllib.parse.quote("' OR 1=1 --")) == []
    assert order(full, "/?page=1") == []
    assert order(full, "/?q=%00%ff&code=%00") == []
    for wrong in ("state=x", "sort=started;drop", "page=-1", "page=x", "page=99999999999999"):
        answer = full.site.get(f"/?{wrong}")
        assert answer.status == 400, wrong
        assert "there is no" in answer.text or "is no valid number" in answer.text
    assert "no run is like that" in seen(full, "/?q=nothing")


def test_an_empty_hub_says_how_runs_come(hub: Hub) -> None:
    """The first page that anybody sees."""
    assert "no runs yet" in seen(hub, "/")
    assert "No running run needs attention." in seen(hub, "/")
    assert "nothing that asks for attention" in seen(hub, "/groups")


def test_a_run_has_its_findings_with_evidence_and_runbook(full: Hub) -> None:
    """Curves, ranks, what ran."""
    text = seen(full, f"/runs/{ILL.key}")
    for part in (
        "RANK104 · critical",
        "rank 1 = 0.2",
        "a cause",
        "do this",
        "Diagnosis.",
        "--lr",
        "0.1",
        "torch",
        "2.13.0",
    ):
        assert part in text, part
    page = full.site.get(f"/runs/{ILL.key}").text
    assert page.count('<svg viewBox="0 0 900') == 3
    assert f'href="{METRICS}"' in page
    assert METRICS not in full.site.get(f"/runs/{HEALTHY.key}").text  # nobody answers there any more
    assert "differ from step 30" in page
    assert ">rank 1</text>" in page


def test_a_hang_shows_who_is_waited_for_and_the_stacks(full: Hub) -> None:
    """At the head of its page."""
    text = seen(full, f"/runs/{STUCK.key}")
    assert "ranks wait for rank 1 at train.py:88: stuck" in text
    assert "train.py:88 load" in text
    assert "javascript:" not in full.site.get(f"/runs/{STUCK.key}").text


@pytest.mark.parametrize("path", ["/", "/groups", "/runs", "/group"])
def test_hostile_names_stay_text(full: Hub, path: str) -> None:
    """On each page, in attributes, addresses and pictures."""
    groups = re.findall(r'href="(/groups/RANK104[^"]+)"', full.site.get("/groups").text)
    hostile = {
        "/runs": f"/runs/{HOSTILE.key}",
        "/group": next(group for group in groups if not group.endswith("%20lr")),
    }
    full.site.get(f"/runs/{HOSTILE.key}", {"text": EVIL, "author": EVIL})
    text = full.site.get(hostile.get(path, path)).text
    found = Elements(text)
    assert found.tags.count("script") == 1
    assert not {*found.tags} & {"img", "iframe", "object", "embed", "base", "style"}
    assert not {name for name in found.attributes if name.startswith("on")} | ({"style"} & found.attributes)
    assert all(re.match(r"/(?!/)|#", address) for address in found.addresses), found.addresses
    assert "198.51.100.1" in found.text or path == "/"
    assert "\x1b" not in text


def test_a_group_has_its_runs_and_its_runbook(hub: Hub) -> None:
    """Those without it are not there."""
    for number in range(12):
        found = [finding(ranks=(1,))] if number < 6 else []
        hub.add(MadeUp(run=f"r{number:05}", time=f"2026-11-21T08:{number:02}:00Z", findings=found))
    for path in ("/groups", "/groups/RANK104%20lr"):
        assert "in 6 runs" in seen(hub, path)
    assert "r00007" not in seen(hub, "/groups/RANK104%20lr")
    assert "Diagnosis." in seen(hub, "/groups/RANK104%20lr")
    assert "r00003" in seen(hub, "/groups/RANK104%20lr")
    assert hub.site.get("/groups/nothing").status == 404
    hub.add(MadeUp(run="long", findings=[finding("NUM301", subject=(f"{'x' * 299} {'y' * 299}/{'z' * 299}",))]))
    links = re.findall(r'href="(/groups/NUM[^"]+)"', hub.site.get("/groups").text)
    assert [hub.site.get(link).status for link in links] == [200]


def test_a_group_is_acknowledged_until_it_is_seen_again(hub: Hub) -> None:
    """And muted for a time, with a name and a text."""
    hub.add(ILL)
    page = "/groups/RANK104%20lr"
    answer = hub.site.get(page, {"kind": "ack", "author": "A. Person", "text": "is being mended"})
    assert (answer.status, answer.headers["location"]) == (303, page)
    assert "1 acknowledged or muted" in seen(hub, "/groups")
    assert "is being mended" in seen(hub, page)
    hub.add(MadeUp(run="another", findings=[finding()]))
    text = seen(hub, "/groups")
    assert "seen again since" in text
    assert "1 acknowledged or muted" not in text
    assert hub.site.get(page, {"kind": "mute", "hours": "24"}).status == 303
    assert "1 acknowledged or muted" in seen(hub, "/groups")


def test_notes_are_kept_and_wrong_ones_refused(full: Hub) -> None:
    """With a clear answer."""
    page = f"/runs/{ILL.key}"
    assert full.site.get(page, {"text": "the lr was set by hand", "author": "B"}).status == 303
    assert "the lr was set by hand" in seen(full, page)
    for wrong, status in (
        ({"text": " "}, 400),
        ({"kind": "ack"}, 400),
        ({"kind": "delete", "text": "x"}, 400),
        ({"text": "x" * 20_000}, 413),
    ):
        assert full.site.get(page, wrong).status == status, wrong
    assert full.site.get("/runs/nothing", {"text": "x"}).status == 404
    assert full.site.get("/groups/nothing", {"kind": "ack"}).status == 404
    assert full.site.get("/groups/RANK104%20lr", {"kind": "mute", "hours": "9"}).status == 400
    assert full.site.get(page, data=b"\xff\x00%ff=%00&text=%00%ff").status == 303


def test_who_may_only_read_is_offered_no_notes(tmp_path: Path) -> None:
    """And cannot write one; who has come by a cookie may leave."""
    store, tokens = Store(tmp_path / "hub.db"), Auth("write" * 4, "read" * 4)
    with serving(create(store, tokens, pages=routes(store))) as site:
        Hub(tmp_path, store, site).add(ILL)
        page = f"/runs/{ILL.key}"
        reader = Site(site.address, {"Authorization": "Bearer " + "read" * 4})
        writer = Site(site.address, {"Cookie": f"{COOKIE}={tokens.cookie('write')}"})
        assert site.get(page).status == 401
        assert site.get("/static/hub.css").status == 200
        assert "add the note" not in reader.get(page).text
        assert reader.get(page, {"text": "x"}).status == 403
        assert "add the note" in writer.get(page).text
        assert "log out" in writer.get(page).text
        assert writer.get(page, {"text": "x"}).status == 303
    store.close()


def test_the_full_report_is_made_of_the_mirrored_files(full: Hub) -> None:
    """It is the page that `ddpdebug report` writes, under a policy of its own."""
    answer = full.site.get(f"/runs/{ILL.key}/report")
    assert answer.status == 200
    assert answer.text == report(full.folder / ILL.run)
    assert "<h1>Run ill001</h1>" in answer.text
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    assert full.site.get("/runs/nothing/report").status == 404


def test_who_wants_a_report_meanwhile_is_told_to_come_again(full: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    """One is made at a time, and nobody waits in a thread that other pages need."""
    begun, end, answers = threading.Event(), threading.Event(), list[Answer]()

    def slow(*_: object, **__: object) -> str:
        begun.set()
        assert end.wait(600)
        return "made"

    monkeypatch.setattr("ddpdebug.hub.pages.report", slow)
    path = f"/runs/{ILL.key}/report"
    thread = threading.Thread(target=lambda: answers.append(full.site.get(path)))
    thread.start()
    assert begun.wait(600)
    second = full.site.get(path)
    end.set()
    thread.join()
    assert (second.status, second.headers.get("retry-after")) == (503, "5")
    assert "try again" in second.text
    assert answers[0].text == "made"


def test_the_style_has_all_colours_of_the_charts(hub: Hub) -> None:
    """By class, and nothing else is served beside it."""
    text = hub.site.get("/static/hub.css").text
    assert all(f"background: {color}" in text for color in COLORS.values())
    for name in ("..%2fpages.py", "nothing", "%2e%2e/pages.py"):
        assert hub.site.get(f"/static/{name}").status == 404


@pytest.fixture
def browser(tmp_path: Path, need: Callable[[str], str]) -> Iterator[Browser]:
    found = Browser(need("chromium"), tmp_path / "profile")
    yield found
    found.close()


@pytest.mark.slow
def test_a_real_browser_shows_all_pages_and_keeps_them_up_to_date(tmp_path: Path, browser: Browser) -> None:
    """On a phone and a desk, dark and light: nothing is wider than the screen, nothing is refused, no name runs."""
    store = Store(tmp_path / "hub.db")
    with serving(create(store, Auth(), pages=routes(store))) as site:
        hub = Hub(tmp_path, store, site)
        for run in RUNS:
            hub.add(run)
        pages = ["/", f"/runs/{STUCK.key}", f"/runs/{HOSTILE.key}", "/groups", "/groups/RANK104%20lr"]
        for path in pages:
            for width, phone in ((390, True), (1280, False)):
                browser.look(width, 844, dark=phone, phone=phone)
                browser.open(site.address + path)
                assert browser.run("document.documentElement.scrollWidth") <= width, (path, width)
                assert browser.run("document.title").endswith("ddpdebug hub")
                assert browser.run("getComputedStyle(document.body).fontFamily").startswith("system-ui")
                browser.picture(tmp_path / "page.png")
                assert (tmp_path / "page.png").stat().st_size > 5_000
        browser.open(site.address + "/")
        browser.run("document.querySelector('[name=q]').value = 'half a wor'")
        hub.add(MadeUp(run="newest", time="2026-11-21T09:00:00Z", ended=None))
        assert until(lambda: browser.run("document.body.textContent").count("-newest"))
        assert browser.run("document.querySelector('[name=q]').value") == "half a wor"
        browser.open(f"{site.address}/runs/{STUCK.key}")
        browser.run("document.querySelectorAll('#found details').forEach(fold => { fold.open = true })")
        more = finding("NUM301", title="something new", id="NUM301-2")
        with (tmp_path / STUCK.run / "findings.jsonl").open("a") as file:
            file.write(more.to_json() + "\n")
        bring(store, tmp_path / STUCK.run, "push")
        assert until(lambda: "something new" in browser.run("document.body.textContent"))
        assert browser.run("document.querySelectorAll('#found details[open]').length") == 2
    assert browser.said == []
    store.close()


def test_a_run_that_is_followed_from_its_beginning_gets_its_first_finding(hub: Hub) -> None:
    """Its file of findings was empty when the hub saw it first."""
    hub.add(HEALTHY)
    directory = hub.folder / HEALTHY.run
    assert (directory / "findings.jsonl").stat().st_size == 0
    for number in range(2):
        with (directory / "findings.jsonl").open("a") as file:
            file.write(finding(id=f"RANK104-{number}", title="x" * number * 100_000).to_json() + "\n")
        bring(hub.store, directory, "push")
        assert f"RANK104{' and 1 more' * number}" in seen(hub, "/")
    assert hub.store.content(HEALTHY.key, "findings.jsonl") == (directory / "findings.jsonl").read_bytes()
