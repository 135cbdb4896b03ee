"""Discovery of ranks by Prometheus: files for `file_sd_configs`, lists for `http_sd_configs`, a line of configuration.

Torch-free, and without prometheus_client.

A file is written atomically, touched every minute while the process lives that serves (also while training hangs), and
removed at the end, however the rank has ended, where a process beside it serves (companion/speaker.py). One that
nobody touched for a quarter of an hour belongs to a machine that has gone: whoever shares the directory removes it.
Until then Prometheus sees that rank as down, which is the alarm.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from ddpdebug.clock import time
from ddpdebug.disk import Disk
from ddpdebug.sinks import Record, RunEnded, RunStarted

#: The files that `--sd-dir` holds, for `file_sd_configs`; unfinished ones begin with a dot.
PATTERN = "ddpdebug-*.json"
_TOUCH_SECONDS = 60.0
_SWEEP_SECONDS = 300.0
STALE_SECONDS = 900.0
_MAX_BYTES = 10_000


def target(address: str, scheme: str = "http", **labels: str) -> dict[str, object]:
    """Return one entry of a target list, with the labels for all series of the target.

    The series name their run themselves: a label of the target by the same name would push theirs aside.
    """
    labels = dict(labels)
    if scheme != "http":
        labels["__scheme__"] = scheme
    return {"targets": [address], "labels": labels}


def scrape_snippet(record: RunStarted) -> str:
    """Return one line of YAML by which Prometheus finds the ranks of this run and, if possible, of later ones.

    A port that the system has chosen is another one in the next run, which the line says.
    """
    url = record.metrics_url or ""
    scheme = url.partition(":")[0]
    directory = record.config.get("sd_dir")
    access = ""  # the list of targets is asked for with settings of its own
    if record.config.get("metrics_client_ca"):
        access += ", tls_config: {ca_file: CA_FILE, cert_file: CERTIFICATE_FILE, key_file: KEY_FILE}"
    if record.config.get("metrics_password_file"):
        access += ", basic_auth: {username: NAME, password_file: FILE}"
    extra = f"{'' if scheme == 'http' else ', scheme: https'}{access}"
    if directory:
        path = json.dumps(str(Path(str(directory)).absolute() / PATTERN))
        # of changes on another machine nobody tells Prometheus: a run that has ended would be down for five minutes
        return f"- {{job_name: ddpdebug, file_sd_configs: [{{files: [{path}], refresh_interval: 30s}}]{extra}}}"
    address = json.dumps(f"{url.removesuffix('/metrics')}/sd")
    once = "" if record.config.get("metrics_port") else "  # this run; all runs: --sd-dir DIR or --metrics-port 9400"
    return f"- {{job_name: ddpdebug, http_sd_configs: [{{url: {address}{access}}}]{extra}}}{once}"


class TargetFile:
    """The `file_sd_configs` file of one rank.

    Args:
        directory: `--sd-dir`, shared by the ranks and by Prometheus.
        name: tells this rank from all others in the directory.

    Raises:
        OSError: the directory cannot be written.
    """

    def __init__(
        self,
        directory: Path,
        name: str,
        entry: Mapping[str, object],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._clock, self._owner = clock, os.getpid()
        self.text, self._targets = json.dumps([entry]) + "\n", entry["targets"]
        self.path = directory / f"ddpdebug-{re.sub(r'[^A-Za-z0-9._-]', '_', name)}.json"
        self._write()
        self._touched = self._swept = clock()
        self.sweep()

    def _write(self) -> None:
        Disk(None).replace(self.path, [self.text.encode()])  # Prometheus is another user

    def keep(self) -> None:
        """Touch the file as a sign of life, and remove stale files; call it often, it is cheap."""
        now = self._clock()
        if now - self._touched >= _TOUCH_SECONDS:
            self._touched = now
            with suppress(OSError):
                try:
                    os.utime(self.path)
                except FileNotFoundError:  # swept while this process was suspended
                    self._write()
        if now - self._swept >= _SWEEP_SECONDS:
            self._swept = now
            self.sweep()

    def sweep(self) -> None:
        """Remove files that were not touched for long, by the directory's own clock."""
        with suppress(OSError):
            here = self.path.stat().st_mtime  # a shared file system's clock, not this machine's
            for other in [*self.path.parent.glob(PATTERN), *self.path.parent.glob(f".{PATTERN}.*")]:
                with suppress(OSError):
                    if here - other.stat().st_mtime > STALE_SECONDS or self._replaces(other):
                        other.unlink()

    def _replaces(self, other: Path) -> bool:
        """Return whether another file names this rank's address: its process is gone, since this one has the port."""
        if other == self.path or other.name.startswith("."):
            return False
        with suppress(ValueError, TypeError, LookupError):
            return bool(json.loads(other.read_bytes()[:_MAX_BYTES])[0]["targets"] == self._targets)
        return False

    def move(self, address: str) -> None:
        """Change the address in the file."""
        if self._is_own():
            self._targets = [address]
            entry = json.loads(self.text)[0] | {"targets": self._targets}
            self.text = json.dumps([entry]) + "\n"
            self._write()

    def remove(self) -> None:
        """Delete the file, unless another process has replaced it; a forked child does nothing."""
        if os.getpid() == self._owner and self._is_own():
            self.path.unlink(missing_ok=True)

    def _is_own(self) -> bool:
        try:
            return self.path.read_text(encoding="utf-8") == self.text
        except (OSError, ValueError):
            return False


class Discovery:
    """The sink that keeps a rank's target file, from the first record to the last."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._file: TargetFile | None = None

    def write(self, record: Record) -> None:
        """Write the file when the rank serves metrics; delete it when the rank ends."""
        match record:
            case RunStarted(metrics_url=str(url)):
                scheme, _, rest = url.partition("://")
                # a file goes with its run: a target of a file that is down has died, which the rules look at
                entry = target(rest.partition("/")[0], scheme, sd="file")
                self._file = TargetFile(self._directory, f"{record.run_id}-{record.rank}", entry)
            case RunEnded():
                self.close()

    def keep(self) -> None:
        """Touch the file as a sign of life."""
        if (file := self._file) is not None:
            file.keep()

    def move(self, address: str) -> bool:
        """Change the address in the file; return whether there is a file."""
        if (file := self._file) is not None:
            file.move(address)
        return self._file is not None

    def close(self) -> None:
        """Delete the file."""
        file, self._file = self._file, None
        if file is not None:
            file.remove()
