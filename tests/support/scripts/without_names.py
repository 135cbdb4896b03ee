"""Trains with ddpdebug as if this torch had not one of the private names of the table, for each name in turn.

    python tests/support/scripts/without_names.py results.json [NAME...]

Each job is forked from this process, which has loaded torch and not ddpdebug. Torch itself keeps the name: what is
taken away is ddpdebug's finding it. The results are by name; "" has all of them, "plain" is without ddpdebug.
"""

from __future__ import annotations

import importlib.util
import json
import os
import runpy
import shutil
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any

sys.path.append(str(Path(__file__).resolve().parent.parent))
import torch._dynamo
import torch.distributed.optim
import torch.utils.data
import zygote

_ROOT = Path(__file__).resolve().parent.parent.parent.parent
_LOOKUP = "ddpdebug.torch_internals.lookup"
_SCRIPT = Path(__file__).with_name("meets_names.py")
#: Of these features two ranks are asked.
_SEVERAL = {"comparing the ranks", "sharing gloo's device", "what DDP does"}


def _loaded() -> ModuleType:
    """Load the module that looks names up, alone: the package around it looks all of them up at once."""
    spec = importlib.util.spec_from_file_location(_LOOKUP, _ROOT.joinpath(*_LOOKUP.split(".")).with_suffix(".py"))
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[_LOOKUP] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def take_away(gone: str) -> None:
    """Let one name be missing for the ddpdebug that is loaded from here on."""
    lookup: Any = _loaded()
    resolve, register = lookup.resolve, lookup.register

    def resolved(path: str) -> Any:
        if path == gone:
            raise LookupError(path)
        return resolve(path)

    def registered(path: str, *args: Any, **more: Any) -> Any:
        if path == gone:
            more |= {"found": lambda: False, "by_doctor": False}
        return register(path, *args, **more)

    lookup.resolve, lookup.register = resolved, registered


def _child(name: str, rank: int, ranks: int, port: int, folder: Path) -> int:
    for number, stream in ((1, "out"), (2, "err")):
        os.dup2(os.open(folder / f"{rank}.{stream}", os.O_CREAT | os.O_WRONLY), number)
    sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", closefd=False, buffering=1)  # noqa: SIM115
    os.chdir(folder)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), LOCAL_RANK=str(rank))
    os.environ["WORLD_SIZE"] = str(ranks)
    torch.set_num_threads(1)
    try:
        if name == "plain":
            sys.argv[:] = [str(_SCRIPT)]
            runpy.run_path(str(_SCRIPT), run_name="__main__")
            return 0
        take_away(name)
        from ddpdebug.commands import main

        words = ["run", "--every-step", "--metrics", "off", "--out", str(folder / "run"), str(_SCRIPT)]
        sys.argv[:] = ["ddpdebug", *words]
        return main(words)
    except SystemExit as error:
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:  # noqa: BLE001 - what the interpreter would do
        traceback.print_exc()
        return 1


def _leave(status: int) -> None:
    """End as the interpreter does: threads, exit handlers; not its teardown, where gloo may abort."""
    import atexit
    import threading

    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def run(name: str, ranks: int, timeout: float = 240) -> dict[str, Any]:
    """Run one job and return how it ended: status, output, what ddpdebug told of names and parts, steps."""
    port = zygote.free_port()
    folder = Path(tempfile.mkdtemp())  # no context manager: a forked child's exit handlers would remove it
    pids = []
    for rank in range(ranks):
        pid = os.fork()
        if pid == 0:
            _leave(_child(name, rank, ranks, port, folder))
        pids.append(pid)
    until, status = time.monotonic() + timeout, 0
    for pid in pids:
        while not (ended := os.waitpid(pid, os.WNOHANG))[0]:
            if time.monotonic() > until:
                os.kill(pid, signal.SIGKILL)
            time.sleep(0.01)
        status = status or os.waitstatus_to_exitcode(ended[1])
    out, err = ((folder / f"0.{stream}").read_text() for stream in ("out", "err"))
    told = [line for line in err.splitlines() if "this torch" in line or "switched itself off" in line]
    steps = folder / "run" / "steps.bin"
    seen = steps.stat().st_size if steps.exists() else 0
    shutil.rmtree(folder)
    return {"status": status, "out": out, "told": told, "steps": seen, "err": err if status else "", "ranks": ranks}


def _listed() -> dict[str, str]:
    """Return the names of the table with their features, without loading it into this process."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        from ddpdebug.torch_internals import names

        os.write(writing, json.dumps({name.path: name.feature.name for name in names.TABLE}).encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as file:
        found: dict[str, str] = json.load(file)
    os.waitpid(pid, 0)
    return found


def main(results: Path, chosen: list[str]) -> None:
    """Run the jobs one after the other."""
    sys.path.insert(0, str(_ROOT))
    listed = _listed()
    zygote.spare_the_collector()
    jobs = {name: 2 if listed[name] in _SEVERAL else 1 for name in chosen or listed}
    found = {name: run(name, ranks) for name, ranks in jobs.items()}
    for ranks in (1, 2):
        found |= {f"plain {ranks}": run("plain", ranks), f"all {ranks}": run("", ranks)}
    results.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
