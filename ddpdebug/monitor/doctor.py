"""The facts for `ddpdebug doctor`: versions, machine, torch's private names, wrappers, side group; parts that are off.

The list of what is patched comes from a real attaching to this process, which is taken back at once.
"""

from __future__ import annotations

import contextlib
import datetime
import importlib
import os
import platform
import resource
import shutil
import socket
import sys
import tempfile
import threading
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata, util
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # exported at run time only

from ddpdebug import torch_internals as internals
from ddpdebug._version import __version__
from ddpdebug.config.settings import Config
from ddpdebug.disk import Disk
from ddpdebug.errors import UsageError, text_of
from ddpdebug.instrument.probes import Probes
from ddpdebug.isolation.guard import Guard
from ddpdebug.probes.coverage import CoverageProbe
from ddpdebug.probes.entries import Placed
from ddpdebug.progress import black_box, kernel
from ddpdebug.torch_internals import names, nodes

_DISTRIBUTIONS = ("torch", "ddpdebug", "prometheus_client", "click", "rich", "xxhash", "numpy", "triton")
#: What the tests run with, and what they were run with by hand (docs/installation.md).
_TESTED_TORCH, _TESTED_PYTHONS = "2.13", ((3, 11), (3, 14))
#: Of each extra, what is imported, and what there is with it alone.
EXTRAS = {
    "grafana": (("grafana_api",), "ddpdebug dashboards push"),
    "hub": (("starlette", "uvicorn", "sqlalchemy", "jinja2"), "ddpdebug hub, one page for all runs of a team"),
    "hub-postgres": (("psycopg",), "a hub that keeps its runs in Postgres"),
    "mcp": (("mcp",), "answers to programs that ask about runs"),
}
_FIRST_WRITES = 1 << 20
_NOT_HERE, _LOW = "not here: ", "low: "
#: Docker's default of /dev/shm is 64 MiB, the usual limit of open files 1024: some workers use up either.
_LEAST_SHARED, _LEAST_FILES = 1 << 30, 4096
_SHARED = "/dev/shm"  # noqa: S108 - its size is read
_INFINIBAND = Path("/sys/class/infiniband")
assert nodes.NODES  # they are in the table of names once the module is loaded


@dataclass(frozen=True)
class FeatureState:
    """A feature of ddpdebug that depends on private names of torch.

    Args:
        names: how many there are; of these `absent` cannot be there in this build of torch.
        missing: those that should be there and are not, with what is off without them.
    """

    name: str
    names: int
    absent: int
    missing: dict[str, str]


@dataclass(frozen=True)
class Wrapper:
    """A function of torch or Python that is wrapped while ddpdebug is attached.

    Args:
        over: whose function was found in the place of torch's, None where it is torch's own.
        under: what has been put over ours since, None where nothing has.
    """

    where: str
    why: str
    in_place: bool
    over: str | None = None
    under: str | None = None


@dataclass(frozen=True)
class Attached:
    """The result of attaching to this process and detaching again.

    Args:
        troubles: what it has said.
        restored: whether everything was as before afterwards.
    """

    wrappers: tuple[Wrapper, ...]
    troubles: tuple[str, ...]
    restored: bool


@dataclass(frozen=True)
class Check:
    """A check of this machine: side group, metrics port, means to examine hangs, run directory.

    Args:
        fine: None where it is only reported, whatever it is.
    """

    name: str
    fine: bool | None
    text: str


@dataclass(frozen=True)
class Report:
    """The result of `ddpdebug doctor`."""

    versions: dict[str, str]
    backends: dict[str, str]
    features: tuple[FeatureState, ...]
    attached: Attached
    checks: tuple[Check, ...]

    @property
    def off(self) -> list[str]:
        """Descriptions of the parts that are off; empty if all work."""
        found = [f"{name}: {off}" for feature in self.features for name, off in feature.missing.items()]
        found += [f"{w.where} could not be wrapped: {w.why}" for w in self.attached.wrappers if not w.in_place]
        found += [f"{w.where} is hidden under {w.under}: {w.why}" for w in self.attached.wrappers if w.under]
        found += self.attached.troubles
        if not self.attached.restored:
            found.append("not everything was restored after attaching")
        return found + [f"{check.name}: {check.text}" for check in self.checks if check.fine is False]

    @property
    def missing(self) -> list[str]:
        """Optional packages and limits that are missing or low, with the command that helps."""
        return [
            f"{check.name} {check.text.removeprefix(_NOT_HERE)}"
            for check in self.checks
            if check.text.startswith((_NOT_HERE, _LOW))
        ]

    def to_json(self) -> dict[str, Any]:
        """Return the report as JSON values."""
        return {"ok": not self.off, "off": self.off, **asdict(self)}


