"""What a monitor writes that ends with the interpreter."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from ddpdebug.run_directory.reader import read_run

_SCRIPT = """
import ddpdebug, torch
ddpdebug.watch(out="o", metrics="off")
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model(torch.ones(1, 2)).sum().backward()
optimizer.step()
try:
    raise LookupError("one that is handled")
except LookupError:
    pass
"""


@pytest.mark.jobs
@pytest.mark.parametrize(
    "last, reason, code",
    [
        pytest.param("", "finished", 0, marks=pytest.mark.slow),
        pytest.param(
            "raise ValueError('no such sample')", "exception: ValueError: no such sample", 1, marks=pytest.mark.smoke
        ),
        pytest.param("raise KeyboardInterrupt", "interrupted", 130, marks=pytest.mark.slow),
    ],
    ids=["finished", "exception", "interrupted"],
)
def test_what_has_ended_the_script_is_the_outcome(last: str, reason: str, code: int, tmp_path: Path) -> None:
    """An exception that nobody has handled, also where the monitor stands in the script."""
    subprocess.run([sys.executable, "-c", _SCRIPT + last], cwd=tmp_path, check=False, stderr=subprocess.DEVNULL)
    outcome = read_run(tmp_path / "o")["outcome"]
    assert (outcome["reason"], outcome["exit_code"]) == (reason, code)
