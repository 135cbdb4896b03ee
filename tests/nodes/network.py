"""Hosts on one machine: each has a network, a name, processes and `/etc/hosts` of its own, and a cable to a switch.

The namespaces have no names and belong to the processes in them; an interface exists as long as somebody has it open.
So nothing is left behind, however a test ends. Between the hosts the switch, a thread of the test, carries every frame
by hand. That is where a link is slow or loses frames, and where the firewall is: no part of the kernel is needed that
it may lack.
"""

from __future__ import annotations

import heapq
import os
import random
import select
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
_MOST_FRAME = 1 << 16
_TCP, _IP = 6, 0x0800
#: Alone in namespaces; all that runs in them ends with the first process.
_ALONE = ("--net", "--uts", "--ipc", "--pid", "--mount", "--mount-proc", "--fork", "--kill-child=KILL")


@dataclass(frozen=True, kw_only=True)
class Link:
    """What happens to a frame between two hosts.

    Args:
        delay: seconds that it takes.
        loss: share of the frames that are lost.
        ports: of TCP, only connections to these pass; None: all.
    """

    delay: float = 0.0
    loss: float = 0.0
    ports: frozenset[int] | None = None

    def passes(self, frame: bytes, chance: random.Random) -> bool:
        """Return whether the frame arrives."""
        if self.loss and chance.random() < self.loss:
            return False
        ports = _ports(frame) if self.ports is not None else None
        return ports is None or self.ports is None or not self.ports.isdisjoint(ports)


def _ports(frame: bytes) -> tuple[int, int] | None:
    """Return source and destination of a TCP segment over IPv4, None of anything else."""
    if struct.unpack_from(">H", frame, 12)[0] != _IP or frame[23] != _TCP:
        return None
    source, target = struct.unpack_from(">HH", frame, 14 + 4 * (frame[14] & 15))
    return source, target


class Switch:
    """Carries frames between the hosts' interfaces, in a thread, until it is closed."""

    def __init__(self, link: Link) -> None:
        self.link = link
        self.carried = self.dropped = 0
        self._chance = random.Random(1)
        self._cables: dict[int, bytes] = {}  # descriptor -> address of its host, once that has sent something
        self._late: list[tuple[float, int, int, bytes]] = []
        self._over, self._wake = os.pipe()
        self._poll = select.poll()
        self._poll.register(self._over, select.POLLIN)
        self._thread = threading.Thread(target=self._run, name="switch", daemon=True)

    def plug(self, cable: int) -> None:
        """Take the descriptor of a host's interface."""
        os.set_blocking(cable, False)
        self._cables[cable] = b""
        self._poll.register(cable, select.POLLIN)

    def start(self) -> None:
        """Begin to carry."""
        self._thread.start()

    def close(self) -> None:
        """End the thread and let go of the interfaces."""
        os.write(self._wake, b"x")
        if self._thread.is_alive():
            self._thread.join(10)
        for descriptor in (*self._cables, self._over, self._wake):
            os.close(descriptor)

    def _run(self) -> None:
        while True:
            wait = None if not self._late else max(0.0, 1000 * (self._late[0][0] - time.monotonic()))
            for descriptor, event in self._poll.poll(wait):
                if descriptor == self._over:
                    return
                if not event & select.POLLIN:  # the host is gone
                    self._poll.unregister(descriptor)
                    continue
                with suppress(OSError):
                    self._take(descriptor, os.read(descriptor, _MOST_FRAME))
            while self._late and self._late[0][0] <= time.monotonic():
                _, _, target, frame = heapq.heappop(self._late)
                self._put(target, frame)

    def _take(self, source: int, frame: bytes) -> None:
        target, self._cables[source] = frame[:6], frame[6:12]
        known = [cable for cable, address in self._cables.items() if address == target]
        for cable in known or self._cables:
            if cable == source:
                continue
            if not self.link.passes(frame, self._chance):
                self.dropped += 1
            elif self.link.delay:
                heapq.heappush(self._late, (time.monotonic() + self.link.delay, self.carried, cable, frame))
                self.carried += 1
            else:
                self._put(cable, frame)
                self.carried += 1

    @staticmethod
    def _put(cable: int, frame: bytes) -> None:
        with suppress(OSError):  # its queue is full, or the host is gone: lost, as on any cable
            os.write(cable, frame)


class Host:
    """One host, on which commands can be run while it is there."""

    def __init__(
        self, name: str, address: str, table: Path, first: subprocess.Popen[bytes], line: socket.socket
    ) -> None:
        self.name, self.address = name, address
        self._table, self._first, self._line = table, first, line

    def rename(self, name: str, address: str) -> None:
        """Let this host take another address for a name than the others do."""
        rest = [line for line in self._table.read_text().splitlines() if line.split()[1:] != [name]]
        self._table.write_text("\n".join([*rest, f"{address} {name}\n"]))

    def command(self, words: Sequence[str]) -> list[str]:
        """Return the command line that runs `words` there."""
        child = Path(f"/proc/{self._first.pid}/task/{self._first.pid}/children").read_text().split()[0]
        kinds = ("--net", "--uts", "--ipc", "--pid", "--mount")
        return ["nsenter", f"--target={child}", *kinds, "--", *words]

    def close(self) -> None:
        """End everything on it."""
        self._line.close()
        self._first.kill()
        self._first.wait()


def refusal() -> str | None:
    """Return why there can be no hosts on this machine, None where there can."""
    for tool in ("unshare", "nsenter", "ip"):
        if shutil.which(tool) is None:
            return f"there is no `{tool}`"
    if not os.access("/dev/net/tun", os.R_OK | os.W_OK):
        return "/dev/net/tun cannot be opened"
    tried = subprocess.run(["unshare", *_ALONE, "true"], capture_output=True, text=True, check=False)
    return f"no namespaces: {tried.stderr.strip()}" if tried.returncode else None


@contextmanager
def hosts(count: int, link: Link = Link(), names: Mapping[str, str] | None = None) -> Iterator[list[Host]]:
    """Yield `count` hosts, `node-a`, `node-b`, ..., at 10.77.0.1, 10.77.0.2, ...

    Args:
        link: between any two of them.
        names: what each finds in its `/etc/hosts` beside localhost, name -> address; all hosts by default. The word
            `own` stands for the host's own name.
    """
    listed = [(f"node-{chr(ord('a') + i)}", f"10.77.0.{i + 1}") for i in range(count)]
    switch, made = Switch(link), list[Host]()
    with tempfile.TemporaryDirectory() as folder:
        try:
            for name, address in listed:
                known = dict(listed) if names is None else {word.replace("own", name): a for word, a in names.items()}
                table = Path(folder) / name
                table.write_text("".join(f"{a} {n}\n" for n, a in {"localhost": "127.0.0.1", **known}.items()))
                made.append(_host(name, address, table, switch))
            switch.start()
            yield made
        finally:
            for host in made:
                host.close()
            switch.close()


def _host(name: str, address: str, table: Path, switch: Switch) -> Host:
    ours, theirs = socket.socketpair()
    with theirs:
        words = [sys.executable, str(HERE / "host.py"), str(theirs.fileno()), name, address, str(table)]
        first = subprocess.Popen(["unshare", *_ALONE, *words], pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
        theirs.close()
        ours.settimeout(60)
        host = Host(name, address, table, first, ours)
        try:
            _, cables, *_ = socket.recv_fds(ours, 16, 1)
            switch.plug(cables[0])
        except BaseException:
            host.close()
            raise
    return host
