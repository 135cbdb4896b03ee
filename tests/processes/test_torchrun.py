"""The launcher of a check: what it leaves behind as it ends."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import NoReturn

import pytest
from torch.distributed.elastic.multiprocessing import SignalException

from ddpdebug.processes import torchrun
from ddpdebug.processes.launch import OVER

_LINE = ["--nproc-per-node", "2", "train.py"]


def test_a_launcher_that_the_check_ends_prints_no_traceback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that somebody else ends raises as torch's own does."""

    def run(_: object) -> NoReturn:
        raise SignalException("Process 7 got signal: 15", sigval=signal.SIGTERM)

    monkeypatch.setattr(torchrun, "run", run)
    statuses = tmp_path / "failures.json"
    with pytest.raises(SignalException):
        torchrun.main([str(statuses), *_LINE])
    (tmp_path / OVER).touch()
    assert torchrun.main([str(statuses), *_LINE]) == 1
    assert not statuses.exists()
