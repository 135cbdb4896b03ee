"""The first process of a host: names it, gives it an interface, hands the cable out and waits for the test's end.

Run by `network.py` in namespaces of its own:

    host.py SOCKET NAME ADDRESS HOSTS
"""

from __future__ import annotations

import fcntl
import os
import socket
import struct
import subprocess
import sys

_TUNSETIFF, _TAP, _PLAIN = 0x400454CA, 0x0002, 0x1000


def main(descriptor: int, name: str, address: str, table: str) -> None:
    """Become the host."""
    socket.sethostname(name)
    cable = os.open("/dev/net/tun", os.O_RDWR)
    fcntl.ioctl(cable, _TUNSETIFF, struct.pack("16sH22x", b"eth0", _TAP | _PLAIN))
    for line in (
        "ip link set lo up",
        f"ip addr add {address}/24 dev eth0",
        "ip link set eth0 up",
        f"mount --bind {table} /etc/hosts",
        "mount --bind /dev/null /etc/resolv.conf",  # who knows no name says so at once
    ):
        subprocess.run(line.split(), check=True)
    with socket.socket(fileno=descriptor) as outside:
        socket.send_fds(outside, [b"x"], [cable])
        os.close(cable)
        outside.recv(1)  # until the test closes it, or is gone itself


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
