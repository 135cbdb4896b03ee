"""What tests of several folders share."""

from __future__ import annotations

import gc
import os
import shutil
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from forked_jobs import run_jobs  # noqa: F401 - a fixture
from hypothesis import HealthCheck, settings

# A shell lets its background jobs ignore Ctrl-C, and they pass that on: what the tests start must not inherit it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Unbuffered, `print` writes each argument and the end of the line by itself, and the lines of two ranks mix.
os.environ.pop("PYTHONUNBUFFERED", None)

# The same examples in each run, however slow the machine is: a test fails for a change and not by chance.
settings.register_profile(
    "ddpdebug", derandomize=True, database=None, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("ddpdebug")


def pytest_itemcollected(item: pytest.Item) -> None:
    """Let what is thorough or smoke be slow too, wherever the slow ones are left out."""
    if any(item.get_closest_marker(name) is not None for name in ("thorough", "smoke")):
        item.add_marker("slow")


@pytest.hookimpl(trylast=True)  # after those that do not run were taken out
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the files that take long, so that none of them goes on alone when all others are through.

    First those that may take longest, by their own time limits; then by the number of tests, and of jobs above all.
    """
    longest, weight = dict[Path, float](), Counter[Path]()
    for item in items:
        limit = item.get_closest_marker("timeout")
        longest[item.path] = max(longest.get(item.path, 0), limit.args[0] if limit is not None else 0)
        starts = any(item.get_closest_marker(name) is not None for name in ("jobs", "ranks"))
        weight[item.path] += 20 if starts else 1
    items.sort(key=lambda item: (-longest[item.path], -weight[item.path]))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Spare the collector what was imported: several tests collect or go through all objects, each 0.3 s a time."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _hooks_on_saved_tensors_are_seen() -> Iterator[None]:
    """Where torch does not tell of them (before 2.12) a monitor looks, and so do tests of graphs without a monitor."""
    from ddpdebug.torch_internals.graph import TELLS_HOOKS, saved_hooks

    if TELLS_HOOKS:
        yield
        return
    from ddpdebug.instrument.patches import watch_saved_hooks
    from ddpdebug.isolation.guard import Guard
    from ddpdebug.probes.entries import Entries

    entries = Entries(Guard(lambda part, message: pytest.fail(f"{part}: {message}")))
    watch_saved_hooks(entries)
    yield
    saved_hooks.end()
    entries.close()


@pytest.fixture(autouse=True)
def _ranks_wait_for_each_other(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that ends leaves others behind that say nothing for two seconds: on a busy machine they may be well."""
    if request.node.get_closest_marker("ranks") is not None:
        monkeypatch.setattr("ddpdebug.exchange.ticks.LEAVE_SECONDS", 60.0)
        monkeypatch.setattr("ddpdebug.exchange.ticks._SILENCE_SECONDS", 60.0)


@pytest.fixture(autouse=True)
def _forget_the_compiler() -> Iterator[None]:
    """Once torch.compile is in use some probes step aside: that must not reach the tests that come after."""
    yield
    if "torch._dynamo.eval_frame" in sys.modules:
        import torch

        from ddpdebug.torch_internals import anything_compiled

        if anything_compiled():
            torch._dynamo.reset()


def _modes() -> list[Any]:
    """Return what is process-wide in torch and not seeded."""
    torch = sys.modules["torch"]
    return [
        torch.get_default_dtype(),
        torch.is_grad_enabled(),
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        (torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark),
        (torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")),
    ]


@pytest.fixture(autouse=True)
def _torch_as_it_was() -> Iterator[None]:
    """Each test draws the same numbers whatever ran before, and leaves the modes of torch as they were."""
    before = None
    if hasattr(sys.modules.get("torch"), "autograd"):
        sys.modules["torch"].manual_seed(0)
        before = _modes()
    yield
    if before is not None:
        assert _modes() == before


@pytest.fixture(scope="session")
def need() -> Callable[[str], str]:
    """Find a program; without it skip the test, or fail it where DDPDEBUG_REQUIRE_PROMETHEUS=1 (set in CI)."""

    def find(program: str) -> str:
        path = shutil.which(program)
        if path is not None:
            return path
        if os.environ.get("DDPDEBUG_REQUIRE_PROMETHEUS") == "1":
            pytest.fail(f"{program} is not installed")
        pytest.skip(f"{program} is not installed")

    return find


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add what tests against a running server need."""
    parser.addoption("--grafana-url", default="", help="a Grafana to try the dashboards in; token in GRAFANA_TOKEN")
