"""A bundle brings a bad step to another process, and a hostile one does nothing."""

from __future__ import annotations

import json
import os
import resource
import struct
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn

from ddpdebug.disk import Disk, Free
from ddpdebug.errors import UsageError
from ddpdebug.forensics.replay.bundle import FORMAT, JSON_FILE, TENSOR_FILE, BundleError, write_bundle
from ddpdebug.forensics.replay.bundle_reading import read_bundle
from ddpdebug.forensics.replay.investigator import investigate
from ddpdebug.forensics.replay.replay import replay
from ddpdebug.isolation.child import Children
from ddpdebug.isolation.guard import Guard
from ddpdebug.probes.forward_capture import ForwardCaptures

GUARD = Guard(lambda part, message: pytest.fail(f"{part}: {message}"))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4)
        self.second.weight = self.first.weight
        self.first.bias.requires_grad_(False)

    def forward(self, x: torch.Tensor, *, extra: dict[str, Any]) -> torch.Tensor:
        h = self.second(self.norm(self.first(x)))
        return torch.nn.functional.dropout(h).mul(extra["sizes"][0]).abs().sqrt()


_EXTRA = {
    "sizes": (2, 3.5),
    "flags": [True, None, "text"],
    3: torch.tensor([1, 2]),
    "limit": float("-inf"),
    "dtype": torch.bfloat16,
    "half": torch.ones(2, dtype=torch.bfloat16),
    "complex": torch.ones(2, dtype=torch.complex128),
    "strided": torch.arange(12.0).reshape(3, 4).t(),
    "flag": torch.tensor(True),
}


def _run(steps: int = 1) -> tuple[Net, ForwardCaptures]:
    torch.manual_seed(1)
    model, captures = Net(), ForwardCaptures(GUARD)
    for step in range(steps):
        captures.next_step()
        x = torch.randn(3, 4) + step
        captures.begin(model, (x,), {"extra": _EXTRA}, step)
        output = model(x, extra=_EXTRA)
        captures.end(model, output)
        output.sum().backward()
    return model, captures


def _bundle(directory: Path, **options: Any) -> Path:
    model, captures = _run()
    path = write_bundle(directory, "NUM303-step0-rank1", captures.current[0], {"step": 0}, **options)
    assert model is not None
    return path


def test_round_trip(tmp_path: Path) -> None:
    """Everything comes back: arguments of any nesting, parameters, buffers from before, gradients, random state."""
    model, captures = _run()
    capture = captures.current[0]
    path = write_bundle(tmp_path, "NUM303-step0-rank1", capture, {"code": "NUM303", "scaler": {"scale": 2.0**40}})
    bundle = read_bundle(path)
    assert path.name == "NUM303-step0-rank1"
    assert torch.equal(bundle.args[0], capture.args[0])
    extra = bundle.kwargs["extra"]
    for key, value in _EXTRA.items():
        if isinstance(value, torch.Tensor):
            assert extra[key].dtype == value.dtype
            assert torch.equal(extra[key], value)
        else:
            assert extra[key] == value
    assert bundle.parameters is not None
    assert bundle.parameters.keys() == dict(model.named_parameters()).keys()
    assert bundle.tied == {"second.weight": "first.weight"}
    assert bundle.frozen == {"first.bias"}
    assert bundle.buffers is not None
    assert bundle.buffers["norm.num_batches_tracked"].item() == 0
    assert model.norm.num_batches_tracked is not None
    assert model.norm.num_batches_tracked.item() == 1
    assert torch.equal(bundle.gradients[0], torch.ones(3, 4))
    assert bundle.rng.cpu is not None
    assert torch.equal(bundle.rng.cpu, capture.rng.cpu)
    assert bundle.rng.python == capture.rng.python
    assert bundle.modes == {"": True, "first": True, "norm": True, "second": True}
    assert bundle.facts["scaler"] == {"scale": 2.0**40}
    assert bundle.facts["model"]["class"] == "Net"
    assert bundle.facts["model"]["file"] == __file__
    assert bundle.left_out == []
    direct, again = replay(capture), replay(bundle.capture(model))
    assert direct.complete
    assert again.complete
    assert direct.culprit is not None
    assert again.culprit is not None
    assert again.culprit.to_json() == direct.culprit.to_json()


