"""Eight situations as real jobs served them to a scraper, with the moments of the scrapes, and their recorder.

`python tests/support/situations.py [NAME...]` runs the jobs again, two at a time, and writes their files in
`tests/monitoring/situations/`: after a change of the metrics, or of what they say. A file is JSON, compressed by xz: a
list of scrapes, each of them [seconds since the epoch, address -> page or null where nothing answered], with the
addresses as a Prometheus finds them in --sd-dir, without the comment lines.
"""

from __future__ import annotations

import json
import lzma
import os
import platform
import struct
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

MONITORING = Path(__file__).parent.parent / "monitoring"
FOLDER = MONITORING / "situations"
#: Name -> seconds of training, seconds of scrapes. All but `killed` and `ended` are recorded while they run.
SITUATIONS = {
    "healthy": (400, 100),
    "disagreeing": (400, 100),
    "nan": (400, 100),
    "killed": (400, 90),
    "ended": (60, 110),
    "hung": (400, 100),
    "waiting": (400, 100),
    "slow": (400, 100),
}
_INTERVAL = 5.0

Scrape = tuple[float, dict[str, str | None]]


def read(name: str) -> list[Scrape]:
    """Return the scrapes of a recorded situation."""
    found: list[Scrape] = json.loads(lzma.decompress((FOLDER / f"{name}.json.xz").read_bytes()))
    return found


def samples(name: str, end: float) -> Iterator[tuple[dict[str, str], list[tuple[float, float]]]]:
    """Yield the series that Prometheus would have made of a situation whose last scrape is at `end`: labels, samples.

    Values that are times move along. A series that a scrape no longer brings ends with Prometheus's mark for it.
    """
    scrapes = read(name)
    shift = end - scrapes[-1][0]
    made: dict[tuple[tuple[str, str], ...], list[tuple[float, float]]] = {}
    alive: dict[str, set[tuple[tuple[str, str], ...]]] = {}
    for seconds, pages in scrapes:
        moment = seconds + shift
        for address in alive.keys() | pages.keys():
            target = {"job": "ddpdebug", "instance": f"{name}:{address.rpartition(':')[2]}", "sd": "file"}
            now = set()
            page = pages.get(address)
            found = list(_parsed(page)) if page else []
            if address in pages:
                found.append(({"__name__": "up"}, float(page is not None)))
            for labels, value in found:
                key = tuple(sorted({**target, **labels}.items()))
                moved = value + shift if "_timestamp_seconds" in labels["__name__"] else value
                made.setdefault(key, []).append((moment, moved))
                now.add(key)
            for key in alive.get(address, set()) - now:
                made[key].append((moment, STALE))
            alive[address] = now
    for key, points in made.items():
        yield dict(key), points


def _parsed(page: str) -> Iterator[tuple[dict[str, str], float]]:
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            yield {"__name__": sample.name, **sample.labels}, sample.value


#: Prometheus's mark for a series that has ended: a NaN of its own.
STALE = struct.unpack("<d", struct.pack("<Q", 0x7FF0000000000002))[0]


def write_request(series: Iterable[tuple[Mapping[str, str], Sequence[tuple[float, float]]]]) -> bytes:
    """Return the body of a remote write: Prometheus's message, in a snappy block that compresses nothing."""
    body = bytearray()
    for labels, points in series:
        text = b"".join(
            _field(1, _field(1, name.encode()) + _field(2, value.encode())) for name, value in sorted(labels.items())
        )
        values = b"".join(
            _field(2, b"\x09" + struct.pack("<d", value) + b"\x10" + _varint(round(1000 * moment)))
            for moment, value in points
        )
        body += _field(1, text + values)
    chunks = (bytes(body[i : i + 65536]) for i in range(0, len(body), 65536))
    literals = (b"\xf4" + struct.pack("<H", len(chunk) - 1) + chunk for chunk in chunks)
    return _varint(len(body)) + b"".join(literals)


def _field(number: int, content: bytes) -> bytes:
    return bytes([number << 3 | 2]) + _varint(len(content)) + content


def _varint(number: int) -> bytes:
    made = bytearray()
    while number > 0x7F:
        made.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*made, number])


def _page(address: str) -> str | None:
    try:
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=4) as answer:
            page = answer.read().decode()
    except OSError:
        return None
    # without what is of the machine on which this was recorded
    page = page.replace(f"{MONITORING / 'scripts'}{os.sep}", "").replace(platform.node(), "node")
    return "".join(line for line in page.splitlines(keepends=True) if not line.startswith("#"))


def _scrape(folder: Path) -> dict[str, str | None]:
    pages = {}
    for path in sorted(folder.glob("ddpdebug-*.json")):
        for entry in json.loads(path.read_text()):
            for address in entry["targets"]:
                pages[address] = _page(address)
    return pages


def record(name: str) -> None:
    """Run the job of this situation and write what it served; it ends with the recording."""
    training, seconds = SITUATIONS[name]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        words = [sys.executable, "-m", "ddpdebug", "run", "--nproc-per-node", "4", "--quiet"]
        words += [] if name in {"healthy", "slow"} else ["--every-step"]
        words += ["--name", name, "--sd-dir", str(folder / "targets"), "--out", str(folder / "run")]
        words += [str(MONITORING / "scripts" / "situation.py"), name, str(training)]
        with (folder / "log").open("wb") as log:
            environment = {**os.environ, "OMP_NUM_THREADS": "1"}
            job = subprocess.Popen(words, env=environment, stdout=log, stderr=subprocess.STDOUT)
        try:
            while not any((pages := _scrape(folder / "targets")).values()):
                if job.poll() is not None:
                    raise SystemExit((folder / "log").read_text())
                time.sleep(0.2)
            began, scrapes = time.time(), list[Scrape]()
            while (now := time.time()) < began + seconds:
                scrapes.append((round(now, 3), pages))
                time.sleep(_INTERVAL - (now - began) % _INTERVAL)
                pages = _scrape(folder / "targets")
        finally:
            job.terminate()
            job.wait(60)
    text = json.dumps(scrapes, separators=(",", ":"))
    (FOLDER / f"{name}.json.xz").write_bytes(lzma.compress(text.encode(), preset=9))


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(record, sys.argv[1:] or SITUATIONS))
