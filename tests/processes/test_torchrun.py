"""The launcher of the ranks: what it leaves behind as it ends."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import NoReturn

import pytest
import torch.distributed.run
from torch.distributed.elastic.multiprocessing import SignalException

from ddpdebug.processes import torchrun

_LINE = ["--nproc-per-node", "2", "train.py"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_launcher_that_is_told_to_end_prints_no_traceback(
    number: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the ranks print says enough; torch's own would print how a signal arrives in it."""

    def run(_: object) -> NoReturn:
        raise SignalException(f"Process 7 got signal: {number}", sigval=number)

    monkeypatch.setattr(torch.distributed.run, "run", run)
    statuses = tmp_path / "failures.json"
    assert torchrun.main(_LINE) == 1
    assert torchrun.main([torchrun.STATUSES, str(statuses), *_LINE]) == 1
    assert not statuses.exists()