def test_readable_without_ddpdebug(tmp_path: Path) -> None:
    """The tensors are a safetensors file, the rest is strict JSON."""
    path = _bundle(tmp_path)
    tensors = safetensors.torch.load_file(path / TENSOR_FILE)
    document = json.loads((path / JSON_FILE).read_text(), parse_constant=pytest.fail)
    assert tensors["parameters.first.weight"].shape == (4, 4)
    assert tensors[document["inputs"]["list"][0]["tuple"][0]["tensor"]].shape == (3, 4)


@pytest.mark.parametrize(
    "limit, left, usable",
    [(1 << 30, set(), True), (5400, {"parameters"}, True), (10, {"inputs", "parameters"}, False)],
)
def test_limit(tmp_path: Path, limit: int, left: set[str], usable: bool) -> None:
    """What does not fit is left out, the parameters before the inputs, and the bundle says so."""
    path = _bundle(tmp_path, limit=limit)
    assert (path / TENSOR_FILE).stat().st_size < max(limit, 5300) + 4096
    said = {entry["what"] for entry in json.loads((path / JSON_FILE).read_text())["left_out"]}
    assert left <= said
    assert said or not left
    if usable:
        assert (read_bundle(path).parameters is None) == ("parameters" in left)
    else:
        with pytest.raises(UsageError, match="has no inputs"):
            read_bundle(path)


def _investigate(captures: ForwardCaptures, **options: Any) -> dict[str, Any]:
    """Return what comes of an investigation, in the end."""
    found: list[dict[str, Any]] = []
    children = Children(GUARD)
    investigate(captures, found.append, children, **options)
    children.finish(60)
    return found[0]


def test_previous_inputs(tmp_path: Path) -> None:
    """The batch of the step before is in the bundle too."""
    model, captures = _run(steps=2)
    found = _investigate(captures, step=1, rank=0, directory=tmp_path, code="NUM303", facts={"finding": {"a": 1}})
    path = tmp_path / "bundles" / "NUM303-step1-rank0"
    assert found["bundle"] == str(path)
    document = json.loads((path / JSON_FILE).read_text())
    assert document["previous_inputs"]["list"][0]["tuple"][0]["shape"] == [3, 4]
    assert document["replay"]["culprit"]["node"] == "SqrtBackward0"
    assert found["node"] == "SqrtBackward0"
    assert found["location"].startswith("tests/forensics/test_bundle.py:")
    assert json.dumps(found, allow_nan=False)
    assert model is not None


def test_place_of_other_ranks(tmp_path: Path) -> None:
    """Ranks other than 0 write below their own folder, no bundle replaces another, and there are few."""
    model, captures = _run()
    paths = [_investigate(captures, step=0, rank=3, directory=tmp_path)["bundle"] for _ in range(5)]
    folder = tmp_path / "ranks" / "3" / "bundles"
    assert paths[:2] == [str(folder / "NUM303-step0-rank3"), str(folder / "NUM303-step0-rank3-2")]
    assert paths[4] is None
    assert [p.name for p in tmp_path.iterdir()] == ["ranks"]
    assert model is not None


def test_micro_batch(tmp_path: Path) -> None:
    """With accumulation the guilty micro-batch is found."""
    captures, model = ForwardCaptures(GUARD), nn.Linear(4, 4)
    for number in range(11):
        x = torch.randn(3, 4)
        x[0, 0] = torch.nan if number == 9 else 0
        captures.begin(model, (x,), {}, 0)
        output = model(x)
        captures.end(model, output)
        output.sum().backward()
    found = _investigate(captures, step=0, rank=0)
    assert (found["micro_batch"], found["kind"], found["name"]) == (9, "input", "args[0]")
    assert (found["op"], found["location"]) == (None, None)
    assert "3 of the step's first micro-batches were not kept" in found["notes"]


