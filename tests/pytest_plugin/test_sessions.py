"""Tests marked with `ranks`, as a user runs them: the result, what it says, and what is left behind."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

import pytest
from machine import PATIENCE, processes, until

pytestmark = pytest.mark.jobs
_SCRIPTS = Path(__file__).parent / "scripts"
#: A variable that the processes of one session inherit, by which they are found.
TOKEN = "RANKS_TEST_SESSION"


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What came of a session."""

    code: int
    output: str
    cases: dict[str, ElementTree.Element]  # of the JUnit file, by the name of the test

    def raw(self, name: str) -> str:
        return ElementTree.tostring(self.cases[name], encoding="unicode")

    def outcome(self, name: str) -> str:
        case = self.cases[name]
        return next((child.tag for child in case if child.tag in {"failure", "error", "skipped"}), "passed")

    def message(self, name: str) -> str:
        return next((child.get("message", "") for child in self.cases[name] if child.tag in {"failure", "error"}), "")

    def text(self, name: str) -> str:
        return next((child.text or "" for child in self.cases[name] if child.tag in {"failure", "error"}), "")

    def printed(self, name: str) -> str:
        return self.cases[name].findtext("system-out") or ""


def run_pytest(folder: Path, *words: str) -> Run:
    """Run pytest in `folder` with settings of its own."""
    if not (folder / "pytest.ini").exists():
        (folder / "pytest.ini").write_text("[pytest]\naddopts = --strict-markers -p no:cacheprovider\n")
    xml = folder / "junit.xml"
    options = ["--junitxml", str(xml), "-o", "junit_logging=all"]
    environ = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST")} | {TOKEN: str(folder)}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *words],
        cwd=folder,
        env=environ,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert until(lambda: not left(folder)), done.stdout
    cases = {case.get("name", ""): case for case in ElementTree.parse(xml).iter("testcase")} if xml.exists() else {}
    return Run(code=done.returncode, output=done.stdout + done.stderr, cases=cases)


def left(folder: Path) -> list[int]:
    """Return the processes of the session in this folder that are alive."""
    return processes(f"{TOKEN}={folder}")


@pytest.fixture
def session(tmp_path: Path) -> Callable[..., Run]:
    """Write test files, given by their names without `.py`, and run pytest on them."""

    def run(*words: str, **files: str) -> Run:
        for name, text in files.items():
            (tmp_path / f"{name}.py").write_text(text)
        return run_pytest(tmp_path, *words)

    return run


Session = Callable[..., Run]


def _run_script(name: str, factory: pytest.TempPathFactory, *words: str) -> Run:
    folder = factory.mktemp(name)
    (folder / f"test_{name}.py").write_text((_SCRIPTS / f"{name}.py").read_text())
    return run_pytest(folder, *words)


