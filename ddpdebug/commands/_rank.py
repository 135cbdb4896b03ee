"""The process that becomes the script, for `run` and in a rank of `check`: what ddpdebug does before and after it.

Before the script's first line next to nothing is loaded here, and nothing is put in place but an entry of
`sys.meta_path`. Once the script has loaded torch, ddpdebug attaches.
"""

from __future__ import annotations

import _thread
import os
import sys

from ddpdebug.isolation.background import Thread
from ddpdebug.processes.outermost import call_outermost
from ddpdebug.processes.script import Target, end_with, run_script
from ddpdebug.processes.torch_import import ImportWatch

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any, TypedDict

    from ddpdebug.monitor.monitor import Monitor
    from ddpdebug.processes.launch import Request
    from ddpdebug.schema.finding import Finding

    class Plan(TypedDict, total=False):
        """A parsed `run` line, or `check` line in a rank, as plain values that one process can send to another."""

        line: list[str]  # to execute in the place of this process
        environ: dict[str, str]
        mode: str  # else: RUN, AS_CHECK or CHECK
        name: str
        args: tuple[str, ...]
        module: bool
        timeout: float
        quiet: bool
        request: bytes  # pickled

else:
    Plan = dict

#: Of `Plan.mode`: no verdict, the verdict of the one who has started us, a verdict of our own.
RUN, AS_CHECK, CHECK = "run", "as-check", "check"


def planned(request: Request, mode: str) -> Plan:
    """Return the plan to run the script of a request in this process."""
    import pickle  # noqa: PLC0415 - not in the process that becomes the script

    target, config = request.target, request.config
    return {
        "mode": mode,
        "name": target.name,
        "args": target.args,
        "module": target.module,
        "timeout": config.timeout,
        "quiet": config.quiet,
        "request": pickle.dumps(request),
    }


def launcher(line: list[str], environ: Mapping[str, str]) -> Plan:
    """Return the plan to replace this process by a launcher: signals and the exit status then need no forwarding."""
    return {"line": line, "environ": dict(environ)}


def carry_out(plan: Plan) -> int:
    """Run the script in this process, or replace the process by a launcher."""
    if "line" in plan:
        os.execve(sys.executable, plan["line"], plan["environ"])  # noqa: S606 - no shell on purpose
    rank = Rank(plan)
    if rank.mode == AS_CHECK:
        from ddpdebug.isolation.own_imports import OwnImports  # noqa: PLC0415 - in a check only

        with OwnImports():
            from ddpdebug.processes import stacks  # noqa: PLC0415
        stacks.arm(os.environ)
    if rank.mode != RUN:
        end_with(rank.conclude)
    target = Target(name=plan["name"], args=tuple(plan["args"]), module=plan["module"])
    call_outermost(run_script, target, rank.before)
    return 0


