"""The rendezvous of one monitor's ranks in the job's store, before ddpdebug's own process group exists.

A store may be older than the job in it: an elastic restart, a second `init_process_group` or a file that was left over
shows the keys of processes that are gone. Nothing here believes in a key because it exists. Every rank draws a random
nonce and queues up with it; rank 0 reads the queue and answers under keys that end in the nonces, so that only the
process that it means can find the answer. The answer carries a token of rank 0, again random, and everything after it
(who has come, addresses of the side group) stands under keys with the token.

What the ranks are (versions, layouts, settings that they must share) travels in the queue and is compared by rank 0
before a single byte goes over gloo, which aborts the process when two ends disagree about a length.

Cost for the store: about eight operations per rank in all, and while a rank waits one each poll; polls slow down to one
in `_LONGEST_SECONDS`, or to a thousand a second for the whole world where that is longer. Rank 0 reads and answers the
others many at a time. Names of keys and of the fields of an arrival stay as they are: a later version must be able to
read what this one says of itself.
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

from ddpdebug.clock import time
from ddpdebug.exchange.addresses import elsewhere
from ddpdebug.sinks.words import ranks_text

_FIRST_SECONDS, _LONGEST_SECONDS = 0.005, 0.25
_POLLS_PER_SECOND = 1024  # of all ranks together
#: A rank that has its answer looks at it again in each so many polls.
_LOOK_AGAIN = 8
#: Begins what is said of a token that counts no more.
_VOID = "void"
_AT_ONCE = 256  # keys of other ranks that rank 0 reads, or sets, in one operation
#: Whoever is not answered queues up again: a process that stood still between two operations may have been overlooked.
_AGAIN_SECONDS, _AGAIN_POLLS = 30.0, 10
#: After so long it is looked whether a rank that is missing left the key by which version 0.1.0 tells that it is there.
_OLD_SECONDS = 3.0

#: In what a rank is: from where it reaches the store; in what rank 0 decides: an address that other hosts reach.
ADDRESS, ELSEWHERE = "~address", "~elsewhere"


class Waiting:
    """The state of a meeting in progress, for messages; `missing` are the ranks that have not come so far."""

    def __init__(self) -> None:
        self.missing: tuple[int, ...] = ()


class RollCall:
    """One rank's part in the meeting.

    Args:
        store: a connection of our own (`private_store`).
        number: of this monitor in its process; the ranks' n-th monitors belong together.
        identity: what has to be equal on all ranks, name -> JSON value; what begins with `~` is rank 0's to decide.
        give_up: asked at every poll; returns why there is nothing left to wait for, else None.
        waiting: kept up to date for whoever wants to say what is waited for.
    """

    def __init__(
        self,
        store: Any,
        number: int,
        rank: int,
        world: int,
        identity: Mapping[str, Any],
        give_up: Callable[[], str | None],
        waiting: Waiting | None = None,
    ) -> None:
        self.rank, self.world = rank, world
        self.token = ""
        self.settings: dict[str, Any] = {}  # of rank 0, those that are its to decide
        self.identities: dict[int, Mapping[str, Any]] = {}  # of all ranks, known on rank 0
        self._store, self._identity, self._give_up = store, dict(identity), give_up
        self._waiting = waiting or Waiting()
        self._base, self._old = f"ddpdebug/meeting/{number}", f"ddpdebug/{number}/group/0/here"
        self._attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "")
        self._nonce = secrets.token_hex(8)
        self._tickets_read = 0
        self._holes: set[int] = set()  # tickets that were taken by ranks that have not signed yet
        self._arrivals: dict[int, dict[str, Any]] = {}
        # rank 0, for whom all others wait, is one alone
        self._longest = max(_LONGEST_SECONDS, world / _POLLS_PER_SECOND if rank else 0.0)
        self._again = max(_AGAIN_SECONDS, _AGAIN_POLLS * self._longest)

    def meet(self) -> str:
        """Wait for all ranks; return the key prefix of this meeting.

        Raises:
            ConnectionError: the ranks cannot be compared; the text says which rank is to blame, for people.
        """
        self._queue_up()
        self.token = self._call() if self.rank == 0 else self._answer_call()
        self._waiting.missing = ()
        return f"{self._base}/{self.token}"

    def meet_again(self, generation: int, size: int) -> str:
        """Wait for the `size` members of a later, smaller group; return its key prefix."""
        place = f"{self._base}/{self.token}/{generation}"
        if int(self._store.add(f"{place}/here", 1)) == size:
            self._store.set(f"{place}/all", "1")  # the last one tells all, so that each polls one key
        for _ in self._polls():
            if self._store.check([f"{place}/all"]):
                break
        return place

    # --- all ranks ----------------------------------------------------------------------------------------------------

    def _queue_up(self) -> None:
        ticket = int(self._store.add(f"{self._base}/tickets", 1))
        arrival = {
            "rank": self.rank,
            "world": self.world,
            "attempt": self._attempt,
            "nonce": self._nonce,
            "identity": self._identity,
        }
        self._store.set(f"{self._base}/arrival/{ticket}", json.dumps(arrival))

    def _polls(self, *, raises: bool = True) -> Iterator[str | None]:
        """Yield for each look; after each one comes a pause. Yields the reason to give up where it is not raised."""
        # thousands of ranks come to this at once
        pause = _FIRST_SECONDS if self._longest == _LONGEST_SECONDS else self._longest / 4
        reason = None
        while True:
            yield reason
            reason = self._give_up()
            if reason is not None and raises:
                raise ConnectionError(reason)
            time.sleep(pause)
            pause = min(2 * pause, self._longest)

    # --- the other ranks ----------------------------------------------------------------------------------------------

    def _answer_call(self) -> str:
        key, token, started = f"{self._base}/answer/{self._nonce}", "", time.monotonic()
        queued, looked = started, False
        for poll, reason in enumerate(self._polls(raises=False)):
            now = time.monotonic()
            if reason is not None:
                if self._withdraw(token):
                    raise ConnectionError(reason)
                return token  # too late: the others have gone on with us
            said = self._decision(token) if token else ""
            if said and not said.startswith(_VOID):
                return token
            if token and not said and poll % _LOOK_AGAIN:
                continue  # rank 0 says where it begins again, and now and then it is another process
            if token or self._store.check([key]):
                token = self._accept(key, token)
                continue
            self._waiting.missing = (0,)
            if not looked and now - started > _OLD_SECONDS:
                looked = True
                self._look_for_older([0])
            if now - queued > self._again:
                queued = now
                self._queue_up()
        raise AssertionError  # polls do not end by themselves

    def _accept(self, key: str, token: str) -> str:
        """Return the token of rank 0's answer; where it is a new one, say that this rank has it."""
        answer = json.loads(self._store.get(key))
        if "refused" in answer:
            raise ConnectionError(str(answer["refused"]))
        if answer["token"] != token:
            token, self.settings = str(answer["token"]), dict(answer["settings"])
            self._store.add(f"{self._base}/{token}/here", 1)
        return token

    def _look_for_older(self, missing: Sequence[int]) -> None:
        """Raise ConnectionError where ranks that have not come run version 0.1.0, which knows another place to meet."""
        old = [rank for rank in missing if self._store.check([f"{self._old}/{rank}"])]
        if old:
            name = "versions of ddpdebug"
            self._refuse(_different(name, [("0.1.0", old), (_text(self._identity.get(name)), [self.rank])]))

    def _decision(self, token: str) -> str:
        """Return what is said to all who know a token: that they go on, or that it is void; empty where nothing is."""
        key = f"{self._base}/{token}/all"
        return self._store.get(key).decode() if self._store.check([key]) else ""

    def _withdraw(self, token: str) -> bool:
        """Call the meeting off, unless rank 0 has closed it a moment ago: then it counts on us."""
        if not token:
            return True
        if int(self._store.add(f"{self._base}/{token}/decision", 1)) == 1:
            self._store.set(f"{self._base}/{token}/all", f"{_VOID} {self.rank}")
            return True
        deadline = time.monotonic() + _AGAIN_SECONDS
        while not (said := self._decision(token)) and time.monotonic() < deadline:
            time.sleep(_FIRST_SECONDS)  # whoever was first is about to say what it has decided
        return not said or said.startswith(_VOID)

    # --- rank 0 -------------------------------------------------------------------------------------------------------

    def _call(self) -> str:
        if self._store.check([f"{self._base}/done"]):  # of an earlier meeting
            self._tickets_read = int(self._store.get(f"{self._base}/done"))
        token, started, looked = "", time.monotonic(), False
        for _ in self._polls():
            if self._read():  # somebody has come, or come back as another process
                if token:
                    self._store.set(f"{self._base}/{token}/all", f"{_VOID} {self.rank}")
                token = ""
            missing = [rank for rank in range(self.world) if rank not in self._arrivals]
            self._waiting.missing = tuple(missing)
            if missing:
                if not looked and time.monotonic() - started > _OLD_SECONDS:
                    looked = True
                    self._look_for_older(missing)
                continue
            if not token:
                token = self._invite()
            if said := self._decision(token):  # somebody has withdrawn
                self._arrivals.pop(int(said.split()[1]), None)
                token = ""
            elif int(self._store.add(f"{self._base}/{token}/here", 0)) == self.world - 1 and (
                int(self._store.add(f"{self._base}/{token}/decision", 1)) == 1
            ):
                self._store.set(f"{self._base}/done", str(self._tickets_read))
                self._store.set(f"{self._base}/{token}/all", "go")
                return token
        raise AssertionError  # polls do not end by themselves

    def _read(self) -> bool:
        """Take the new signatures; return whether they change anything."""
        changed = False
        last = int(self._store.add(f"{self._base}/tickets", 0))
        tickets = sorted(self._holes | set(range(self._tickets_read + 1, last + 1)))
        self._holes.clear()
        blocks = (tickets[start : start + _AT_ONCE] for start in range(0, len(tickets), _AT_ONCE))
        for signature in chain.from_iterable(map(self._signatures, blocks)):
            arrival = json.loads(signature)
            rank, nonce = int(arrival["rank"]), arrival["nonce"]
            if rank == 0 and nonce != self._nonce:
                if 0 in self._arrivals:  # behind our own in the queue
                    raise ConnectionError("another process has taken the place of rank 0")
                continue
            if (arrival["world"], arrival["attempt"]) != (self.world, self._attempt):
                continue  # of another attempt
            if rank not in self._arrivals or self._arrivals[rank]["nonce"] != nonce:
                self._arrivals[rank] = arrival
                changed = True
        self._tickets_read = max(self._tickets_read, last)
        return changed

    def _signatures(self, tickets: list[int]) -> list[bytes]:
        """Return what stands under tickets, in their order; those that nobody has signed yet are looked at again."""
        keys = [f"{self._base}/arrival/{ticket}" for ticket in tickets]
        if self._store.check(keys):
            found: list[bytes] = self._store.multi_get(keys)
            return found
        if len(tickets) == 1:
            self._holes.update(tickets)
            return []
        middle = len(tickets) // 2
        return self._signatures(tickets[:middle]) + self._signatures(tickets[middle:])

    def _invite(self) -> str:
        self.identities = {rank: self._arrivals[rank]["identity"] for rank in range(self.world)}
        if (reason := disagreement(self.identities)) is not None:
            self._refuse(reason)
        token = secrets.token_hex(8)
        self.settings = {name: value for name, value in self._identity.items() if name.startswith("~")}
        if other := elsewhere(str(identity.get(ADDRESS, "")) for identity in self.identities.values()):
            self.settings[ELSEWHERE] = other
        self._tell({"token": token, "settings": self.settings})
        return token

    def _refuse(self, reason: str) -> None:
        self._tell({"refused": reason})
        raise ConnectionError(reason)

    def _tell(self, answer: Mapping[str, Any]) -> None:
        text = json.dumps(answer)
        nonces = [arrival["nonce"] for rank, arrival in self._arrivals.items() if rank != 0]
        keys = [f"{self._base}/answer/{nonce}" for nonce in nonces]
        for start in range(0, len(keys), _AT_ONCE):
            some = keys[start : start + _AT_ONCE]
            self._store.multi_set(some, [text] * len(some))


def disagreement(identities: Mapping[int, Mapping[str, Any]]) -> str | None:
    """Describe a difference between the ranks in what must be equal; None if they agree.

    The first name that differs is named, in the order of rank 0's; names that begin with `~` may differ.
    """
    names = dict.fromkeys(name for rank in sorted(identities) for name in identities[rank])
    for name in names:
        if name.startswith("~"):
            continue
        groups: dict[str, list[int]] = {}
        for rank, identity in sorted(identities.items()):
            groups.setdefault(_text(identity.get(name)), []).append(rank)
        if len(groups) > 1:
            listed = sorted(groups.items(), key=lambda item: (len(item[1]), item[1]))
            return _different(name, [(value, ranks) for value, ranks in listed])
    return None


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True)


def _different(name: str, groups: list[tuple[str, list[int]]]) -> str:
    has = ", ".join(f"{ranks_text(ranks)} {value}" for value, ranks in groups)
    remedy = "give all ranks the same" if name.startswith("settings") else "install the same on all nodes"
    return f"the ranks have different {name} ({has}): {remedy}"
