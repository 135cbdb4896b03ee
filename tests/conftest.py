"""What tests of several folders share."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable

import pytest


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