def examine(config: Config, imports: Sequence[str] = ()) -> Report:
    """Examine what this machine and this torch offer to ddpdebug.

    Args:
        config: the settings that a job would have here.
        imports: modules to load after attaching, as a script would: what they wrap hides ours.

    Raises:
        UsageError: a module of `imports` cannot be loaded.
    """
    return Report(_versions(), _backends(), features(), attach_and_detach(imports), tuple(_checks(config)))


def features() -> tuple[FeatureState, ...]:
    """Return the features that depend on private names of torch, each with its missing names."""
    found = []
    for feature in dict.fromkeys(name.feature.name for name in names.TABLE):
        members = [name for name in names.TABLE if name.feature.name == feature]
        applies = [name for name in members if name.applies()]
        missing = {name.path: name.off for name in applies if not name.found()}
        found.append(FeatureState(feature, len(members), len(members) - len(applies), missing))
    return tuple(found)


def names_of(feature: FeatureState) -> list[names.Name]:
    """Return the private names that a feature depends on."""
    return [name for name in names.TABLE if name.feature.name == feature.name]


def attach_and_detach(imports: Iterable[str] = ()) -> Attached:
    """Attach to this process, examine the wrappers, and detach.

    Raises:
        UsageError: a module of `imports` cannot be loaded.
    """
    troubles: list[str] = []
    guard = Guard(lambda part, text: troubles.append(f"{part}: {text}"))
    probes = Probes(guard, lambda _: None, lambda *_: None, lambda *_: False)
    entries = probes.entries
    try:
        guard.run("patches", probes.patches.install)
        guard.run("probe:coverage", CoverageProbe(probes.bus, entries, probes.state.wrappers, lambda _: None).install)
        for name in imports:
            _load(name)
        wrappers = [Wrapper(p.where, p.why, in_place=True, over=p.over, under=p.hidden()) for p in entries.placed]
        wrappers += [Wrapper(where, "", in_place=False) for where in entries.left_out]
    finally:
        probes.remove()
    left = [placed for placed in entries.placed if not _is_gone(placed)]
    by_place: dict[str, Wrapper] = {}
    for wrapper in wrappers:
        by_place.setdefault(wrapper.where, wrapper)
    return Attached(tuple(by_place.values()), tuple(troubles), restored=not left)


def _is_gone(placed: Placed) -> bool:
    return not placed.is_wrapper or placed.hidden() is not None


def _load(name: str) -> None:
    try:
        importlib.import_module(name)
    except Exception as error:
        raise UsageError(f"cannot import {name!r}: {text_of(error)}") from error


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "system": f"{platform.system()} {platform.machine()}"}
    for name in _DISTRIBUTIONS:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return {**found, "torch": str(torch.__version__), "ddpdebug": __version__}


def _backends() -> dict[str, str]:
    known = {"gloo": dist.is_gloo_available, "nccl": dist.is_nccl_available, "mpi": dist.is_mpi_available}
    found = {name: "available" if dist.is_available() and ask() else "not here" for name, ask in known.items()}
    devices = torch.cuda.device_count() if torch.backends.cuda.is_built() else 0
    built = f"{torch.version.cuda or torch.version.hip}, {devices} devices"
    return {**found, "cuda": built if torch.backends.cuda.is_built() else "not here"}


def _here() -> Iterable[Check]:
    """Say what of this place was tried, and which extras are not installed: none of them is needed."""
    first, last = ((".".join(map(str, version))) for version in _TESTED_PYTHONS)
    tried = _TESTED_PYTHONS[0] <= sys.version_info[:2] <= _TESTED_PYTHONS[1]
    yield Check("python", None, f"{first} to {last} were tried" + ("" if tried else ", this one was not"))
    same = str(torch.__version__).startswith(f"{_TESTED_TORCH}.")
    more = "" if same else ", this one is another: see what is missing among its private names below"
    yield Check("torch", None, f"the tests run with {_TESTED_TORCH}{more}")
    for extra, (modules, what) in EXTRAS.items():
        missing = [name for name in modules if util.find_spec(name) is None]
        add = f"{_NOT_HERE}{', '.join(missing)}; `pip install 'ddpdebug[{extra}]'` adds {what}"
        yield Check(f"[{extra}]", None, add if missing else f"installed: {what}")


