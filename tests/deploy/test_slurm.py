"""The Slurm template under a real Slurm: one machine, one daemon of each kind, everything in a temporary folder."""

from __future__ import annotations

import json
import os
import pwd
import re
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from machine import PATIENCE, free_port, until

pytestmark = [pytest.mark.jobs, pytest.mark.slow]
_ROOT = Path(__file__).parent.parent.parent
_SCRIPT = _ROOT / "tests" / "support" / "scripts" / "train.py"
_PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "sinfo")
_PATH = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"

_CONF = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SchedulerType=sched/builtin
SelectType=select/cons_tres
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
ReturnToService=2
SlurmUser=root
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
NodeName={host} NodeAddr=127.0.0.1 CPUs={cpus} RealMemory=500 State=UNKNOWN
PartitionName=all Nodes={host} Default=YES MaxTime=INFINITE State=UP OverSubscribe=FORCE
"""


@pytest.fixture(scope="module")
def slurm() -> Iterator[dict[str, str]]:
    """Start munge and Slurm and return the environment in which jobs are submitted."""
    missing = [name for name in _PROGRAMS if shutil.which(name, path=_PATH) is None]
    if missing or os.geteuid() != 0:
        if os.environ.get("DDPDEBUG_REQUIRE_SLURM") == "1":
            pytest.fail(f"Slurm was asked for; missing: {missing}, user id {os.geteuid()} (must be root)")
        pytest.skip("needs slurm-wlm and munge, and to be root")
    folder = Path(tempfile.mkdtemp(prefix="slurm-"))
    folder.chmod(0o755)
    host, ports = socket.gethostname().split(".")[0], (free_port(), free_port())
    (folder / "state").mkdir()
    (folder / "spool").mkdir()
    cpus = len(os.sched_getaffinity(0))
    (folder / "slurm.conf").write_text(_CONF.format(folder=folder, host=host, ports=ports, cpus=cpus), encoding="utf-8")
    environ = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf"), "PATH": _PATH}
    processes: list[subprocess.Popen[bytes]] = []
    try:
        processes.append(_munge(folder))
        for words in (("slurmctld", "-D"), ("slurmd", "-D", "-N", host)):
            program = str(shutil.which(words[0], path=_PATH))
            with (folder / f"{words[0]}.log").open("wb") as log:
                processes.append(subprocess.Popen([program, *words[1:]], env=environ, stdout=log, stderr=log))
        _wait_for_idle(environ, folder)
        yield environ
    finally:
        for process in reversed(processes):
            process.terminate()
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        shutil.rmtree(folder, ignore_errors=True)


def _munge(folder: Path) -> subprocess.Popen[bytes]:
    """Start munged as its own user, with a key of its own."""
    own = folder / "munge"
    own.mkdir()
    (own / "key").write_bytes(os.urandom(1024))
    (own / "key").chmod(0o400)
    user = pwd.getpwnam("munge")
    for path in (own, own / "key"):
        os.chown(path, user.pw_uid, user.pw_gid)
    options = {"socket": folder / "munge.socket", "key-file": own / "key", "pid-file": own / "pid"}
    options |= {"log-file": own / "log", "seed-file": own / "seed"}
    os.chown(folder, user.pw_uid, user.pw_gid)  # the socket lies there, for all to reach
    words = ["munged", "--foreground", *(f"--{name}={path}" for name, path in options.items())]
    found = shutil.which(words[0], path=_PATH)
    return subprocess.Popen([str(found), *words[1:]], user=user.pw_uid, group=user.pw_gid, extra_groups=[])


def _wait_for_idle(environ: dict[str, str], folder: Path) -> None:
    def ask() -> str:
        done = subprocess.run(["sinfo", "-h", "-o", "%T"], env=environ, capture_output=True, text=True, check=False)
        return done.stdout.strip()

    if not until(lambda: ask() == "idle", 200):
        logs = "\n".join(file.read_text(errors="replace")[-2000:] for file in folder.glob("*.log"))
        pytest.fail(f"Slurm did not come up: {ask()}\n{logs}")


_SINGLE = ("--nodes=1", "--ntasks=1")
#: Two tasks on one machine: torchrun takes each for a node.
_TWO = ("--nodes=1", "--ntasks=2", "--ntasks-per-node=2", "--overcommit")


@pytest.mark.parametrize(
    "mode, layout, code, word",
    [
        pytest.param("clean", _SINGLE, 0, "clean", marks=pytest.mark.thorough),
        ("lr", _SINGLE, 1, "findings"),
        ("clean", _TWO, 0, "clean"),
        pytest.param("lr", _TWO, 1, "findings", marks=pytest.mark.thorough),
        pytest.param("raise", _TWO, 3, "script failed", marks=pytest.mark.thorough),
        ("kill", _TWO, 4, "lost rank"),
    ],
)
def test_template(
    mode: str, layout: tuple[str, ...], code: int, word: str, slurm: dict[str, str], tmp_path: Path
) -> None:
    """The job's exit code is that of the verdict, on one node and on two, whatever srun and torchrun made of it."""
    environ = {
        **slurm,
        "SCRIPT": f"{_SCRIPT} {mode} 8",
        "RUN_DIR": str(tmp_path / "run"),
        "PYTHON": sys.executable,
        "RANKS_PER_NODE": "1" if layout is _TWO else "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "TORCHRUN_OPTIONS": "--local-addr 127.0.0.1",
        "TIMEOUT": "400",
        "OMP_NUM_THREADS": "1",
        "DDPDEBUG_METRICS": "off",
    }
    words = ["sbatch", "--parsable", *layout, "--output", str(tmp_path / "log"), _ROOT / "deploy/ci/slurm.sbatch"]
    job = subprocess.run(words, env=environ, cwd=tmp_path, stdout=subprocess.PIPE, text=True, check=True).stdout.strip()

    def state() -> str:
        words = ["scontrol", "show", "job", job]
        return subprocess.run(words, env=environ, stdout=subprocess.PIPE, text=True, check=True).stdout

    # `sbatch --wait` would look after 2, 6, 12, 20, 30, 42 seconds
    assert until(lambda: re.search(r"JobState=(COMPLETED|FAILED)", state()), pause=0.3), state()
    log = (tmp_path / "log").read_text(errors="replace")
    assert f"ExitCode={code}:0" in state(), f"{state()}\n{log}"
    record = json.loads((tmp_path / "run" / "verdict.json").read_text(encoding="utf-8"))
    assert (record["verdict"], set(record["ranks"])) == (word, {"0", "1"})
    if mode == "lr":
        assert "RANK104" in [finding["code"] for finding in record["findings"]]
    if code > 1:
        assert record["blamed"] == [1]


