"""The last calls of ranks that an abort has ended, judged from their black boxes."""

import json
import signal
from pathlib import Path

import pytest

from ddpdebug.ci.last_calls import judge_last_calls
from ddpdebug.disk import Disk
from ddpdebug.progress import black_box
from ddpdebug.run_directory.reader import read_findings

_ABORTED = {0: -signal.SIGTERM, 1: -signal.SIGABRT}
_SAME = "DDP\tg\t{}\t\t3\t3\ttrain.py:40\tfloat32 [830]"
_OTHER = "all_reduce\tg\t{}\t\t3\t3\ttrain.py:42\tfloat32 [1]"


def _died(tmp_path: Path, *last: str) -> Path:
    """Make the directory of a run whose ranks have made the same calls but for the last."""
    (tmp_path / "run.json").write_text(json.dumps({"run": "abc123", "world": len(last), "config": {}}))
    (tmp_path / "findings.jsonl").touch()
    for rank, call in enumerate(last):
        (tmp_path / "ranks" / str(rank)).mkdir(parents=True)
        box = black_box.make(tmp_path / "ranks" / str(rank) / black_box.NAME, Disk(), lambda _: "tmpfs")
        for number in (1, 2):
            box.note(_SAME.format(number))
        box.note(call.format(3))
    return tmp_path


def test_calls_that_do_not_match(tmp_path: Path) -> None:
    """Each call is named with its line; what was judged already is not judged again."""
    directory = _died(tmp_path, _SAME, _OTHER)
    for _ in range(2):
        judge_last_calls(directory, _ABORTED, Disk())
    (finding,) = read_findings(directory)
    assert (finding.code, finding.ranks, finding.step, finding.run) == ("HANG502", (0, 1), 3, "abc123")
    assert finding.location == "train.py:40"
    assert {"train.py:40", "train.py:42"} <= {word.rstrip("',}") for word in str(finding.evidence).split()}


@pytest.mark.parametrize(
    ("last", "statuses"), [((_SAME, _SAME), _ABORTED), ((_SAME, _OTHER), {0: 1, 1: 1}), ((_SAME, _OTHER), {})]
)
def test_nothing_is_known(tmp_path: Path, last: tuple[str, str], statuses: dict[int, int]) -> None:
    """Where the calls match, or no rank was aborted, whatever else has ended it."""
    directory = _died(tmp_path, *last)
    judge_last_calls(directory, statuses, Disk())
    assert read_findings(directory) == []
