"""What the tests of CUDA share: they are skipped without a device, and fail where `make gpu` has asked for them."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from ddpdebug.run_directory import reader
from ddpdebug.schema.finding import Finding, Severity
from ddpdebug.schema.row import Flag, Row

SCRIPTS = Path(__file__).resolve().parent / "scripts"
_ROOT = SCRIPTS.parent.parent.parent


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip, or fail, what needs a device that is not there."""
    if item.get_closest_marker("gpu") is None or torch.cuda.is_available():
        return
    if os.environ.get("DDPDEBUG_REQUIRE_GPU") == "1":
        pytest.fail("torch sees no CUDA device", pytrace=False)
    pytest.skip("torch sees no CUDA device here; make gpu runs this where there is one")


@pytest.fixture(params=[pytest.param("cpu", marks=pytest.mark.slow), pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    """The kind of device; on the CPU runs as much of a test as can, so that it is known to run."""
    return str(request.param)


@dataclass(frozen=True)
class Done:
    """A job that has ended."""

    status: int
    text: str
    directory: Path  # of the run
    files: tuple[Path, ...]  # what its ranks have saved

    def rows(self) -> list[Row]:
        """Return the rows of rank 0."""
        return [row for row in reader.read_rows(self.directory) if row.rank == 0]

    def findings(self) -> list[Finding]:
        """Return what was found at warning or above."""
        return [found for found in reader.read_findings(self.directory) if found.severity >= Severity.WARNING]

    def trouble(self) -> str:
        """Return what of ddpdebug has failed in any rank."""
        return "".join(path.read_text() for path in sorted(self.directory.glob("ranks/*/trouble.jsonl")))

    def saved(self) -> list[Any]:
        """Return what the ranks have saved."""
        return [torch.load(path) for path in self.files]


Train = Callable[..., Done]


@pytest.fixture
def train(tmp_path: Path) -> Train:
    """Run a script of this folder in processes of its own, plain or under ddpdebug."""
    number = iter(range(99))

    def run(
        script: str,
        *args: str,
        watched: bool,
        ranks: int = 0,
        options: Sequence[str] = ("--every-step",),
        env: Mapping[str, str] | None = None,
        result: str | None = None,
    ) -> Done:
        own = tmp_path / str(next(number))
        own.mkdir()
        words = [sys.executable]
        if ranks:
            words += ["-m", "torch.distributed.run", f"--nproc-per-node={ranks}", "--master-addr=127.0.0.1"]
            words += [f"--master-port={_free_port()}"]
        if watched:
            words += ["-m", "ddpdebug", "run", "--quiet", "--metrics", "off", "--out", str(own / "run"), *options]
        words += [str(SCRIPTS / script), *(str(own / arg) if arg == result else arg for arg in args)]
        kept = {key: value for key, value in os.environ.items() if not key.startswith(("DDPDEBUG_", "PYTEST_"))}
        about = {**kept, "PYTHONPATH": str(_ROOT), "OMP_NUM_THREADS": "1", **(env or {})}
        done = subprocess.run(words, cwd=own, env=about, capture_output=True, text=True, check=False, timeout=600)
        files = tuple(sorted(own.glob(f"{result}.*"))) if result else ()
        return Done(done.returncode, (done.stdout + done.stderr)[-6000:], own / "run", files)

    return run


def _free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return int(listening.getsockname()[1])


def differences(one: Any, other: Any, path: str = "") -> list[str]:
    """Return where two nested values are not the same, bit for bit."""
    if isinstance(one, torch.Tensor):
        alike = isinstance(other, torch.Tensor) and one.shape == other.shape and one.dtype == other.dtype
        same = alike and one.contiguous().numpy().tobytes() == other.contiguous().numpy().tobytes()
        return [] if same else [path]
    if isinstance(one, dict):
        if not isinstance(other, dict) or one.keys() != other.keys():
            return [path]
        return [place for key in one for place in differences(one[key], other[key], f"{path}.{key}")]
    if isinstance(one, list):
        if not isinstance(other, list) or len(one) != len(other):
            return [path]
        pairs = enumerate(zip(one, other, strict=True))
        return [place for number, (a, b) in pairs for place in differences(a, b, f"{path}[{number}]")]
    return [] if one == other else [path]


@pytest.fixture
def compare() -> Callable[[Any, Any], list[str]]:
    """Return where two values are not the same."""
    return differences


@pytest.fixture
def checked() -> Callable[[Done], None]:
    """Assert that the rows of a healthy job hold what is compared: a part that saw nothing would do no harm either."""

    def look(done: Done) -> None:
        full = [row for row in done.rows() if row.flags & Flag.CHECKED and not row.flags & Flag.SKIPPED]
        assert full
        for name in ("params_before_digest", "params_after_digest", "state_digest"):
            assert any(getattr(row, name) for row in full), name
        assert any(row.grads_digest or row.foreign_grads_digest for row in full)  # the latter where there is no DDP

    return look
