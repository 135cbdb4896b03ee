"""What is shipped for others' machines is valid, as far as that can be known without them."""

from __future__ import annotations

import configparser
import importlib
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ddpdebug.config.settings import Config, options
from ddpdebug.grafana.dashboards import NAMES
from ddpdebug.hub.auth import Auth

yaml = pytest.importorskip("yaml")
ROOT = Path(__file__).parent.parent.parent
DEPLOY = ROOT / "deploy"
_BUILTIN = {"ConfigMap", "Service", "Job", "Pod", "Namespace"}


def run(*words: object) -> str:
    """Run a checker; fail with what it says."""
    done = subprocess.run([str(word) for word in words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def load(path: str) -> Any:
    """Read one document."""
    return yaml.safe_load((DEPLOY / path).read_text(encoding="utf-8"))


def test_every_yaml_file_is_tidy() -> None:
    """No key twice, no wrong indentation."""
    pytest.importorskip("yamllint")
    run(sys.executable, "-m", "yamllint", "--strict", "-c", DEPLOY / ".yamllint", DEPLOY, ROOT / "dashboards")


def test_the_compose_file_follows_its_specification() -> None:
    """And what it mounts is there."""
    pytest.importorskip("check_jsonschema")
    file = DEPLOY / "compose" / "compose.yaml"
    run(sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec", file)
    content = load("compose/compose.yaml")
    for service in content["services"].values():
        for mount in service.get("volumes", ()):
            source = mount.partition(":")[0]
            known = source in content["volumes"] or (file.parent / source).resolve().exists()
            assert known, f"{source} is not there"
        for port in service.get("ports", ()):
            assert port.startswith("127.0.0.1:")
    build = content["services"]["demo"]["build"]
    assert (file.parent / build["context"] / build["dockerfile"]).resolve().is_file()


def test_images_have_versions() -> None:
    """So that tomorrow's deployment is today's."""
    texts = [path.read_text() for path in DEPLOY.rglob("*") if path.is_file()]
    images = [name for text in texts for name in re.findall(r"^(?:\s*image:|FROM) +(\S+)", text, re.MULTILINE)]
    assert len(images) >= 6
    assert [name for name in images if not re.search(r":v?\d+\.\d+\.\d+", name)] == []
    assert not any(re.search(r":latest\b", text) for text in texts)


def test_the_demo_image_has_torch_for_the_cpu() -> None:
    """`make up` gives no argument, so that the default counts; the build ends where another torch came."""
    text = (DEPLOY / "container" / "Dockerfile").read_text()
    assert 'ARG PIP_EXTRA_INDEX_URL="https://download.pytorch.org/whl/cpu"' in text
    assert text.index("ARG PIP_EXTRA_INDEX_URL") < text.index("RUN pip install")
    assert "assert torch.version.cuda is None" in text
    assert "args" not in load("compose/compose.yaml")["services"]["demo"]["build"]


def test_alerts_of_the_containers_link_to_pages_that_prometheus_serves() -> None:
    """Under the address by which a browser on this machine reaches it."""
    service = load("compose/compose.yaml")["services"]["prometheus"]
    assert "../../docs:/docs:ro" in service["volumes"]
    assert "--web.user-assets=/docs" in service["command"]
    assert "--web.external-url=http://127.0.0.1:9090/" in service["command"]
    assert "127.0.0.1:9090:9090" in service["ports"]
    for file in ("prometheus/prometheus.yml", "compose/prometheus/prometheus.yml"):
        content = load(file)
        assert content["rule_files"] == ["rules/*.yml"]
        assert content["alerting"]["alertmanagers"]
        assert content["global"]["external_labels"] == {"ddpdebug_docs": ""}


@pytest.mark.parametrize("file", ["prometheus/prometheus.yml", "compose/prometheus/prometheus.yml"])
def test_prometheus_accepts_its_configuration(file: str, need: Callable[[str], str]) -> None:
    """And reads the rules from where they are."""
    run(need("promtool"), "check", "config", "--syntax-only", DEPLOY / file)


def test_alertmanager_accepts_its_configuration(need: Callable[[str], str]) -> None:
    """And inhibits alerts that exist."""
    run(need("amtool"), "check-config", DEPLOY / "compose" / "alertmanager.yml")
    rules = (DEPLOY / "prometheus" / "rules" / "ddpdebug-alerts.yml").read_text()
    named = set(re.findall(r"Ddpdebug\w+", (DEPLOY / "compose" / "alertmanager.yml").read_text()))
    assert named
    assert all(f"alert: {name}\n" in rules for name in named)


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed; Debian's is too old")
def test_the_cluster_gets_monitor_rules_and_dashboards(tmp_path: Path) -> None:
    """Each dashboard in a ConfigMap of its own below the limit of 1 MiB, with the label that Grafana looks for."""
    text = run("kubectl", "kustomize", DEPLOY / "kubernetes" / "base")
    found = list(yaml.safe_load_all(text))
    kinds = [item["kind"] for item in found]
    assert sorted(kinds) == ["ConfigMap"] * len(NAMES) + ["PodMonitor", "PrometheusRule"]
    names = set()
    for item in found:
        assert item["metadata"]["namespace"] == "monitoring"
        if item["kind"] == "ConfigMap":
            assert item["metadata"]["labels"] == {"grafana_dashboard": "1"}
            ((file, content),) = item["data"].items()
            names.add(file)
            assert len(json.dumps(item)) < 1 << 20
            assert json.loads(content) == json.loads((ROOT / "dashboards" / file).read_text())
    assert names == {f"{name}.json" for name in NAMES}
    pytest.importorskip("kubernetes_validate")
    builtin = tmp_path / "builtin.yaml"
    builtin.write_text(yaml.safe_dump_all([item for item in found if item["kind"] in _BUILTIN]))
    program = Path(sys.executable).parent / "kubernetes-validate"
    run(program, "--strict", "-k", "1.33", builtin)


def test_the_hub_of_the_cluster_is_valid_and_keeps_its_token_to_itself() -> None:
    """One replica with a volume, a token from a secret, and probes that need none; jobs and people find it by name."""
    pytest.importorskip("kubernetes_validate")
    program, folder = Path(sys.executable).parent / "kubernetes-validate", DEPLOY / "kubernetes" / "hub"
    listed = load("kubernetes/hub/kustomization.yaml")["resources"]
    assert sorted(listed) == sorted(path.name for path in folder.iterdir() if path.name != "kustomization.yaml")
    for name in listed:
        run(program, "--strict", "-k", "1.33", folder / name)
    deployment, service = load("kubernetes/hub/deployment.yaml"), load("kubernetes/hub/service.yaml")
    template = deployment["spec"]["template"]
    assert template["metadata"]["labels"].items() >= service["spec"]["selector"].items()
    (container,) = template["spec"]["containers"]
    assert {probe["httpGet"]["path"] for name, probe in container.items() if name.endswith("Probe")} == {"/healthz"}
    assert all("token" not in str(word).lower() for word in container["args"])
    claims = [volume["persistentVolumeClaim"]["claimName"] for volume in template["spec"]["volumes"][:1]]
    assert claims == [load("kubernetes/hub/volume.yaml")["metadata"]["name"]]
    name = service["metadata"]["name"].upper().replace("-", "_")  # in every container of the namespace:
    Config.load({}, {f"{name}_SERVICE_HOST": "10.0.0.1", f"{name}_PORT_8765_TCP": "tcp://10.0.0.1:8765"}, DEPLOY)


def test_the_hub_is_started_with_options_that_exist() -> None:
    """In containers, in a cluster and as a service; where others than this machine may reach it, with a token."""
    command = importlib.import_module("ddpdebug.commands.hub").command
    known = {flag for parameter in command.params for flag in parameter.opts}
    compose = load("compose/compose.yaml")["services"]
    (container,) = load("kubernetes/hub/deployment.yaml")["spec"]["template"]["spec"]["containers"]
    unit = configparser.RawConfigParser(strict=False)
    unit.optionxform = str  # type: ignore[assignment,method-assign]  # as systemd reads names
    unit.read(DEPLOY / "systemd" / "ddpdebug-hub.service")
    lines = [compose["hub"]["command"], container["args"], unit["Service"]["ExecStart"].split()[1:]]
    for line in lines:
        assert line[0] == "hub"
        assert {word.partition("=")[0] for word in line if word.startswith("--")} <= known
    (token,) = {compose[name]["environment"]["DDPDEBUG_HUB_TOKEN"] for name in ("hub", "demo")}
    assert Auth(token.partition(":-")[2].rstrip("}"), None).required  # long enough
    assert "--hub=http://hub:8765" in compose["demo"]["command"]
    if shutil.which("systemd-analyze") is not None:
        done = subprocess.run(
            ["systemd-analyze", "verify", "--man=no", DEPLOY / "systemd" / "ddpdebug-hub.service"],
            capture_output=True,
            text=True,
            check=False,
        )
        wrong = [line for line in done.stderr.splitlines() if "ddpdebug-hub" in line]
        assert [line for line in wrong if "/opt/ddpdebug/bin/ddpdebug is not executable" not in line] == []


def test_the_rules_of_the_cluster_are_those_of_the_files() -> None:
    """All groups, in one resource."""
    files = sorted((DEPLOY / "prometheus" / "rules").iterdir(), reverse=True)
    groups = [group for file in files for group in load(f"prometheus/rules/{file.name}")["groups"]]
    assert len(files) == 2
    assert load("kubernetes/base/prometheusrule.yaml")["spec"] == {"groups": groups}


def test_training_jobs_follow_the_models_of_their_operators() -> None:
    """JobSet and TrainJob; a misspelt field is seen."""
    models = pytest.importorskip("kubeflow_trainer_api.models")
    for file, model in (("jobset", models.JobsetV1alpha2JobSet), ("trainjob", models.TrainerV1alpha1TrainJob)):
        content = load(f"kubernetes/examples/{file}.yaml")
        assert _lost(content, model.from_dict(content).to_dict()) == []
        content["spec"]["mispelt"] = 1
        assert _lost(content, model.from_dict(content).to_dict()) == [".spec.mispelt"]


def _lost(written: Any, understood: Any, place: str = "") -> list[str]:
    """Return what the model did not take over; it may add defaults."""
    if isinstance(written, dict) and isinstance(understood, dict):
        return [p for key, item in written.items() for p in _lost(item, understood.get(key), f"{place}.{key}")]
    if isinstance(written, list) and isinstance(understood, list) and len(written) == len(understood):
        pairs = zip(written, understood, strict=True)
        return [p for i, (one, two) in enumerate(pairs) for p in _lost(one, two, f"{place}[{i}]")]
    return [] if written == understood else [place]


@pytest.mark.parametrize("name", ["jobset", "trainjob", "pytorchjob"])
def test_training_jobs_run_what_exists_and_are_scraped(name: str) -> None:
    """Known options, ports that the PodMonitor looks for, the label by which it finds them."""
    text = (DEPLOY / "kubernetes" / "examples" / f"{name}.yaml").read_text()
    known = {option.flag for option in options("run")}
    ours = text.partition("ddpdebug")[2].partition("demo/train.py")[0]
    used = set(re.findall(r"(--[a-z-]+)=", ours)) - {"--nnodes", "--nproc-per-node", "--rdzv-backend"}
    assert used - {"--rdzv-endpoint", "--rdzv-id"} <= known
    assert 'ddpdebug: "true"' in text
    assert "--metrics-port=9400" in ours
    assert set(re.findall(r"containerPort: (\d+)", text)) == {"9400", "9401"}
    ports = {port["port"] for port in load("kubernetes/base/podmonitor.yaml")["spec"]["podMetricsEndpoints"]}
    assert set(re.findall(r"metrics-\d+", text)) & ports == {"metrics-0", "metrics-1"}


@pytest.mark.parametrize("name", ["train", "ci"])
def test_batch_files_are_valid_and_use_options_that_exist(name: str) -> None:
    """As bash reads them."""
    file = DEPLOY / "slurm" / f"{name}.sbatch"
    run("bash", "-n", file)
    text = file.read_text()
    command = "check" if name == "ci" else "run"
    ours = re.search(rf"ddpdebug {command} (.*?)\"\$@\"", text, re.DOTALL)
    assert ours
    assert set(re.findall(r"(--[a-z-]+)=", ours[1])) <= {option.flag for option in options(command)}
