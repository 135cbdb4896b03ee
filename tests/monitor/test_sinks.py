"""What a rank serves, what its run is called, and what serves beside it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ddpdebug.config.settings import Config
from ddpdebug.disk import Disk
from ddpdebug.errors import UsageError
from ddpdebug.monitor import sinks
from ddpdebug.monitor.served import Host
from ddpdebug.monitor.sinks import run_name, runs_a_job, scheduler_job, serves, start_served
from ddpdebug.redaction import Redactor
from ddpdebug.sinks import RunEnded


@pytest.mark.parametrize(
    ("given", "command", "name"),
    [
        (None, ("a/train.py", "--x"), "train"),
        (None, ("-m", "package.train"), "package.train"),
        (None, ("-c",), "python"),
        (None, ("-m",), "python"),
        (None, (), "python"),
        ("my run/ä!", ("train.py",), "my_run_ä_"),
        ("x" * 100, ("train.py",), "x" * 64),
    ],
)
def test_a_run_has_a_name_for_people(given: str | None, command: tuple[str, ...], name: str) -> None:
    """The given one, else the script's; short, and of letters that need no quotes anywhere."""
    assert run_name(given, command) == name


def test_the_scheduler_s_job_is_read_from_the_environment() -> None:
    """Empty where there is none."""
    assert scheduler_job({"SLURM_JOB_ID": "17", "PBS_JOBID": ""}) == "17"
    assert scheduler_job({"PBS_JOBID": "9.host"}) == "9.host"
    assert scheduler_job({"SLURM_JOB_ID": ""}) == ""


@pytest.mark.parametrize(
    ("options", "environ", "how"),
    [
        ({}, {}, (0.0, None, False)),  # nobody knows the port
        ({"metrics_port": 9400}, {}, (60.0, None, False)),
        ({"sd_dir": Path("sd")}, {"RANK": "3"}, (60.0, None, False)),
        ({"sd_dir": Path("sd")}, {"SLURM_JOB_ID": "3"}, (60.0, None, True)),
        ({"sd_dir": Path("sd"), "linger": 0.0}, {"RANK": "1"}, (0.0, None, False)),
        ({"sd_dir": Path("sd"), "metrics": "off"}, {}, None),
        ({"sd_dir": Path("sd"), "metrics": "rank0"}, {"RANK": "0"}, (60.0, None, False)),
        ({"sd_dir": Path("sd"), "metrics": "rank0"}, {"RANK": "1"}, None),
        ({"push_outcome": "http://g"}, {"RANK": "1"}, (0.0, "http://g", False)),
    ],
)
def test_a_process_serves_beside_the_ranks_that_have_an_endpoint(
    options: dict[str, Any], environ: dict[str, str], how: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And their end, where somebody may look for it."""
    told = list[dict[str, Any]]()
    monkeypatch.setattr(sinks, "Served", lambda _, settings: told.append(settings))
    if serves(config := Config(**options), int(environ.get("RANK", "0"))):
        start_served(config, environ, Host(), 0)
    assert [(one["linger"], one["push"], one["contained"]) for one in told] == ([] if how is None else [how])


@pytest.mark.parametrize(
    ("command", "job"),
    [
        (b"python\0-m\0ddpdebug\0run\0train.py\0", True),
        (b"/usr/bin/tini\0--\0/opt/bin/torchrun\0-m\0ddpdebug\0", True),
        (b"bash\0-c\0exec ddpdebug run train.py\0", True),
        (b"python\0-m\0torch.distributed.run\0x.py\0", True),
        (b"/sbin/init\0", False),
        (b"bash\0-c\0cd /builds/ddpdebug/src && make test\0", False),
        (b"", False),
    ],
)
def test_a_container_whose_program_is_the_job_ends_with_it(command: bytes, job: bool) -> None:
    """By the command line of its first process."""
    assert runs_a_job(command) is job


def test_metrics_that_nobody_serves_are_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """To those who read the run directory and the terminal; the run goes on."""

    def fails(*_: object) -> None:
        raise OSError("no more processes")

    monkeypatch.setattr(sinks, "Served", fails)
    fanout, started = sinks.open_sinks(
        Config(quiet=True),
        tmp_path,
        tmp_path,
        rank=0,
        world=1,
        run_id="r",
        redactor=Redactor(),
        disk=Disk(),
        time="",
        host=Host(),
    )
    assert started.metrics_url is None
    fanout.write(started)
    fanout.write(RunEnded(reason="finished", exit_code=0, steps={}))
    fanout.close()
    (line,) = (tmp_path / "ranks" / "0" / "trouble.jsonl").read_text().splitlines()
    assert json.loads(line)["part"] == "sink:prometheus"
    assert "no more processes" in line


@pytest.mark.parametrize("address", ["pushgateway:9091", "ftp://x/", "http://"])
def test_an_address_that_nothing_can_be_pushed_to_is_an_error(address: str) -> None:
    """Before anything starts."""
    with pytest.raises(UsageError, match="http"):
        Config.load({"push_outcome": address}, {}, Path.cwd())


def test_a_container_ends_with_a_script_that_is_its_program(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of `python train.py` the command line does not say so; its process has the number 1."""
    monkeypatch.setattr(sinks, "runs_a_job", lambda _: False)
    assert not sinks._is_contained({})
    monkeypatch.setattr("os.getpid", lambda: 1)
    assert sinks._is_contained({})
