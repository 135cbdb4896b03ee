"""`ddpdebug replay` names the bad operation of a bundle."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from ddpdebug.commands import main
from ddpdebug.forensics.replay.bundle import JSON_FILE, write_bundle
from ddpdebug.isolation.guard import Guard
from ddpdebug.probes.forward_capture import ForwardCaptures

GUARD = Guard(lambda part, message: pytest.fail(f"{part}: {message}"))

_SOURCE = """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self, size=4):
        super().__init__()
        self.inner = nn.Linear(size, size)

    def forward(self, x, power=1.0):
        h = self.inner(x * power)
        return (h @ h.transpose(-1, -2)).softmax(-1).sum(-1) + self.score(x)

    def score(self, x):
        return torch.log(x[:, 0].abs())


class Masks(Net):
    def score(self, x):
        ratio = x[:, 0] / x[:, 0]
        return ratio.nan_to_num(0.0)


class NeedsSize(Net):
    def __init__(self, size):
        super().__init__(size)


def build():
    return nn.parallel.DataParallel(Net()).module


def other():
    return nn.Sequential(nn.Linear(4, 5))


def nothing():
    return 3


def fails():
    raise OSError("no checkpoint here")


if __name__ == "__main__":
    raise SystemExit("this must not run")
"""


Command = Callable[..., subprocess.CompletedProcess[str]]


class Case:
    """A folder with a model's source and the bundle of a step of it."""

    def __init__(self, folder: Path, *, kind: str = "Net") -> None:
        self.source = folder / "net.py"
        self.source.write_text(_SOURCE, encoding="utf-8")
        spec = importlib.util.spec_from_file_location("net", self.source)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules["net"] = module  # `inspect` looks there
        spec.loader.exec_module(module)
        self.folder = folder
        torch.manual_seed(0)
        self.model: nn.Module = getattr(module, kind)(4)

    def bundle(self, x: torch.Tensor, *args: Any, amp: bool = False, scale: float = 1.0) -> str:
        captures = ForwardCaptures(GUARD)
        with torch.autocast("cpu", dtype=torch.float16, enabled=amp):
            captures.begin(self.model, (x, *args), {}, 7)
            output = self.model(x, *args)
            captures.end(self.model, output)
        (scale * output.float().sum()).backward()
        facts = {"code": "NUM301", "step": 7, "rank": 2}
        return str(write_bundle(self.folder, "NUM301-step7-rank2", captures.current[0], facts))

    def line(self, text: str) -> int:
        return 1 + next(i for i, line in enumerate(_SOURCE.splitlines()) if text in line)


