"""What tests of the hub share: a Postgres of their own, on a free port of the loopback; stores that are closed."""

from __future__ import annotations

import os
import pwd
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from machine import PATIENCE

from ddpdebug.hub.store import Store


def _programs() -> Path:
    """Return where Postgres' programs are; Debian keeps them out of the path."""
    found = [path.parent for path in sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"), reverse=True)]
    found += [Path(path).parent for path in [shutil.which("initdb")] if path]
    if found:
        return found[0]
    if os.environ.get("DDPDEBUG_REQUIRE_POSTGRES") == "1":
        pytest.fail("postgresql is not installed")
    pytest.skip("postgresql is not installed")


@pytest.fixture(autouse=True)
def _stores_are_closed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """From Python 3.13 on, a database that is collected before it is closed is a warning, in any test after it."""
    opened: list[Store] = []
    prepare = Store._prepare

    def recording(store: Store) -> None:
        opened.append(store)
        prepare(store)

    monkeypatch.setattr(Store, "_prepare", recording)
    yield
    for store in opened:
        store.close()


@pytest.fixture(scope="session")
def postgres() -> Iterator[str]:
    """The address of a database server, `postgresql+psycopg://...`; ends with the process that has started it."""
    programs, folder = _programs(), Path(tempfile.mkdtemp(prefix="ddpdebug-postgres-"))
    before = ["setpriv", "--pdeathsig", "QUIT"]
    if os.geteuid() == 0:  # which it refuses to run as
        user = pwd.getpwnam("postgres")
        os.chown(folder, user.pw_uid, user.pw_gid)
        before += ["--reuid", str(user.pw_uid), "--regid", str(user.pw_gid), "--clear-groups"]
    data = folder / "data"
    words = [programs / "initdb", "--auth=trust", "--username=ddpdebug", "--no-sync", "--encoding=UTF8", "--locale=C"]
    subprocess.run([*before, *words, "-D", data], check=True, capture_output=True, cwd=folder)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    settings = {"listen_addresses": "127.0.0.1", "port": port, "unix_socket_directories": "", "fsync": "off"}
    flags = [word for name, value in settings.items() for word in ("-c", f"{name}={value}")]
    with (folder / "log").open("wb") as log:
        server = subprocess.Popen(
            [*before, programs / "postgres", "-D", data, *flags], cwd=folder, stdout=log, stderr=subprocess.STDOUT
        )
    try:
        until = time.monotonic() + PATIENCE
        ready = [programs / "pg_isready", "-q", "-h", "127.0.0.1", "-p", str(port)]
        while subprocess.run(ready, check=False).returncode != 0:
            assert server.poll() is None, (folder / "log").read_text()
            assert time.monotonic() < until, (folder / "log").read_text()
            time.sleep(0.1)
        yield f"postgresql+psycopg://ddpdebug@127.0.0.1:{port}/postgres"
    finally:
        server.terminate()
        server.wait(PATIENCE)
        shutil.rmtree(folder, ignore_errors=True)