@pytest.mark.parametrize(
    "change, code",
    [
        (lambda model, x: x.fill_(torch.nan), "NUM305"),
        (lambda model, x: model.bias.data.fill_(torch.inf), "NUM304"),
        (lambda model, x: model.weight.data.fill_(3e38), "NUM301"),
        (lambda model, x: None, "NUM"),
    ],
)
def test_code(tmp_path: Path, change: Any, code: str) -> None:
    """Without a finding's code the bundle is named by what the replay shows."""
    captures, model, x = ForwardCaptures(GUARD), nn.Linear(4, 4), torch.ones(3, 4)
    with torch.no_grad():
        change(model, x)
    captures.begin(model, (x,), {}, 2)
    captures.end(model, model(x))
    found = _investigate(captures, step=2, rank=0, directory=tmp_path)
    assert Path(found["bundle"]).name == f"{code}-step2-rank0"


def test_nothing_kept() -> None:
    """Without a forward there is a reason instead of a result."""
    assert _investigate(ForwardCaptures(GUARD), step=0, rank=0)["reason"] == "no forward of this step was kept"


def test_disk_full(tmp_path: Path) -> None:
    """A disk that fills up while the bundle is written leaves nothing behind and raises nothing into the job."""
    model, captures = _run()
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, old[1]))
    try:
        found = _investigate(captures, step=0, rank=0, directory=tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)
    assert found["bundle"] is None
    assert "2000 bytes (ulimit -f)" in found["bundle_reason"]
    assert found["reproduced"]
    assert list(tmp_path.iterdir()) == []
    assert model is not None


def test_room_for_the_job(tmp_path: Path) -> None:
    """A bundle does not take the last of the disk."""
    model, captures = _run()
    disk = Disk(free=lambda _: Free(300 << 20, 1 << 40, None))
    with pytest.raises(BundleError, match="are left for the job"):
        write_bundle(tmp_path, "b", captures.current[0], {}, disk=disk)
    assert list(tmp_path.iterdir()) == []
    assert disk.left_out == {"bundles": 1}
    assert model is not None


def test_unwritable_directory(tmp_path: Path) -> None:
    """A run directory that is a file is a reason, too."""
    (tmp_path / "bundles").write_text("")
    model, captures = _run()
    assert _investigate(captures, step=0, rank=0, directory=tmp_path)["bundle"] is None
    assert model is not None


class Evil:
    def __reduce__(self) -> Any:
        return os.system, ("touch /tmp/ddpdebug-was-here",)


@pytest.mark.parametrize("alive", [True, False])
def test_other_objects_are_left_out(tmp_path: Path, alive: bool) -> None:
    """What is neither tensor nor plain value is described, and reading says what is missing."""

    class Takes(nn.Linear):
        def forward(self, x: torch.Tensor, other: object) -> torch.Tensor:
            return super().forward(x)

    model, captures = Takes(4, 4), ForwardCaptures(GUARD)
    evil = Evil()
    captures.begin(model, (torch.randn(3, 4), evil), {}, 0)
    if not alive:
        del evil
    path = write_bundle(tmp_path, "b", captures.current[0], {})
    with pytest.raises(UsageError, match=r"argument of the model is missing.*Evil"):
        read_bundle(path)


def _damage(path: Path, change: Any) -> None:
    file = path / JSON_FILE
    document = json.loads(file.read_text())
    change(document)
    file.write_text(json.dumps(document))


def _deep(document: dict[str, Any]) -> None:
    node: dict[str, Any] = {"value": 1}
    for _ in range(200):
        node = {"list": [node]}
    document["inputs"]["list"][0] = node