@pytest.mark.parametrize(
    "mode, code, word",
    [
        pytest.param("clean", 0, "clean", marks=pytest.mark.smoke),
        pytest.param("lr", 1, "findings", marks=pytest.mark.thorough),
        ("raise", 3, "script failed"),
    ],
)
def test_ranks_started_by_srun(mode: str, code: int, word: str, slurm: dict[str, str], tmp_path: Path) -> None:
    """Without torchrun the ranks' own exit codes come through srun, and one of them writes the verdict."""
    variables = "RANK=$SLURM_PROCID WORLD_SIZE=$SLURM_NTASKS LOCAL_RANK=$SLURM_LOCALID MASTER_ADDR=127.0.0.1"
    check = f"{sys.executable} -m ddpdebug check --quiet --out run --json v.json --timeout 400 {_SCRIPT} {mode} 8"
    environ = {**slurm, "MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1", "DDPDEBUG_METRICS": "off"}
    words = ["srun", "--nodes=1", "--ntasks=2", "--overcommit", "bash", "-c", f"{variables} exec {check}"]
    done = subprocess.run(
        words, env=environ, cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE, check=False
    )
    assert done.returncode == code, f"{done.stdout}{done.stderr}"
    assert json.loads((tmp_path / "v.json").read_text(encoding="utf-8"))["verdict"] == word
    assert done.stderr.count("ddpdebug: verdict:") == 1
