"""What a rank serves, what its run is called, and what serves beside it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ddpdebug.config.settings import Config
from ddpdebug.errors import UsageError
from ddpdebug.monitor import sinks
from ddpdebug.monitor.served import Host
from ddpdebug.monitor.sinks import run_name, runs_a_job, scheduler_job, start_served
from ddpdebug.sinks import Trouble


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
    monkeypatch.setattr("sys.platform", "linux")
    start_served(Config(**options), environ, Host(), int(environ.get("RANK", "0")), 0, lambda _: None)
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


def test_an_end_that_nobody_will_serve_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rank serves by itself, as long as it lives."""

    def fails(*_: object) -> None:
        raise OSError("no more processes")

    said = list[Trouble]()
    monkeypatch.setattr(sinks, "Served", fails)
    monkeypatch.setattr("sys.platform", "linux")
    for options in ({}, {"metrics_port": 9400}):
        assert start_served(Config(**options), {}, Host(), 0, 0, said.append) is None
    message = "what the run comes to will not be served after its end: OSError: no more processes"
    assert said == [Trouble(part="companion", message=message)]


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