def _checks(config: Config) -> Iterable[Check]:
    yield from _here()
    yield Check("side group", *_tried(_side_group, "ranks can be compared over gloo"))
    with socket.socket() as s:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            s.bind((config.metrics_host, config.metrics_port))
            text = f"{config.metrics_host}:{config.metrics_port or 'any'} is free for the metrics of local rank 0"
        except OSError as error:
            text = f"{config.metrics_host}:{config.metrics_port} cannot be taken for metrics: {error.strerror or error}"
    yield Check("metrics port", None, text)
    yield from _hangs()
    yield from _limits()
    here = Path.cwd()
    yield Check("run directory", *_tried(_writes, f"{here} can be written to, {_room(here)}"))


def _limits() -> Iterable[Check]:
    """Return the limits of this machine that end trainings."""
    with contextlib.suppress(OSError):
        size = shutil.disk_usage(_SHARED).total
        why = "DataLoader workers and NCCL share tensors there; `docker run --ipc=host` or `--shm-size=8g` raises it"
        yield _limit(_SHARED, f"{size >> 20} MiB", why, low=size < _LEAST_SHARED)
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    why = "sockets of ranks and tensors of DataLoader workers each take some; `ulimit -n 65536` raises it"
    yield _limit("open files", _amount(files), why, low=0 <= files < _LEAST_FILES)
    if _INFINIBAND.is_dir() and any(_INFINIBAND.iterdir()):
        locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
        why = "InfiniBand locks its buffers; `ulimit -l unlimited`, or `docker run --ulimit memlock=-1`, lifts it"
        yield _limit("locked memory", _amount(locked), why, low=locked >= 0)


def _limit(name: str, value: str, why: str, *, low: bool) -> Check:
    return Check(name, None, f"{_LOW}{value}; {why}" if low else value)


def _amount(limit: int) -> str:
    return "unlimited" if limit < 0 else str(limit)


def _hangs() -> Iterable[Check]:
    """Say by what hangs can be told apart here."""
    size = os.environ.get("TORCH_FR_BUFFER_SIZE")
    if not internals.Collectives.records():
        off = "TORCH_FR_BUFFER_SIZE=0 switches it off" if size == "0" else "this torch has none"
        yield Check("collectives", False, f"{off}: of a hang it is known who is missing, not what was called")
    else:
        nccl = "" if size else "; on NCCL only where TORCH_FR_BUFFER_SIZE is set"
        yield Check("collectives", True, f"torch records them{nccl}")
    if kernel.process(os.getpid()) is None or kernel.thread(threading.get_native_id()) is None:
        yield Check("/proc", False, "it cannot be read: a rank that works cannot be distinguished from one that sleeps")
    else:
        yield Check("/proc", True, "it shows whether a rank works, sleeps or is stopped")
    yield Check("black box", *_tried(_maps, "the last state of a rank can be read after it has died"))


def _maps() -> None:
    """Make a black box, write and read it."""
    with tempfile.TemporaryDirectory(dir=Path.cwd(), prefix=".ddpdebug-") as folder:
        file = Path(folder) / black_box.NAME
        box = black_box.BlackBox(file, Disk())
        try:
            box.beat({"here": True})
            known = black_box.read(file)
        finally:
            box.close()
        if known is None or not known.look:
            raise RuntimeError("what was written to a file in memory could not be read")


def _tried(call: Any, text: str) -> tuple[bool, str]:
    try:
        call()
    except Exception as error:  # noqa: BLE001 - that it fails is what is told
        return False, text_of(error)
    return True, text


def _side_group() -> None:
    """Make a side group of this process alone and gather over it."""
    timeout = datetime.timedelta(seconds=10)
    store: Any = TCPStore("127.0.0.1", 0, 1, is_master=True, timeout=timeout)
    group = internals.GlooGroup(internals.own_connection(store), "ddpdebug/doctor", 0, 1, timeout)
    try:
        if group.gather(b"here") != [b"here"]:
            raise RuntimeError("the side group returned other bytes than it was given")
    finally:
        group.close()


def _writes() -> None:
    with tempfile.NamedTemporaryFile(dir=Path.cwd(), prefix=".ddpdebug-") as file:
        file.write(bytes(_FIRST_WRITES))


def _room(path: Path) -> str:
    return f"{shutil.disk_usage(path).free >> 20} MiB free"
