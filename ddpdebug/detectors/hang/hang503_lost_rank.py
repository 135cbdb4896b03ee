"""HANG503: a rank left while others continue."""

from __future__ import annotations

from collections.abc import Hashable

from ddpdebug.detectors.examples import steps
from ddpdebug.detectors.hang.common import HangRule
from ddpdebug.detectors.kinds import Examples, Facts, Finding, Severity

_LEFT = {
    "kind": "left",
    "step": 5,
    "ranks": [1],
    "location": "train.py:52",
    "waits": {"0": "all_reduce #6 of float32 [8] at train.py:41"},
    "where": {"1": "it has ended: exception: KeyError: 'x', last seen at train.py:52"},
    "waited": 2.0,
}


class LostRank(HangRule):
    """The named rank exited, crashed or ran out of data; its peers are still training and wait for it.

    Impact: the peers hang until their timeout or end with a closed connection, and their tracebacks hide the first
    failure.

    Diagnosis: start with the exit reason in the evidence: a traceback names the line; signal 9 or code 137 points to
    the kernel's memory killer (`dmesg`), signals 6 and 11 to native code, of which the rank's log has the last words
    (FAIL1042 for a device-side assert), code 0 to a loop that ended early. Order the logs
    by time and read the first failure only (`torchrun --log-dir DIR --tee 3`). torchrun stops the peers itself, so
    their SIGTERM is a consequence. For a clean exit compare `len(loader)` per rank (DATA905).

    Causes:
    - `exception`: an exception on this rank: a bad sample, a label out of range, out of memory
    - `SIGABRT`, `SIGSEGV`, `SIGBUS`, `SIGFPE`, `SIGILL`: native code that ended its own process: an error of CUDA that
      a destructor or a thread of torch's met, an extension, a corrupted file
    - `killed`, `no process`: killed from outside: host memory, preemption, a job limit
    - `finished`: fewer batches on this rank than on its peers, or a stop decision taken from local values: early
      stopping, nan check, time limit

    Remedy:
    - `exception`, `killed`, `no process`: mend what ended the rank: its traceback or its signal is in the log of that
      rank
    - `finished`: equalise the batches (`DistributedSampler`, `drop_last=True`) or train under `with model.join():`,
      with `throw_on_early_termination=True` if all ranks should stop together; all-reduce every stop decision
    - wrap `main` in `torch.distributed.elastic.multiprocessing.errors.record` so that the first error is kept
    """

    code = "HANG503"
    severity = Severity.CRITICAL
    title = "a rank left while others continue"
    events = ("hang:left",)
    fires_on = Examples(
        lambda: Facts(topic="alone:hang", values={0: _LEFT}),
        lambda: Facts(topic="alone:hang", values={0: {**_LEFT, "where": {"1": "it was killed by SIGKILL"}}}),
        lambda: Facts(topic="alone:hang", values={0: {**_LEFT, "where": {"1": "it has gone: killed by SIGABRT"}}}),
    )
    silent_on = Examples(
        lambda: Facts(topic="alone:hang", values={0: {**_LEFT, "kind": "stuck"}}),
        lambda: steps(3),
    )

    def incident_key(self, finding: Finding) -> tuple[Hashable, ...]:
        return (finding.ranks,)  # a rank leaves once, whoever says so after those that have said it have ended too