@pytest.fixture(scope="module")
def wrong(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return _run_script("wrong_ways", tmp_path_factory)


@pytest.fixture(scope="module")
def right(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return _run_script("right_ways", tmp_path_factory)


# --- what goes wrong ------------------------------------------------------------------------------------------------


@pytest.mark.smoke
def test_a_failed_assertion_is_shown_by_the_rank_that_failed_first(wrong: Run) -> None:
    """With pytest's explanation; the rank that then lost its peer is attached, and so is what both printed."""
    assert wrong.outcome("test_raises") == "failure"
    assert wrong.message("test_raises").startswith("rank 1: assert [0, 1, 2] == [0, 1, 3]")
    text = wrong.text("test_raises")
    assert "At index 2 diff: 2 != 3" in text
    assert "expected = [0, 1, 3]" in text
    assert re.search(r"rank 0 lost its peer: .*\nrank 1 failed: assert .*<- first", text)
    printed = wrong.printed("test_raises")
    assert printed.index("printed by 1") < printed.index("printed by 0")
    assert '<property name="rank" value="1"' in wrong.raw("test_raises")


@pytest.mark.smoke
@pytest.mark.parametrize(
    "name, message",
    [
        ("test_hangs", r"rank 1 did not finish in 6 s: it was at test_wrong_ways.py:\d+ in test_hangs"),
        ("test_leaves", "rank 0 left with exit status 0 before it reported"),
        ("test_leaves_with_7", "rank 1 left with exit status 7 before it reported"),
        ("test_killed", "rank 1 died by SIGKILL"),
        ("test_prints_a_lot", "rank 1: assert 1 == 0"),
        ("test_ignores_sigterm_and_hangs", "rank 0: ValueError: the cause"),
        ("test_teardown_waits", "rank 1: assert 1 == 0"),
        ("test_skips_on_one", "rank 1 skipped the test and others did not"),
        ("test_waits_on_both", r"rank 0 did not finish in 6 s: .*, inside recv"),
    ],
)
def test_every_way_to_fail_is_one_failure_that_names_the_cause(wrong: Run, name: str, message: str) -> None:
    """Not the rank that waited for the one that went wrong."""
    assert wrong.outcome(name) == "failure"
    assert re.match(message, wrong.message(name))


@pytest.mark.smoke
def test_the_next_test_is_unaffected(wrong: Run) -> None:
    """Each wrong test is followed by one that passes."""
    followers = [name for name in wrong.cases if "_after_" in name or name in {"test_last", "test_forks"}]
    assert len(followers) >= 9
    assert {wrong.outcome(name) for name in followers} == {"passed"}
    assert wrong.outcome("test_leaves_a_grandchild") == "passed"


@pytest.mark.smoke
def test_a_hang_says_where_every_rank_was(wrong: Run) -> None:
    """The one that waited for its peer is not the first."""
    text = wrong.text("test_hangs")
    assert re.search(r"rank 0 did not finish .* in sum_of_ranks, inside all_reduce", text)
    assert re.search(r"rank 1 did not finish .* in test_hangs  <- first", text)


@pytest.mark.smoke
def test_what_a_killed_rank_printed_is_kept(wrong: Run) -> None:
    """It goes to a file and not through the process."""
    assert "last words" in wrong.printed("test_killed")


@pytest.mark.smoke
def test_long_output_is_shortened_in_the_middle(wrong: Run) -> None:
    """50 MB from each rank are not in the report, but how they end is."""
    printed = wrong.printed("test_prints_a_lot")
    assert "end of 1" in printed
    assert "bytes left out" in printed
    assert len(printed) < 300_000


# --- what works -----------------------------------------------------------------------------------------------------


@pytest.mark.smoke
def test_what_pytest_offers_works_in_ranks(right: Run) -> None:
    """Parameters, fixtures, classes, paths, capture, warnings, properties, forming the group oneself."""
    expected = {
        **dict.fromkeys(["test_skip_in_the_body", "test_skip_by_mark", "test_needs_gpus"], "skipped"),
        "test_expected_failure_on_one_rank": "skipped",
        "test_unexpected_pass": "failure",
        **dict.fromkeys(["test_fixture_outside", "test_no_ranks", "test_wrong_argument"], "error"),
    }
    import torch

    if torch.cuda.device_count() >= 2:
        expected["test_needs_gpus"] = "passed"
    outcomes = {name: right.outcome(name) for name in right.cases}
    assert len(outcomes) == 30
    assert outcomes == {name: expected.get(name, "passed") for name in outcomes}, right.output[-5000:]
    assert "UserWarning: from a rank" in right.output
    assert "1 warning" in right.output
    assert '<property name="tokens" value="17"' in right.raw("test_properties")


@pytest.mark.smoke
def test_wrong_marks_say_what_is_right(right: Run) -> None:
    """And so does a fixture of the plugin in a test without the mark."""
    assert "a whole number from 1 on, not 0" in right.text("test_no_ranks")
    assert "unknown argument 'devise'; did you mean device?" in right.text("test_wrong_argument")
    assert "mark the test with @pytest.mark.ranks(N)" in right.text("test_fixture_outside")


_TWO = """
import os, sys
import pytest, torch.distributed as dist

@pytest.mark.ranks(2)
def test_first(rank):
    print(f"said by {{rank}}")
    assert dist.get_world_size() == 2
    assert rank < {limit}

@pytest.mark.ranks(2)
def test_second(rank):
    dist.barrier()
"""


@pytest.mark.slow
def test_the_first_failure_ends_the_session_with_x(session: Session) -> None:
    """As for any test."""
    run = session("-x", test_it=_TWO.format(limit=1))
    assert list(run.cases) == ["test_first"]
    assert run.code == 1


@pytest.mark.slow
def test_output_is_live_without_capture(session: Session) -> None:
    """`-s` lets the ranks write where pytest writes; `--pdb` is told to stay outside."""
    run = session("-s", "--pdb", test_it=_TWO.format(limit=1))
    assert "said by 0" in run.output
    assert "said by 1" in run.output
    assert "--pdb does not reach into ranks" in run.output


@pytest.mark.slow
def test_works_under_xdist(session: Session) -> None:
    """Each of its workers has ranks of its own."""
    pytest.importorskip("xdist")
    run = session("-n", "2", "-q", test_it=_TWO.format(limit=2), test_other=_TWO.format(limit=1))
    assert "3 passed" in run.output
    assert "1 failed" in run.output
    assert "rank 1: assert 1 < 1" in run.output


_UNLIKE = """
import os
import pytest

if "RANK" in os.environ:
    raise ImportError("there is no such thing here")

@pytest.mark.ranks(2)
def test_it():
    pass
"""
_IDS = """
import os
import pytest

@pytest.mark.parametrize("value", [1], ids=[str(os.getpid())])
@pytest.mark.ranks(2)
def test_it(value):
    pass
"""


@pytest.mark.slow
def test_a_test_that_a_rank_cannot_collect_fails_with_the_reason(session: Session) -> None:
    """Whether its module cannot be imported there or its name is another one."""
    run = session(test_unlike=_UNLIKE, test_ids=_IDS)
    assert run.output.count("was not collected in this rank") >= 2
    assert "there is no such thing here" in run.output
    assert "the ids of parameters must be the same in every process" in run.output
    assert run.code == 1


@pytest.mark.slow
def test_a_rank_can_end_the_session(session: Session) -> None:
    """By `pytest.exit`."""
    text = _TWO.format(limit="2 or pytest.exit('enough')")
    run = session(test_it=text.replace("assert rank < 2 or", "_ = rank > 2 or"))
    assert "Exit: enough" in run.output
    assert run.code == 2


_UNMARKED = """
import sys

def test_it():
    ours = [name for name in sys.modules if name.startswith("ddpdebug.")]
    assert ours == ["ddpdebug._version", "ddpdebug.pytest_plugin"]
    assert "torch" not in sys.modules
"""


def test_nothing_is_loaded_where_nothing_is_marked(session: Session) -> None:
    """No torch, no process, no word."""
    run = session(test_it=_UNMARKED)
    assert run.code == 0
    assert "rank" not in run.output


@pytest.mark.slow
def test_the_marked_process_loads_no_torch(session: Session) -> None:
    """Only the ranks do."""
    text = _TWO.format(limit=2) + "\ndef test_third():\n    assert 'ddpdebug.pytest_plugin.worker' not in sys.modules\n"
    text = text.replace("import pytest, torch.distributed as dist\n", "import pytest\n")
    text = text.replace("    assert dist.get", "    import torch.distributed as dist\n    assert dist.get")
    text = text.replace("    dist.barrier()", "    assert 'torch' in sys.modules")
    run = session("-W", "error", test_it=text + "    assert 'torch' not in sys.modules\n")
    assert run.code == 0, run.output


_LONG = """
import os, subprocess, sys, time
import pytest

@pytest.mark.ranks(2)
def test_it(rank):
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"], start_new_session=True)
    open(f"ready-{rank}", "w").close()
    time.sleep(1000)
"""


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_nothing_outlives_pytest(tmp_path: Path, number: signal.Signals) -> None:
    """However it ends, its ranks end, and what they have started."""
    (tmp_path / "test_it.py").write_text(_LONG)
    (tmp_path / "tmp").mkdir()
    environ = {**os.environ, TOKEN: str(tmp_path), "TMPDIR": str(tmp_path / "tmp")}
    words = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--rootdir", str(tmp_path)]
    process = subprocess.Popen(words, cwd=tmp_path, env=environ, stdout=subprocess.DEVNULL)
    assert until(lambda: all((tmp_path / f"ready-{rank}").exists() for rank in range(2)))
    assert len(left(tmp_path)) >= 6
    process.send_signal(number)
    process.wait(PATIENCE)
    assert until(lambda: not left(tmp_path))
    assert list((tmp_path / "tmp").glob("ddpdebug-*")) == []
