"""A pytest plugin: `@pytest.mark.ranks(4)` runs a test's body in 4 processes that form a process group.

Loaded by every pytest of the environment, so this module imports nothing of torch and does nothing until the first
marked test runs. docs/testing.md is the guide; `pool` starts the ranks, `worker` is what a rank does, `results` makes
one test result of theirs.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from ddpdebug.pytest_plugin.pool import Pool

_MARKER = (
    "ranks(world, *, timeout=60, device='cpu', group=True): run the test in `world` processes that form a process "
    "group (gloo; NCCL with device='cuda'); it ends after `timeout` seconds. Fixtures: rank, world_size, rank_device, "
    "shared_tmp_path, fault."
)
_POOL = pytest.StashKey["Pool"]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the setting `ranks_timeout`."""
    parser.addini("ranks_timeout", "seconds that a test marked with `ranks` may take (default: 60)", default="60")


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker; in a rank's process also the plugin `RankSession`."""
    config.addinivalue_line("markers", _MARKER)
    if _in_rank(config):
        from ddpdebug.pytest_plugin.worker import RankSession  # noqa: PLC0415 - needs torch

        config.pluginmanager.register(RankSession(config), "ddpdebug-rank")


def pytest_unconfigure(config: pytest.Config) -> None:
    """End the rank processes with the session."""
    pool = config.stash.get(_POOL, None)
    if pool is not None:
        pool.close()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    """Run a marked test in rank processes instead of in this one."""
    mark = item.get_closest_marker("ranks")
    if mark is None or _in_rank(item.config):
        return None
    from ddpdebug.pytest_plugin.marked_test import run_in_ranks  # noqa: PLC0415 - not before it is needed

    run_in_ranks(item, nextitem, mark, lambda: _pool(item.config))
    return True


def _in_rank(config: pytest.Config) -> bool:
    return hasattr(config, "ddpdebug_rank")


def _pool(config: pytest.Config) -> Pool:
    from ddpdebug.pytest_plugin.pool import Pool  # noqa: PLC0415 - not before it is needed

    if _POOL not in config.stash:
        config.stash[_POOL] = Pool(config)
    return config.stash[_POOL]


# --- fixtures ---------------------------------------------------------------------------------------------------------


def _fact(request: pytest.FixtureRequest, name: str) -> Any:
    rank_session = request.config.pluginmanager.get_plugin("ddpdebug-rank")
    if rank_session is None:
        pytest.fail(
            f"fixture {request.fixturename!r} is there only in ranks; mark the test with @pytest.mark.ranks(N)",
            pytrace=False,
        )
    return rank_session.current[name]


@pytest.fixture(scope="session")
def rank(request: pytest.FixtureRequest) -> int:
    """The number of this process, from 0 (with `@pytest.mark.ranks(N)`)."""
    return int(_fact(request, "rank"))


@pytest.fixture(scope="session")
def world_size(request: pytest.FixtureRequest) -> int:
    """The number of processes that run the test (with `@pytest.mark.ranks(N)`)."""
    return int(_fact(request, "world"))


@pytest.fixture(scope="session")
def rank_device(request: pytest.FixtureRequest) -> Any:
    """The `torch.device` of this rank: the CPU, or one GPU for each rank (with `@pytest.mark.ranks(N)`)."""
    import torch  # noqa: PLC0415 - only ranks load it

    kind = _fact(request, "device")
    return torch.device(kind) if kind == "cpu" else torch.device(kind, int(_fact(request, "rank")))


@pytest.fixture
def shared_tmp_path(request: pytest.FixtureRequest) -> Path:
    """One directory for all ranks of a test, empty at first; `tmp_path` is each rank's own."""
    path = Path(_fact(request, "shared"))
    path.mkdir(parents=True, exist_ok=True)
    return path


@pytest.fixture
def fault(request: pytest.FixtureRequest) -> Callable[..., Any]:
    """Break something on one rank in one step: `fault("bit-flip", model, optimizer, rank=1, step=3)`."""
    _fact(request, "rank")
    from ddpdebug.testing import Fault  # noqa: PLC0415 - needs torch

    def inject(kind: str, model: Any, optimizer: Any, **place: Any) -> Fault:
        made = Fault(kind, **place)
        request.addfinalizer(made.remove)
        return made.into(model, optimizer)

    return inject
