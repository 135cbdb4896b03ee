"""HANG501: a rank stopped advancing while others wait."""

from __future__ import annotations

from typing import Any

from ddpdebug.detectors.examples import steps
from ddpdebug.detectors.hang.common import HangRule
from ddpdebug.detectors.kinds import Examples, Facts, Fields, Severity
from ddpdebug.schema.announcements import Hang

_WAITS = {"0": "all_reduce #6 of float32 [8] at train.py:41"}
_STUCK = {
    "kind": "stuck",
    "step": 5,
    "ranks": [1],
    "phase": "data",
    "location": "train.py:33",
    "waits": _WAITS,
    "where": {"1": "waits for a worker of its DataLoader, at train.py:33"},
    "blocked_in": "loader",
    "waited": 9.0,
}


class StuckRank(HangRule):
    """The named rank does not advance; its peers have gone further and wait for it in a collective.

    It was not accused by the clock: nothing moved in it for seconds (no frame, no processor time, no data), or its
    interpreter gives no sign of life and the kernel shows why. A rank that works is never named, however long it takes;
    as a warning it is, where the others wait ten times longer than ever before in this run, and a minute at least; or
    where code in C keeps its interpreter for 15 s or more, which is critical after a minute, and in a regular
    expression that does not come to an end after 8 s.

    Impact: all devices idle until the process group's timeout ends the job, if it does.

    Diagnosis: read the stack of the named rank in the evidence, not the traceback of the ranks that time out: these
    are the victims. The phase separates data loading, forward, backward and optimizer; `interpreter` is a process that
    cannot even run the watching thread. If the stack ends inside a cuda call, look for device errors (`dmesg`, Xid
    messages) and compare `nvidia-smi` utilisation. A second look is `ddpdebug stacks RUN`.

    Causes:
    - `blocked in loader`, `blocked in queue`: the input pipeline is blocked: storage, a dead worker, a lock inherited
      through fork
    - `blocked in file`: a lock that another process holds, a pipe or a file that nobody writes, slow storage
    - `blocked in lock`: a deadlock between threads, or two communicators used in different orders
    - `blocked in socket`, `blocked in process`, `blocked in sleep`: work on this rank only that waits for something
      else: download, another process
    - `blocked in input`, `blocked in debugger`: somebody is asked: `input()`, a debugger's prompt, a breakpoint that
      was left in
    - `blocked in native code`: the process was stopped from outside, or code in C holds the interpreter's lock: a
      regular expression with a repetition inside of another, such as `(a+)+$`, may try more ways to match than there is
      time for
    - a branch on rank that leads past a collective or into one more than the others run
    - a device or link failure, or a kernel that does not end

    Remedy:
    - `blocked in loader`, `blocked in queue`: set `DataLoader(timeout=...)` so that a stuck worker raises, and
      `multiprocessing_context="spawn"` or `"forkserver"` where threads exist before the fork
    - `blocked in file`, `blocked in lock`, `blocked in socket`, `blocked in process`: give locks, queues, sockets and
      subprocesses a timeout
    - `blocked in input`, `blocked in debugger`: take the prompt or the breakpoint out, or guard it with
      `sys.stdin.isatty()`
    - move work for one rank away from the collectives, or give it a barrier on a group with a longer
      `init_process_group(timeout=...)`
    - take a failing node out of the job
    """

    code = "HANG501"
    severity = Severity.CRITICAL
    title = "a rank stopped advancing while others wait"
    events = ("hang:stuck", "hang:silent", "hang:busy")
    fires_on = Examples(
        lambda: Facts(topic="alone:hang", values={0: _STUCK}),
        lambda: Facts(topic="alone:hang", values={0: {**_STUCK, "kind": "silent", "phase": "interpreter"}}),
        lambda: Facts(topic="alone:hang", values={0: {**_STUCK, "phase": "interpreter", "runs": True}}),
        lambda: Facts(topic="alone:hang", values={0: {**_STUCK, "kind": "busy", "waited": 70.0}}),
    )
    silent_on = Examples(
        lambda: Facts(topic="alone:hang", values={0: {**_STUCK, "kind": "left"}}),
        lambda: Facts(topic="alone:hang", values={0: {**_STUCK, "kind": "mismatch"}}),
        lambda: steps(3),
    )

    def evidence(self, fact: Hang) -> dict[str, Any]:
        where = "native code" if fact.kind == "silent" or fact.runs else fact.blocked_in
        return super().evidence(fact) | ({"blocked_in": where} if where else {})

    def judge(self, fact: Hang) -> Fields | None:
        fields = dict(super().judge(fact) or {})
        if fact.kind == "busy":
            title = "a rank is at work while others wait far longer than usual"
            fields |= {"severity": Severity.WARNING, "title": title}
        elif fact.runs:
            title = "a rank runs code that does not let others run while others wait"
            fields |= {"severity": Severity.WARNING, "title": title}
        return fields
