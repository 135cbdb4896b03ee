"""Jobs of real ranks for the tests of a file: those of all tests that were chosen run side by side."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

_HERE = Path(__file__).resolve().parent
sys.path.append(str(_HERE))
from jobs import Job, Result  # noqa: E402

#: Most of the time a job waits; each has up to four processes.
_AT_ONCE = min(4 * (os.cpu_count() or 1), 16)


def pytest_make_parametrize_id(val: object) -> str | None:
    """Name a test by its job."""
    return f"{val.kind}-{val.rank}-of-{val.world}" if isinstance(val, Job) else None


def _jobs_of(item: Any) -> list[Job]:
    """Return the jobs that a test asks for: its parameter `job`, that of its `case`, or those of its `cases`."""
    params = item.callspec.params if hasattr(item, "callspec") else {}
    cases = params.get("cases", [params["case"]] if "case" in params else [])
    return [case.job() for case in cases] or [job for job in [params.get("job")] if job]


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[Job, Result]:
    """What came of the jobs of all tests of a file that were chosen."""
    here, folder = Path(str(request.node.path)), tmp_path_factory.mktemp("jobs")
    jobs = list(dict.fromkeys(job for item in request.session.items if item.path == here for job in _jobs_of(item)))
    asked = [asdict(replace(job, folder=str(folder / str(number)))) for number, job in enumerate(jobs)]
    done = subprocess.run(
        [sys.executable, _HERE / "jobs.py", "--jobs", str(_AT_ONCE), "-"],
        input=json.dumps(asked),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        env={key: value for key, value in os.environ.items() if not key.startswith(("DDPDEBUG_", "PYTEST_"))},
    )
    return {jobs[number]: Result(**result) for number, result in map(json.loads, done.stdout.splitlines())}


@pytest.fixture
def result(request: pytest.FixtureRequest, results: dict[Job, Result]) -> Result:
    """What came of the job that the test asks for."""
    (job,) = _jobs_of(request.node)
    return results[job]