@pytest.fixture
def case(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Case:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    return Case(tmp_path)


def _batch(samples: int = 6) -> torch.Tensor:
    return torch.linspace(1, 2, samples * 4).reshape(samples, 4)


_RAISES = """
import net


class Raises(net.Net):
    def forward(self, x):
        raise RuntimeError("not on this machine")


def build():
    return Raises(4)
"""


def test_a_forward_that_raises_has_shown_nothing(case: Case, capsys: pytest.CaptureFixture[str]) -> None:
    """It is neither reproduced nor fine: the exit code is of its own."""
    (case.folder / "raises.py").write_text(_RAISES, encoding="utf-8")
    bundle = case.bundle(_batch())
    assert main(["replay", bundle, "--model", "net.py:build"]) == 0
    capsys.readouterr()
    assert main(["replay", bundle, "--model", "raises.py:build"]) == 3
    assert "did not get to its end" in capsys.readouterr().out


def test_names_the_operation(case: Case, capsys: pytest.CaptureFixture[str]) -> None:
    """Operation, line, module and operands are printed, and written as JSON; the exit code says that it fails."""
    x = _batch()
    x[2, 0] = 0
    bundle = case.bundle(x)
    assert main(["replay", bundle, "--model", "net.py:build", "--json", "result.json"]) == 1
    text = capsys.readouterr().out
    assert "NUM301 · step 7 · rank 2" in text
    assert "aten.log.default makes inf, in forward" in text
    assert f"net.py:{case.line('torch.log')} Net.score" in text
    assert "float32 [6] · 0 to 1." in text
    assert "1 zero" in text
    assert "inner" in text
    assert "\x1b" not in text
    result = json.loads((case.folder / "result.json").read_text())
    assert result["culprit"]["name"] == "aten.log.default"
    assert result["location"] == f"net.py:{case.line('torch.log')}"
    assert result["step"] == 7


@pytest.mark.parametrize(
    "source", [["--model", "net:build"], ["--model", "net.py:Net"], ["--script", "net.py"], ["--import-class"]]
)
def test_sources_of_the_model(case: Case, source: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """The model comes from a function of a module or file, or is the class that the bundle names."""
    assert main(["replay", case.bundle(_batch()), *source]) == 0
    assert "nothing non-finite came out" in capsys.readouterr().out


_BEGINS = _SOURCE.partition("if __name__")[0] + "\nraise OSError('no peer to train with')\n"


def test_a_script_that_begins_to_train(case: Case, capsys: pytest.CaptureFixture[str]) -> None:
    """One that fails where its training begins has made the class by then; one that fails before says what to do."""
    bundle = case.bundle(_batch())
    case.source.write_text(_BEGINS)
    assert main(["replay", bundle, "--script", "net.py"]) == 0
    case.source.write_text("raise OSError('no peer to train with')\n" + _BEGINS)
    assert main(["replay", bundle, "--script", "net.py"]) == 2
    error = capsys.readouterr().err
    assert "no peer to train with" in error
    assert "__main__" in error


def test_a_container_of_torch_needs_a_function(case: Case, capsys: pytest.CaptureFixture[str]) -> None:
    """What a script puts together has no class that could be imported."""
    case.model = nn.Sequential(nn.Linear(4, 5))
    bundle = case.bundle(_batch())
    assert main(["replay", bundle, "--script", "net.py"]) == 2
    assert "--model file.py:function" in capsys.readouterr().err
    assert main(["replay", bundle, "--model", "net.py:other"]) == 0


def test_gradients_of_a_bad_forward_are_left_out(case: Case, capsys: pytest.CaptureFixture[str]) -> None:
    """A forward that survives in float64 is not blamed for the gradients that follow from the one that did not."""
    bundle = Path(case.bundle(_batch(), 300.0, amp=True, scale=float("nan")))
    document = json.loads((bundle / JSON_FILE).read_text())
    for culprit, code in (({"phase": "forward"}, 0), (None, 1)):
        document["replay"] = {"culprit": culprit}
        (bundle / JSON_FILE).write_text(json.dumps(document))
        assert main(["replay", str(bundle), "--model", "net.py:build", "--dtype", "float64"]) == code
        assert ("it survives in float64" in capsys.readouterr().out) is (code == 0)


def test_what_is_masked_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """Nothing comes out, and the operation that made it is named with the one that hides it."""
    monkeypatch.chdir(tmp_path)
    case, x = Case(tmp_path, kind="Masks"), _batch()
    x[1, 0] = 0
    assert main(["replay", case.bundle(x), "--script", "net.py"]) == 0
    text = capsys.readouterr().out
    assert "nothing non-finite came out: what arose was masked" in text
    assert "aten.div.Tensor makes nan, aten.nan_to_num.default hides it" in text
    assert f"net.py:{case.line('ratio = x')}" in text
    assert "not reproduced" not in text


def test_the_loss_of_the_run_is_told(case: Case, capsys: pytest.CaptureFixture[str]) -> None:
    """It is not in the bundle, so what the run knew of it is printed."""
    bundle = Path(case.bundle(_batch()))
    document = json.loads((bundle / JSON_FILE).read_text())
    document["loss"] = {"operation": "LogBackward0", "location": "train.py:38", "expression": "train.py:50"}
    (bundle / JSON_FILE).write_text(json.dumps(document))
    assert main(["replay", str(bundle), "--model", "net.py:build"]) == 0
    assert "LogBackward0 · train.py:38" in capsys.readouterr().out


def test_pickled_module(case: Case, capsys: pytest.CaptureFixture[str]) -> None:
    """A pickled module is read only when the user trusts it."""
    torch.save(case.model, "model.pt")
    bundle = case.bundle(_batch())
    assert main(["replay", bundle, "--module", "model.pt"]) == 2
    assert "add --trust" in capsys.readouterr().err
    assert main(["replay", bundle, "--module", "model.pt", "--trust"]) == 0


def test_uses_the_parameters_of_the_bundle(case: Case, capsys: pytest.CaptureFixture[str]) -> None:
    """Not what the factory made, but what the job had, runs."""
    with torch.no_grad():
        case.model.inner.weight[1, 1] = torch.nan
    assert main(["replay", case.bundle(_batch()), "--model", "net.py:build"]) == 1
    assert "inner.weight: the parameter was bad before the forward" in capsys.readouterr().out


def test_precision(case: Case, capsys: pytest.CaptureFixture[str]) -> None:
    """An overflow in half precision is reproduced, and survives in float32, in float64 and without autocast."""
    bundle = case.bundle(_batch(), 300.0, amp=True)
    words = ["replay", bundle, "--model", "net.py:build", "--cpu"]
    assert main(words) == 1
    text = capsys.readouterr().out
    assert "aten.mm.default makes inf" in text
    assert "then" in text
    assert "float16 [6, 4]" in text
    for more, answer in (
        (["--dtype", "float32"], "it survives in float32"),
        (["--dtype", "float64"], "it survives in float64"),
        (["--no-amp"], "it survives without autocast"),
    ):
        assert main([*words, *more]) == 0
        assert answer in capsys.readouterr().out


def test_left_out_is_told(case: Case, capsys: pytest.CaptureFixture[str]) -> None:
    """A bundle without parameters runs with the model's own, which is said."""
    bundle = Path(case.bundle(_batch()))
    document = json.loads((bundle / JSON_FILE).read_text())
    document["parameters"] = None
    document["left_out"] = [{"what": "parameters", "bytes": 80, "why": "the limit is 10 bytes"}]
    (bundle / JSON_FILE).write_text(json.dumps(document))
    assert main(["replay", str(bundle), "--model", "net.py:build"]) == 0
    text = capsys.readouterr().out
    assert "left out of the bundle: parameters (80 bytes)" in text
    assert "the model's own were used" in text


def test_names_are_escaped(case: Case, capsys: pytest.CaptureFixture[str]) -> None:
    """A bundle cannot write escape codes or markup to the terminal."""
    bundle = Path(case.bundle(_batch()))
    document = json.loads((bundle / JSON_FILE).read_text())
    document["code"] = "\x1b[2Jx[bold]y"
    (bundle / JSON_FILE).write_text(json.dumps(document))
    assert main(["replay", str(bundle), "--model", "net.py:build"]) == 0
    text = capsys.readouterr().out
    assert "\\x1b[2Jx[bold]y" in text
    assert "\x1b" not in text


_WRONG = {
    "no source": ([], "cannot bring the model's code"),
    "two sources": (["--model", "a:b", "--script", "net.py"], "only one of"),
    "no function": (["--model", "net.py"], "has no function"),
    "unknown function": (["--model", "net.py:biuld"], "did you mean build"),
    "unknown module": (["--model", "no_such_module:f"], "importing 'no_such_module' failed"),
    "not a model": (["--model", "net.py:nothing"], "is a int, not"),
    "another model": (["--model", "net.py:other"], "this is not the bundle's model"),
    "raises": (["--model", "net.py:fails"], "no checkpoint here"),
    "no script": (["--script", "nothing.py"], "is no file"),
    "device": (["--model", "net.py:build", "--device", "warp"], "cannot be used"),
    "two devices": (["--model", "net.py:build", "--device", "cuda", "--cpu"], "contradict"),
    "dtype": (["--model", "net.py:build", "--dtype", "int3"], "float32"),
    "json": (["--model", "net.py:build", "--json", "no/such/file"], "cannot be written"),
    "option": (["--devic"], "did you mean --device"),
}


@pytest.mark.parametrize("words", _WRONG)
def test_wrong_usage(case: Case, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Each mistake on the line is one line of error with what to do, and exit code 2."""
    more, message = _WRONG[words]
    assert main(["replay", case.bundle(_batch()), *more]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err
    assert err.startswith("ddpdebug: error: ")
    assert err.count("\n") == 1


def test_class_with_arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """A class that needs arguments cannot be made from its name, which the message says."""
    monkeypatch.chdir(tmp_path)
    bundle = Case(tmp_path, kind="NeedsSize").bundle(_batch())
    assert main(["replay", bundle, "--script", "net.py"]) == 2
    assert "give --model file.py:function" in capsys.readouterr().err


def test_in_another_process(case: Case, command: Command) -> None:
    """A bundle is run by a process that has loaded nothing yet, and a script that fails there is told."""
    np.random.seed(1)  # noqa: NPY002 - its state is a part of the bundle then
    x = _batch()
    x[2, 0] = 0
    done = command("-m", "ddpdebug", "replay", case.bundle(x), "--script", "net.py")
    assert done.returncode == 1, done.stderr
    assert "aten.log.default makes inf, in forward" in done.stdout
    assert done.stderr == ""


def test_no_bundle(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A path that is no bundle is wrong usage."""
    assert main(["replay", str(tmp_path / "x"), "--model", "a:b"]) == 2
    assert "is no bundle" in capsys.readouterr().err
