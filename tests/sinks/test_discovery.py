"""The files by which Prometheus finds the ranks."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ddpdebug.sinks import RunEnded, RunStarted
from ddpdebug.sinks.prometheus.discovery import PATTERN, STALE_SECONDS, Discovery, TargetFile, scrape_snippet, target

STARTED = RunStarted(run_id="r/1", rank=3, world=4, directory=None, config={}, versions={},
                     metrics_url="http://127.0.0.1:9403/metrics")  # fmt: skip
ENTRY = target("127.0.0.1:1")


def test_a_rank_is_on_the_list_from_start_to_end(tmp_path: Path) -> None:
    """In one file of its own, whole at any time, whatever the run is called."""
    sink = Discovery(tmp_path / "sd")
    sink.write(STARTED)
    (file,) = (tmp_path / "sd").glob(PATTERN)
    assert json.loads(file.read_text()) == [{"targets": ["127.0.0.1:9403"], "labels": {"sd": "file"}}]
    assert [path.name for path in (tmp_path / "sd").iterdir()] == ["ddpdebug-r_1-3.json"]
    sink.write(RunEnded(reason="finished", exit_code=0, steps={}))
    assert list((tmp_path / "sd").iterdir()) == []


def test_a_rank_that_serves_nothing_is_not_on_the_list(tmp_path: Path) -> None:
    """There would be nothing to scrape."""
    Discovery(tmp_path).write(replace(STARTED, metrics_url=None))
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_cannot_be_written_is_reported(tmp_path: Path) -> None:
    """To the fan-out, which drops this sink only."""
    (tmp_path / "file").touch()
    with pytest.raises(OSError):
        Discovery(tmp_path / "file").write(STARTED)


def test_files_of_killed_ranks_are_swept_and_those_of_living_ones_stay(tmp_path: Path) -> None:
    """A living rank touches its file, and writes it again should it have gone."""
    now = [0.0]
    living = TargetFile(tmp_path, "living", ENTRY, clock=lambda: now[0])
    dead = tmp_path / "ddpdebug-dead-0.json"
    unfinished = tmp_path / ".ddpdebug-dead-1.json.77"
    foreign = tmp_path / "other.json"
    for path in (dead, unfinished, foreign):
        path.touch()
        old = living.path.stat().st_mtime - STALE_SECONDS - 10
        os.utime(path, (old, old))
    os.utime(living.path, (old, old))
    now[0] = 301.0
    living.keep()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ddpdebug-living.json", "other.json"]
    living.path.unlink()
    now[0] = 400.0
    living.keep()
    assert json.loads(living.path.read_text()) == [ENTRY]


def test_who_has_a_port_replaces_the_file_of_who_had_it(tmp_path: Path) -> None:
    """Otherwise a new run would be scraped under the name of one that was killed."""
    TargetFile(tmp_path, "killed", ENTRY)
    TargetFile(tmp_path, "neighbour", target("127.0.0.1:2"))
    for i, content in enumerate(["", "[]", "[1]", '[{"targets": 3}]', "\xff"]):
        (tmp_path / f"ddpdebug-foreign-{i}.json").write_text(content, encoding="latin-1")
    TargetFile(tmp_path, "new", ENTRY)
    names = {path.name for path in tmp_path.iterdir()}
    assert {"ddpdebug-new.json", "ddpdebug-neighbour.json"} <= names
    assert "ddpdebug-killed.json" not in names
    assert len(names) == 7


@pytest.mark.parametrize("config", [{}, {"metrics_port": 9400}, {"sd_dir": "some dir"}, {"metrics_password_file": "x"}])
@pytest.mark.parametrize("scheme", ["http", "https"])
def test_the_snippet_is_what_prometheus_reads(
    tmp_path: Path, config: dict[str, str], scheme: str, need: Callable[[str], str]
) -> None:
    """Pasted as it is."""
    snippet = scrape_snippet(replace(STARTED, config=config, metrics_url=f"{scheme}://127.0.0.1:9400/metrics"))
    (tmp_path / "FILE").touch()
    (tmp_path / "prometheus.yml").write_text(f"scrape_configs:\n{snippet}\n")
    words = [need("promtool"), "check", "config", "--syntax-only", tmp_path / "prometheus.yml"]
    result = subprocess.run(words, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("where", [{"sd_dir": "targets"}, {}], ids=["files", "list"])
def test_the_snippet_has_the_certificates_that_the_rank_asks_for(
    where: dict[str, str], tmp_path: Path, need: Callable[[str], str]
) -> None:
    """And the password; both once more where Prometheus asks for the list of the ranks."""
    config = {**where, "metrics_client_ca": "ca.pem", "metrics_password_file": "password"}
    snippet = scrape_snippet(replace(STARTED, config=config, metrics_url="https://127.0.0.1:9400/metrics"))
    job = _read(f"scrape_configs:\n{snippet}\n")
    asked = [job, *job.get("http_sd_configs", ())]
    assert len(asked) == (1 if where else 2)
    for each in asked:
        assert set(each["tls_config"]) == {"ca_file", "cert_file", "key_file"}
        assert set(each["basic_auth"]) == {"username", "password_file"}
    (tmp_path / "prometheus.yml").write_text(f"scrape_configs:\n{snippet}\n")
    words = [need("promtool"), "check", "config", "--syntax-only", tmp_path / "prometheus.yml"]
    result = subprocess.run(words, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    plain = scrape_snippet(replace(STARTED, config=where, metrics_url="https://127.0.0.1:9400/metrics"))
    assert "tls_config" not in plain


def _read(text: str) -> dict[str, Any]:
    (job,) = pytest.importorskip("yaml").safe_load(text)["scrape_configs"]
    return dict(job)


def test_the_snippet_says_when_it_is_for_one_run_only() -> None:
    """A port that the system has chosen is another one in the next run."""
    chosen = scrape_snippet(replace(STARTED, config={"metrics_port": 0}))
    fixed = scrape_snippet(replace(STARTED, config={"metrics_port": 9400}))
    assert chosen.startswith(fixed)
    assert "--sd-dir" in chosen.removeprefix(fixed)
    assert "#" not in scrape_snippet(replace(STARTED, config={"metrics_port": 0, "sd_dir": "targets"}))
