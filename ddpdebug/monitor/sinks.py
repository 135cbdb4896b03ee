"""The sinks of a rank, their first record, and the rank's place as it is announced to the others."""

from __future__ import annotations

import os
import platform
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import ClassVar

import torch

from ddpdebug._version import __version__
from ddpdebug.config.settings import Config
from ddpdebug.disk import Disk
from ddpdebug.monitor.served import Host, HubSink, Pusher, Served, settings_of
from ddpdebug.redaction import Redactor
from ddpdebug.run_directory.writer import OwnFindings, RunDirectory
from ddpdebug.schema.announcements import Device
from ddpdebug.schema.finding import Finding
from ddpdebug.sinks import FindingRaised, Record, RunStarted, Sink
from ddpdebug.sinks.fanout import Fanout
from ddpdebug.sinks.terminal import Terminal

#: Slurm, PBS, LSF, Flux, AWS Batch, SageMaker.
_JOB_IDS = ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "FLUX_JOB_ID", "AWS_BATCH_JOB_ID", "TRAINING_JOB_NAME")
#: By what else people look for a job: Slurm; Kubernetes, whose downward API is given by names like these; Kubeflow.
_PLACE = (
    *("SLURM_JOB_ID", "SLURM_JOB_NAME", "SLURM_ARRAY_JOB_ID", "SLURM_ARRAY_TASK_ID", "SLURM_CLUSTER_NAME"),
    *("SLURM_JOB_PARTITION", "SLURM_RESTART_COUNT", "POD_NAME", "POD_NAMESPACE", "JOB_NAME", "JOB_COMPLETION_INDEX"),
    *("JOBSET_NAME", "PET_RDZV_ID", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"),
)


def open_sinks(  # noqa: PLR0913 - who the rank is
    config: Config,
    directory: Path,
    home: Path,
    *,
    rank: int,
    world: int,
    run_id: str,
    redactor: Redactor,
    disk: Disk,
    time: str,
    spawned: bool = False,
    host: Host,
    served: Served | None = None,
    door: str = "",
    pusher: Pusher | None = None,
) -> tuple[Fanout, RunStarted]:
    """Return the sinks of a rank and the first record of the run.

    Args:
        directory: the run directory as it is shown.
        home: the same, also when the script changes its working directory.
        host: the process beside this rank.
        served: has told it already to serve.
        door: by what ranks of a node find the process of the first of them.
        pusher: sends a hub what the run directory has, where there is one to be told.
    """
    local_rank = int(os.environ.get("LOCAL_RANK", str(rank)))
    fanout, url = Fanout((), redactor=redactor), None
    sinks: list[Sink] = [RunDirectory(home, rank, disk=disk, tell=fanout.write)]
    if serves(config, rank):
        try:
            served = served or start_served(config, os.environ, host, local_rank)
            served.log = home
            served.report(fanout.write)
            url = served.open()
            if rank == 0 or local_rank == 0:
                served.let_in(door, rank)
            sinks.append(served)
        except Exception as error:  # noqa: BLE001 - an audit hook of the script's may refuse it
            sinks.append(_NotServed(error))
    elif served is not None:
        served.close()
    if rank == 0 and pusher is not None:
        token = os.environ.get("DDPDEBUG_HUB_TOKEN", "")
        told = {"url": str(config.hub), "token": token, "token_file": str(config.hub_token_file or "")}
        sinks.append(HubSink(pusher, home, told, contained=_is_contained(os.environ), tell=fanout.write))
    elif pusher is not None:
        pusher.close()
    if rank == 0 and not config.quiet:
        sinks.append(Terminal(rank, status=config.status))
    fanout.add(sinks)
    return fanout, RunStarted(
        run_id=run_id,
        rank=rank,
        world=world,
        directory=directory,
        config=asdict(config),
        versions={"ddpdebug": __version__, "torch": metadata.version("torch"), "python": platform.python_version()},
        command=tuple(redactor.words),
        time=time,
        metrics_url=url,
        node=platform.node(),
        local_rank=local_rank,
        spawned=spawned,
        name=run_name(config.name, redactor.words),
        scheduler_job=scheduler_job(os.environ),
        owner=owner(),
        place=place(os.environ),
    )


def serves(config: Config, rank: int) -> bool:
    """Whether a rank has a metrics endpoint."""
    return config.metrics == "per-rank" or (config.metrics == "rank0" and rank == 0)


class _NotServed:
    """A sink in the place of one that could not be made, so that the others hear why."""

    part: ClassVar[str] = Served.part

    def __init__(self, error: Exception) -> None:
        self._error = error

    def write(self, _: Record) -> None:
        """Raise what was in the way."""
        raise self._error


class _InPlace:
    """A sink of a rank that speaks in the place of rank 0."""

    def __init__(self, sink: Sink, says: Callable[[Finding], bool]) -> None:
        self._sink, self._says = sink, says

    def write(self, record: Record) -> None:
        """Pass on the findings that rank 0 cannot report."""
        if isinstance(record, FindingRaised) and self._says(record.finding):
            self._sink.write(record)


def stand_in(home: Path, rank: int, disk: Disk, says: Callable[[Finding], bool], *, quiet: bool) -> list[Sink]:
    """Return sinks for a rank that has to report in the place of rank 0 what everybody waits for.

    Args:
        says: returns whether a finding is this rank's to report.
    """
    sinks: list[Sink] = [OwnFindings(home, rank, disk)]
    if not quiet:
        sinks.append(Terminal(0, speaks=rank, status=False))
    return [_InPlace(sink, says) for sink in sinks]


def start_served(config: Config, environ: Mapping[str, str], host: Host, local_rank: int) -> Served:
    """Start serving this rank in the companion process; raise if that is impossible."""
    return Served(host, settings_of(config, local_rank, ports_of_the_job(environ), contained=_is_contained(environ)))


def _is_contained(environ: Mapping[str, str]) -> bool:
    """Return whether nothing outlives the job: Slurm kills what a step leaves, a container ends with its program."""
    first = b""
    with suppress(OSError):
        first = Path("/proc/1/cmdline").read_bytes()
    return "SLURM_JOB_ID" in environ or os.getpid() == 1 or runs_a_job(first)


def runs_a_job(command: bytes) -> bool:
    """Whether a process is the launcher of a job, or waits for one, by its command line as the kernel has it."""
    return (
        re.search(rb"(?:^|[\0\s]|/bin/)(?:ddpdebug|torchrun|torch\.distributed\.run)(?:[\0\s]|$)", command) is not None
    )


def run_name(given: str | None, command: Sequence[str]) -> str:
    """Return a readable name of at most 64 letters, digits, `_`, `.` and `-`: the given one, else the script's."""
    first, *rest = [*command[:2], ""]
    name = given or (rest[0] if first == "-m" else "" if first == "-c" else Path(first).stem) or "python"
    return re.sub(r"[^\w.-]+", "_", name)[:64]


def scheduler_job(environ: Mapping[str, str]) -> str:
    """Return the cluster scheduler's id of this job; empty if there is none."""
    return next((environ[name] for name in _JOB_IDS if environ.get(name)), "")


def place(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables by which the scheduler and its users identify this job."""
    return {name: environ[name][:200] for name in _PLACE if environ.get(name)}


def owner() -> str:
    """Return the owner of this process; never asks a directory service, which may be slow."""
    named = next((os.environ[name] for name in ("SLURM_JOB_USER", "USER", "LOGNAME") if os.environ.get(name)), "")
    return named[:64] or f"uid {os.getuid()}"


def start_pusher(config: Config, environ: Mapping[str, str], tell: Callable[[str, str], None]) -> Pusher | None:
    """Start the process that sends the run to a hub; None without a hub, on other ranks, and if it cannot start."""
    if config.hub is None or environ.get("RANK", "0") != "0" or not sys.platform.startswith("linux"):
        return None
    try:
        return Pusher()
    except OSError as error:
        tell("hub", f"the run is not sent to the hub: {error}; later: ddpdebug hub push RUN_DIR")
        return None


def ports_of_the_job(environ: Mapping[str, str]) -> frozenset[int]:
    """Return the ports in the job's environment variables: the job may listen on them later, on any of its nodes."""
    values = (value for name, value in environ.items() if name.endswith("_PORT") and not name.startswith("DDPDEBUG_"))
    return frozenset(int(value) for value in values if value.isascii() and value.isdecimal() and len(value) < 6)


def own_device() -> Device | None:
    """Return the current GPU, with its name as the driver and its exporters write it; never starts CUDA."""
    if not torch.cuda.is_initialized():
        return None
    number = torch.cuda.current_device()
    return Device(gpu_uuid=f"GPU-{torch.cuda.get_device_properties(number).uuid}", device=f"cuda:{number}")
