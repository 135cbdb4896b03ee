"""What a person pastes into prometheus.yml, under `scrape_configs:`. Torch-free, and without prometheus_client."""

from __future__ import annotations

import json
from pathlib import Path

from ddpdebug.sinks import RunStarted

#: The files that `--sd-dir` holds, for `file_sd_configs`; unfinished ones begin with a dot.
PATTERN = "ddpdebug-*.json"


def scrape_snippet(record: RunStarted) -> str:
    """Return one line of YAML that lets Prometheus find the ranks of this run, and of later ones where it can.

    A port that the system has chosen is another one in the next run, which the line says.
    """
    url = record.metrics_url or ""
    scheme = url.partition(":")[0]
    directory = record.config.get("sd_dir")
    extra = "" if scheme == "http" else ", scheme: https"
    if record.config.get("metrics_password_file"):
        extra += ", basic_auth: {username: NAME, password_file: FILE}"
    if directory:
        path = json.dumps(str(Path(str(directory)).absolute() / PATTERN))
        return f"- {{job_name: ddpdebug, file_sd_configs: [{{files: [{path}]}}]{extra}}}"
    address = json.dumps(f"{url.removesuffix('/metrics')}/sd")
    once = "" if record.config.get("metrics_port") else "  # this run; all runs: --sd-dir DIR or --metrics-port 9400"
    return f"- {{job_name: ddpdebug, http_sd_configs: [{{url: {address}}}]{extra}}}{once}"
