"""A device-side assert leaves the script its traceback and its exit status, and is a finding with a line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

_TEXT = (Path(__file__).parent / "scripts" / "device_assert.py").read_text(encoding="utf-8").splitlines()
_LINES = {
    kind: next(n for n, line in enumerate(_TEXT, 1) if line.endswith(f"# {kind.upper()}"))
    for kind in ("embedding", "labels")
}
_BLOCKING = {"CUDA_LAUNCH_BLOCKING": "1"}
#: kind, ranks (0 is one process without a launcher), environment
SETTINGS = {
    "one process": ("embedding", 0, {}),
    "one process, blocking": ("embedding", 0, _BLOCKING),
    "one rank, nccl": ("labels", 1, {"BACKEND": "nccl"}),
    "two ranks, gloo": ("labels", 2, {"BACKEND": "gloo"}),
    "two ranks, gloo, blocking": ("labels", 2, {"BACKEND": "gloo", **_BLOCKING}),
}


@pytest.mark.gpu
@pytest.mark.jobs
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("options", [["--every-step"], []], ids=["every-step", "default"])
def test_the_traceback_stands(setting: str, options: list[str], train: Callable[..., Any]) -> None:
    """The status is the plain one; FAIL1042 names the line, the kernel's own where the device is waited for."""
    kind, ranks, env = SETTINGS[setting]
    plain = train("device_assert.py", kind, "cuda", watched=False, ranks=ranks, env=env)
    done = train("device_assert.py", kind, "cuda", watched=True, ranks=ranks, env=env, options=options)
    assert (done.status, plain.status) == (1, 1), done.text
    for one in (plain, done):
        assert "Traceback (most recent call last)" in one.text
        assert "device-side assert triggered" in one.text
    assert done.trouble().count('"part": "device"') == 1
    assert "has switched itself off" not in done.text
    found = {finding.code: finding for finding in done.findings()}
    assert "device_assert.py:" in str(found["FAIL1042"].location)
    blocking = "CUDA_LAUNCH_BLOCKING" in env
    assert found["FAIL1042"].evidence["line"] == ("the kernel's own" if blocking else "of a call after the kernel's")
    if blocking:
        assert str(found["FAIL1042"].location).endswith(f"device_assert.py:{_LINES[kind]}")
        assert found["FAIL1042"].step == 30
        assert ("DATA903" in found) is (kind == "labels")
    if (lost := found.get("HANG503")) is not None:
        assert "killed from outside" not in lost.causes[0]


@pytest.mark.slow
@pytest.mark.jobs
@pytest.mark.parametrize("kind, ranks, code", [("embedding", 0, "FAIL1012"), ("labels", 2, "FAIL1011")])
def test_on_the_cpu(kind: str, ranks: int, code: str, train: Callable[..., Any]) -> None:
    """The same scripts raise at once there, and the line is the one that CUDA names when it is waited for."""
    done = train("device_assert.py", kind, "cpu", watched=True, ranks=ranks)
    assert done.status == 1, done.text
    found = {finding.code: finding for finding in done.findings()}
    assert (found[code].step, str(found[code].location).rpartition(":")[2]) == (30, str(_LINES[kind]))
    assert ("DATA903" in found) is (kind == "labels")
