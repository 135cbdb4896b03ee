"""`ddpdebug doctor`: what is there, what is off, and its exit code."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
from machine import PATIENCE
from torch.nn.parallel import DistributedDataParallel

from ddpdebug import torch_internals as internals
from ddpdebug.commands import main
from ddpdebug.config.settings import Config
from ddpdebug.instrument.patches import Patches
from ddpdebug.instrument.probes import Probes
from ddpdebug.isolation.guard import Guard
from ddpdebug.monitor import doctor
from ddpdebug.torch_internals import names

_ROOT = Path(__file__).parent.parent.parent


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def _report(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, Any]:
    status = main(["doctor", "--json", *words])
    return status, json.loads(capsys.readouterr().out)


def test_everything_is_there(capsys: pytest.CaptureFixture[str]) -> None:
    """Exit 0; versions, backends and every private name; what is wrapped is what an attaching puts in place."""
    forward = DistributedDataParallel.forward
    status, report = _report(capsys)
    assert (status, report["ok"], report["off"]) == (0, True, [])
    assert report["versions"]["torch"] == torch.__version__
    assert report["backends"]["gloo"] == "available"
    assert sum(feature["names"] for feature in report["features"]) == len(names.TABLE)
    wrappers = {wrapper["where"]: wrapper for wrapper in report["attached"]["wrappers"]}
    assert wrappers["torch.nn.parallel.distributed.DistributedDataParallel.forward"]["in_place"]
    assert len(wrappers) >= 30
    assert all(wrapper["why"] for wrapper in wrappers.values())
    assert report["attached"]["restored"]
    assert DistributedDataParallel.forward is forward
    hangs = {"collectives", "/proc", "black box"}
    extras = {f"[{extra}]" for extra in doctor.EXTRAS}
    machine = {"python", "torch", *extras, "open files"} | {"/dev/shm", "locked memory"} & {
        check["name"] for check in report["checks"]
    }
    assert {check["name"] for check in report["checks"]} == {
        "side group", "metrics port", "run directory", *hangs, *machine,
    }  # fmt: skip
    assert {check["fine"] for check in report["checks"] if check["name"] in machine} == {None}
    assert list(Path.cwd().iterdir()) == []


def test_each_extra_is_told_of() -> None:
    """Those for developers alone are not; each by what it asks for."""
    project = tomllib.loads((_ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    assert set(doctor.EXTRAS) == set(extras) - {"dev", "docs", "trainers"}
    wanted = {extra: {re.split(r"[\[=>]", one)[0].lower() for one in extras[extra]} for extra in doctor.EXTRAS}
    modules = {extra: {name.replace("_", "-") for name in names} for extra, (names, _) in doctor.EXTRAS.items()}
    assert modules == wanted


def test_what_was_not_tried_and_what_is_not_installed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is told, and nothing is off."""
    monkeypatch.setattr(doctor, "_TESTED_PYTHONS", ((3, 9), (3, 10)))
    monkeypatch.setattr(torch, "__version__", "2.99.0")
    find = doctor.util.find_spec
    monkeypatch.setattr(doctor.util, "find_spec", lambda name: None if name == "uvicorn" else find(name))
    status, report = _report(capsys)
    told = {check["name"]: check["text"] for check in report["checks"]}
    assert status == 0
    assert told["python"] == "3.9 to 3.10 were tried, this one was not"
    assert "this one is another" in told["torch"]
    assert told["[hub]"].startswith("not here: uvicorn; `pip install 'ddpdebug[hub]'` adds ")