_CHANGES = {
    "newer": (lambda d: d.update(format=FORMAT + 1), "this ddpdebug reads"),
    "no format": (lambda d: d.pop("format"), "no format number"),
    "path": (lambda d: d["parameters"].update(x={"tensor": "../../etc/passwd", "dtype": "uint8"}), "is missing"),
    "deep": (_deep, "nested too deeply"),
    "shape": (lambda d: d["parameters"]["first.weight"].update(shape=[1 << 40, 1 << 40]), "damaged"),
    "negative": (lambda d: d["parameters"]["first.weight"].update(shape=[-1]), "has no shape"),
    "dtype": (lambda d: d["parameters"]["first.weight"].update(dtype="__class__"), "is no dtype"),
    "other dtype": (lambda d: d["parameters"]["first.weight"].update(dtype="int32"), "not torch.int32"),
    "inputs": (lambda d: d.update(inputs=[1, 2]), "not described"),
    "not arguments": (lambda d: d.update(inputs={"list": [{"value": 1}, {"value": 2}]}), "not positional"),
    "one argument": (lambda d: d.update(inputs={"list": []}), "damaged"),
    "autocast": (lambda d: d["autocast"].update(device="cpu; rm -rf"), "no kind of device"),
    "random": (lambda d: d["rng"].update(cpu=d["parameters"]["first.weight"]), "not made of bytes"),
    "table": (lambda d: d.update(modes=[1]), "a table must be"),
    "missing": (lambda d: d.pop("rng"), "damaged"),
    "position": (lambda d: d.update(output_gradients={"x": d["parameters"]["first.weight"]}), "no number"),
    "value": (lambda d: d.update(inputs={"list": [{"value": {"a": 1}}, {"dict": []}]}), "not plain"),
}


@pytest.mark.parametrize("case", _CHANGES)
def test_hostile_json(tmp_path: Path, case: str) -> None:
    """Every wrong type, size or reference in the JSON is a usage error with a reason."""
    change, message = _CHANGES[case]
    path = _bundle(tmp_path)
    _damage(path, change)
    with pytest.raises(UsageError, match=message):
        read_bundle(path)


@pytest.mark.parametrize("file", [JSON_FILE, TENSOR_FILE])
@pytest.mark.parametrize("keep", [0, 5, 100, -1])
def test_truncated(tmp_path: Path, file: str, keep: int) -> None:
    """A file that is cut off anywhere is a usage error."""
    path = _bundle(tmp_path)
    data = (path / file).read_bytes()
    (path / file).write_bytes(data[:keep])
    with pytest.raises(UsageError, match="cut off"):
        read_bundle(path)


@pytest.mark.parametrize("length", [1 << 40, (1 << 63) + 1, 0])
def test_huge_header(tmp_path: Path, length: int) -> None:
    """A header that claims to be huge is not believed."""
    path = _bundle(tmp_path)
    data = (path / TENSOR_FILE).read_bytes()
    (path / TENSOR_FILE).write_bytes(struct.pack("<Q", length) + data[8:])
    with pytest.raises(UsageError, match="cut off"):
        read_bundle(path)


@pytest.mark.parametrize("file", [JSON_FILE, TENSOR_FILE])
def test_links_are_not_followed(tmp_path: Path, file: str) -> None:
    """Neither file may be a link, or a pipe that would be waited for."""
    path = _bundle(tmp_path)
    (path / file).rename(tmp_path / "elsewhere")
    (path / file).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UsageError, match="no regular file"):
        read_bundle(path)
    (path / file).unlink()
    os.mkfifo(path / file)
    with pytest.raises(UsageError, match="no regular file"):
        read_bundle(path)
    (path / file).unlink()
    with pytest.raises(UsageError, match="cannot be read"):
        read_bundle(path)


def test_no_bundle(tmp_path: Path) -> None:
    """Something else than a bundle is said to be none."""
    with pytest.raises(UsageError, match="is no bundle"):
        read_bundle(tmp_path / "nothing")
