"""Tells the failure of a rank that lost its peer from a failure of its own. Torch-free."""

from __future__ import annotations

import re

#: What torch raises from its collectives and its store when they break or give up.
_KINDS = frozenset({"DistBackendError", "DistNetworkError", "DistStoreError"})
#: What gloo, NCCL and torch's store say when a peer is gone or does not come.
_LOST_PEER = re.compile(
    r"connection (was )?(closed|reset|refused|aborted)|broken pipe|recvValue failed|failed to recv|"
    r"timed out (waiting|after)|socket timeout|wait timeout|monitoredBarrier|remote process exited|"
    r"NCCL communicator was aborted",
    re.IGNORECASE,
)


def is_lost_peer(error: BaseException | None) -> bool:
    """Tell whether `error`, or what it was raised from, says that a peer is gone or did not come in time."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        if type(error).__name__ in _KINDS or (isinstance(error, RuntimeError | OSError) and _says_so(error)):
            return True
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return False


def _says_so(error: BaseException) -> bool:
    return _LOST_PEER.search(str(error)) is not None
