"""What tests of several folders share."""

from __future__ import annotations

import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator

import pytest

# A shell lets its background jobs ignore Ctrl-C, and they pass that on: what the tests start must not inherit it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def _forget_the_compiler() -> Iterator[None]:
    """Once torch.compile is in use some probes step aside: that must not reach the tests that come after."""
    yield
    if "torch._dynamo.eval_frame" in sys.modules:
        import torch

        from ddpdebug.torch_internals import anything_compiled

        if anything_compiled():
            torch._dynamo.reset()


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