def test_low_limits_are_said_with_what_raises_them(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """At the end, beside what is not installed; InfiniBand's only where there is some."""
    (tmp_path / "mlx5_0").mkdir()
    monkeypatch.setattr(doctor, "_INFINIBAND", tmp_path)
    monkeypatch.setattr(doctor.resource, "getrlimit", lambda _: (1024, 1024))
    monkeypatch.setattr(doctor, "_LEAST_SHARED", 1 << 80)
    assert main(["doctor"]) == 0
    tail = capsys.readouterr().out.partition("missing, and how to get it:\n")[2]
    for words in ("/dev/shm low: ", "open files low: 1024; ", "locked memory low: 1024; ", "--shm-size", "ulimit -l"):
        assert words in tail


def test_no_accelerator_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch 2.6 raises where it is built for one and none is there."""

    def none() -> None:
        raise RuntimeError("Cannot access accelerator device when none is available.")

    internals.accelerator.cache_clear()
    monkeypatch.setattr(torch.accelerator, "current_accelerator", none)
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: False)
    assert internals.accelerator() is None
    internals.accelerator.cache_clear()


def test_what_hangs_are_told_by(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of the three that is not here is off, with what cannot be told then."""
    monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", "0")
    monkeypatch.setattr(doctor.kernel, "process", lambda _: None)
    monkeypatch.setattr(doctor.black_box, "read", lambda _: None)
    status, report = _report(capsys)
    assert status == 1
    without = "of a hang it is known who is missing, not what was called"
    assert report["off"] == [
        f"collectives: TORCH_FR_BUFFER_SIZE=0 switches it off: {without}",
        "/proc: it cannot be read: a rank that works cannot be distinguished from one that sleeps",
        "black box: RuntimeError: what was written to a file in memory could not be read",
    ]
    assert list(Path.cwd().iterdir()) == []


def test_a_missing_name_is_off(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Exit 1; its feature says which name, and what is off without it; the other features are whole."""
    monkeypatch.delattr(torch, "_foreach_norm")
    status, report = _report(capsys)
    assert status == 1
    missing = {feature["name"]: feature["missing"] for feature in report["features"] if feature["missing"]}
    off = "each norm is an operation of its own"
    assert missing == {"norms of many tensors at once": {"torch._foreach_norm": off}}
    assert report["off"] == [f"torch._foreach_norm: {off}"]
    assert main(["doctor"]) == 1
    text = capsys.readouterr().out
    assert "norms of many tensors at once    1 of 2  missing: torch._foreach_norm" in text
    assert text.rstrip().endswith(f"off: 1\n  torch._foreach_norm: {off}")


def test_what_cannot_be_wrapped_is_off(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A public function that is gone as well; everything else is wrapped and taken back."""
    monkeypatch.delattr(torch.nn.utils, "clip_grad_value_")
    status, report = _report(capsys)
    assert status == 1
    assert any("clip_grad_value_" in line for line in report["off"])
    lost = [wrapper["where"] for wrapper in report["attached"]["wrappers"] if not wrapper["in_place"]]
    assert lost == ["torch.nn.utils.clip_grad_value_"]
    assert report["attached"]["restored"]


@pytest.mark.smoke
def test_a_library_that_hides_a_wrapper(tmp_path: Path) -> None:
    """What a module puts over ours while it is loaded is named; it is not taken away."""
    (tmp_path / "their_library.py").write_text(
        "import torch\n"
        "original = torch.nn.utils.clip_grad_norm_\n"
        "def clip(*args, **kwargs):\n    return original(*args, **kwargs)\n"
        "torch.nn.utils.clip_grad_norm_ = clip\n"
    )
    words = [sys.executable, "-m", "ddpdebug", "doctor", "--import", "their_library"]
    env = {"PYTHONPATH": f"{_ROOT}:{tmp_path}", "OMP_NUM_THREADS": "1", "PATH": ""}
    done = subprocess.run(words, capture_output=True, text=True, timeout=PATIENCE, check=False, env=env, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (1, "")
    assert "torch.nn.utils.clip_grad_norm_  clipping; hidden under their_library.clip" in done.stdout
    assert "off: 1\n" in done.stdout


def test_what_is_found_in_torchs_place_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ours lies over it, calls it, and nothing is off."""

    def clip(*_: Any, **__: Any) -> None:
        """Clip in a way of its own."""

    clip.__module__ = "their_library"
    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", clip)
    report = doctor.examine(Config())
    (wrapper,) = [w for w in report.attached.wrappers if w.where == "torch.nn.utils.clip_grad_norm_"]
    assert "their_library" in str(wrapper.over)
    assert report.off == []


def test_what_is_left_behind_is_told_from_what_is_anothers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A monitor that is attached to this process already keeps its looks in the same functions."""
    other = Probes(Guard(lambda *_: None), lambda _: None, lambda *_: None, lambda *_: False)
    try:
        other.patches.install()
        assert doctor.attach_and_detach().restored
        assert other.entries.placed
        assert [placed.where for placed in other.entries.placed if placed.hidden()] == []
    finally:
        other.remove()
    left: list[Probes] = []

    def keep(probes: Probes) -> None:
        left.append(probes)

    with monkeypatch.context() as patch:
        patch.setattr(Probes, "remove", keep)
        assert not doctor.attach_and_detach().restored
    left[0].remove()
    assert doctor.attach_and_detach().restored


def test_what_fails_while_attaching_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the words of the failure."""

    def fails(_: Patches) -> None:
        raise RuntimeError("no hooks today")

    monkeypatch.setattr(Patches, "install", fails)
    assert "patches: RuntimeError: no hooks today" in doctor.examine(Config()).off


def test_details(capsys: pytest.CaptureFixture[str]) -> None:
    """`--verbose` has every private name and every wrapper; without it neither."""
    assert main(["doctor", "--verbose"]) == 0
    text = capsys.readouterr().out
    assert all(name.path in text for name in names.TABLE)
    assert "torch.autograd.backward  the loss, the phases of a step" in text
    assert main(["doctor"]) == 0
    short = capsys.readouterr().out
    assert "torch.autograd.backward" not in short
    assert "off:" not in short


def test_wrong_usage(capsys: pytest.CaptureFixture[str]) -> None:
    """A module that is not there, and a setting of the environment that is wrong, say so."""
    assert main(["doctor", "--import", "no_such_module_at_all"]) == 2
    assert "cannot import 'no_such_module_at_all'" in capsys.readouterr().err
    assert main(["doctor", "--no-such-option"]) == 2


def test_a_wrong_setting_of_the_environment(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `run` would say it."""
    monkeypatch.setenv("DDPDEBUG_METRICS_PORT", "many")
    assert main(["doctor"]) == 2
    assert "METRICS_PORT" in capsys.readouterr().err
