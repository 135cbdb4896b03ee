"""`ddpdebug check` on two nodes without a common file system: the second has a disk of its own at the same path."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from machine import PATIENCE, free_port

from ddpdebug.commands import main

SCRIPT = Path(__file__).parent.parent / "support" / "scripts" / "train.py"


def _can_mount() -> bool:
    if shutil.which("unshare") is None or os.geteuid() != 0:
        return False
    words = ["unshare", "-m", "sh", "-c", "mount -t tmpfs none /mnt"]
    return subprocess.run(words, capture_output=True, check=False).returncode == 0


@pytest.mark.jobs
@pytest.mark.slow
@pytest.mark.skipif(not _can_mount(), reason="needs to be root and to mount a disk for one process")
@pytest.mark.parametrize("mode, code, words", [("clean", 0, "clean"), ("raise", 3, "rank 1: exception: ValueError")])
def test_reports_come_over_the_network(
    mode: str, code: int, words: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Rank 0 knows how rank 1 ended though it cannot read its files, at once and from its run directory later."""
    run = tmp_path / "run"
    run.mkdir()
    launch = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1"]
    launch += ["--rdzv-backend", "c10d", "--rdzv-id", "1", "--rdzv-endpoint", f"127.0.0.1:{free_port()}"]
    launch += ["--local-addr", "127.0.0.1", "-m", "ddpdebug", "check", "--quiet", "--out", str(run), "--timeout", "250"]
    launch += [str(SCRIPT), mode, "8"]
    environ = {key: value for key, value in os.environ.items() if key not in {"RANK", "WORLD_SIZE"}}
    environ |= {"OMP_NUM_THREADS": "1", "DDPDEBUG_METRICS": "off"}
    # torchrun gives the ranks in the order of the nodes' arrival: each node hides its disk from the other
    own = [
        "unshare",
        "-m",
        "sh",
        "-c",
        f'mount -t tmpfs none {run} && "$@" ; s=$?; cp -r {run}/. "$COPY"; exit $s',
        "sh",
    ]
    copies = [tmp_path / f"copy{number}" for number in range(2)]
    nodes = []
    for copy in copies:
        copy.mkdir()
        nodes.append(subprocess.Popen([*own, *launch], env={**environ, "COPY": str(copy)}, cwd=tmp_path))
    ended = [node.wait(PATIENCE) for node in nodes]
    assert (max(ended) == 0) is (code == 0)
    first = next(copy for copy in copies if (copy / "run.json").is_file())
    assert [path.name for path in (first / "ranks").iterdir()] == ["0"]
    capfd.readouterr()
    assert main(["verdict", str(first)]) == code
    assert words in capfd.readouterr().out
