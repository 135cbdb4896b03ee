"""Exchange of facts between the ranks of a test, over the store of their group, with a deadline."""

from __future__ import annotations

import json
from typing import Any

import torch.distributed as dist

from ddpdebug import torch_internals as internals
from ddpdebug.clock import time
from ddpdebug.errors import UsageError
from ddpdebug.sinks.words import ranks_text

_FIRST_PAUSE, _LONGEST_PAUSE = 0.0005, 0.02


class Meeting:
    """One call of an assertion by all ranks, in rounds: in each, every rank gives a value and gets those of all.

    Args:
        what: the call as the user wrote it, for messages.
        timeout: seconds to wait for the other ranks in each round.
    """

    def __init__(self, what: str, timeout: float) -> None:
        store = internals.private_store() if dist.is_initialized() else None
        if store is None:
            raise UsageError(
                f"{what} compares the ranks of a process group, and there is none: mark the test with "
                "@pytest.mark.ranks(N), or call torch.distributed.init_process_group first"
            )
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self._store, self._what, self._timeout = store, what, timeout
        # counted in the store and not here: a process may see many groups, and calls that others did not make
        self._number = store.add(f"ddpdebug/meetings/{self.rank}", 1)
        self._round = 0

    def tell(self, value: bytes) -> list[bytes]:
        """Give `value` and return the values of all ranks; raise AssertionError naming ranks that do not come."""
        prefix = f"ddpdebug/meeting/{self._number}/{self._round}"
        self._round += 1
        keys = [f"{prefix}/{rank}" for rank in range(self.world)]
        self._store.set(keys[self.rank], value)
        deadline, pause = time.monotonic() + self._timeout, _FIRST_PAUSE
        while not self._store.check(keys):
            if time.monotonic() > deadline:
                absent = [rank for rank in range(self.world) if not self._store.check([keys[rank]])]
                raise AssertionError(
                    f"{ranks_text(absent)} did not come to {self._what} within {self._timeout:g} s; every rank must "
                    "call it, in the same order"
                )
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)
        return [self._store.get(key) for key in keys]

    def tell_json(self, value: Any) -> list[Any]:
        """Give a JSON value and return those of all ranks."""
        return [json.loads(said) for said in self.tell(json.dumps(value).encode())]