class Rank:
    """This process as a rank: attached while the script runs, concluded after its exit handlers."""

    def __init__(self, plan: Plan) -> None:
        self._plan, self.mode = plan, plan["mode"]
        self._watch = ImportWatch("torch", self._torch_is_there)
        self._errors = _file_of_errors()
        self._pid = os.getpid()
        self._has_tried = self._is_cut = False
        self._in_time = _thread.allocate_lock()
        self.monitor: Monitor | None = None
        self.reason: str | None = None
        self.exit_code: int | None = None

    @property
    def request(self) -> Request:
        """The parsed command line with all of its settings; to be read within `OwnImports`."""
        import pickle  # noqa: PLC0415 - not before the script has loaded torch

        request: Request = pickle.loads(self._plan["request"])  # noqa: S301 - made by `planned`
        return request

    def before(self) -> Rank:
        """Start to wait for the script's import of torch."""
        if self.mode == CHECK:
            self._in_time.acquire()
            Thread("ddpdebug-end", self._await_end)
        self._watch.start()
        return self

    def _torch_is_there(self) -> None:
        if os.getpid() == self._pid:  # a process that the script has forked is no rank
            self.attach()

    def attach(self) -> None:
        """Attach to this process. A failure of ddpdebug must not keep the script from running, except under `check`."""
        self._is_cut = True
        try:
            from ddpdebug.isolation.own_imports import OwnImports  # noqa: PLC0415 - torch is loaded now

            with OwnImports():
                self._install()
        except Exception as error:
            from ddpdebug.isolation.user_code import is_users  # noqa: PLC0415 - as above

            if self.mode != RUN or is_users(error):  # a signal handler's is the job's
                raise
            _say(f"could not attach, the script runs without it: {type(error).__name__}: {error}")
        self._has_tried, self._is_cut = True, False

    def _install(self) -> None:
        from ddpdebug.monitor.attach import install  # noqa: PLC0415 - torch is loaded now
        from ddpdebug.printing import be_launched  # noqa: PLC0415 - as above

        be_launched(self._errors)
        request = self.request
        self.monitor = install(request.config, command=request.target.command, starts=self.mode != RUN)
        if self.mode == CHECK:
            self.monitor.ends_hang = self._give_up

    def close(self, reason: str, exit_code: int | None) -> None:
        """Close the monitor; an interrupted script keeps the ending that the interpreter gives it."""
        self._watch.stop()
        self.reason, self.exit_code = reason, None if reason == "interrupted" else exit_code
        if self.monitor is None and not self._has_tried:
            self._account_for_nothing(reason)
        if self.monitor is not None:
            self.monitor.close(reason, exit_code)

    def _account_for_nothing(self, reason: str) -> None:
        """Say that nothing was watched: torch was not loaded, or past our entry, or the attaching was cut."""
        if self.mode != RUN:
            try:
                self.attach()  # a check has a run directory, whatever has run
            except ImportError:
                return
        elif reason == "finished" and not self._plan["quiet"] and os.environ.get("RANK", "0") == "0":
            why = "sys.meta_path was replaced" if "torch" in sys.modules else "the script has not loaded torch"
            why = "an interrupt of the script's came while ddpdebug attached" if self._is_cut else why
            _say(f"{why}: nothing was watched")

    # --- the end of a check -------------------------------------------------------------------------------------------

    def conclude(self) -> int | None:
        """Return the exit status of the verdict; None to keep the script's, because another process judges.

        Where ranks have ended that the script has started by itself, that is written down.
        """
        if self._in_time.locked():
            self._in_time.release()
        if self.mode == CHECK:
            return None if self.exit_code is None else self._judged()
        starts = None if self.monitor is None else self.monitor.starts
        known = None if starts is None else starts.account()
        if known is not None:
            from ddpdebug.monitor.spawned import keep  # noqa: PLC0415 - it is loaded
            from ddpdebug.run_directory.reader import ENDS  # noqa: PLC0415 - it is loaded

            keep(known[0], ENDS, known[1])
        return None

    def _await_end(self) -> None:
        if not self._in_time.acquire(timeout=min(self._plan["timeout"], _thread.TIMEOUT_MAX)):
            self._give_up()

    def _give_up(self, hang: Finding | None = None) -> None:
        code = self._judged(timed_out=hang is None, hang=hang)
        os._exit(code)

    def _judged(self, **how: Any) -> int:
        from ddpdebug.isolation.own_imports import OwnImports  # noqa: PLC0415 - torch may be loaded now

        with OwnImports():
            from ddpdebug.commands._own_verdict import conclude  # noqa: PLC0415

            request = self.request
        return conclude(self, request, int(os.environ["RANK"]), **how)


def _file_of_errors() -> tuple[int, int] | None:
    try:
        about = os.fstat(2)
    except OSError:
        return None
    return about.st_dev, about.st_ino


def _say(text: str) -> None:
    from ddpdebug.printing import say  # noqa: PLC0415

    say(f"ddpdebug: {text}\n")
