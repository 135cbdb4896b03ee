"""Checkpoints as they are on a disk: read whoever wrote them, and refused with a reason."""

from __future__ import annotations

import argparse
import json
import os
import pickle
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

import ddpdebug
from ddpdebug.checkpoints.comparison import compare
from ddpdebug.checkpoints.files import open_state
from ddpdebug.errors import UsageError

DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.uint8, torch.bool, torch.float8_e4m3fn)


@pytest.fixture
def state() -> dict[str, torch.Tensor]:
    """Tensors of all kinds."""
    torch.manual_seed(0)
    found = {f"{str(dtype)[6:]}.w": torch.randn(5, 7).to(dtype) for dtype in DTYPES}
    return {**found, "nothing": torch.zeros(0, 3), "one": torch.tensor(2.5)}


def write_dcp(state: Any, path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that there is one process
        dcp.save(state, checkpoint_id=path, no_dist=True)


def write_directory(state: dict[str, torch.Tensor], path: Path) -> None:
    """Write two files with a list, as trainers do."""
    path.mkdir()
    names = [*state]
    files = {"a.safetensors": names[:4], "b.safetensors": names[4:]}
    for file, part in files.items():
        save_file({name: state[name] for name in part}, path / file)
    places = {name: file for file, part in files.items() for name in part}
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))


WRITERS: dict[str, Callable[[Any, Path], object]] = {
    "torch.distributed.checkpoint": write_dcp,
    "safetensors": lambda state, path: save_file(state, path.with_suffix(".safetensors")),
    "safetensors, 2 files": write_directory,
    "torch.save": torch.save,
    "torch.save ": lambda state, path: torch.save(state, path, _use_new_zipfile_serialization=False),
}


@pytest.mark.parametrize("kind", WRITERS)
def test_each_kind_is_read(kind: str, state: dict[str, torch.Tensor], tmp_path: Path) -> None:
    """All of them are equal to what was saved, and an edit is found in its place."""
    path = tmp_path / "it"
    if kind.endswith(" "):
        del state["float8_e4m3fn.w"]  # what torch wrote before 1.6 has no such
    WRITERS[kind](state, path)
    path = path if path.exists() else path.with_suffix(".safetensors")
    opened = open_state(path)
    assert opened.kind == kind.strip()
    found = ddpdebug.compare_states(state, path)
    assert found.equal, found
    assert found.compared == 35 * (len(state) - 2) + 1
    state["bfloat16.w"][4, 6] = float("nan")
    (one,) = ddpdebug.compare_states(path, state).differences
    assert (one.name, one.index, one.differing, one.elements) == ("bfloat16.w", (4, 6), 1, 35)


def test_what_is_no_tensor_is_compared_too(tmp_path: Path) -> None:
    """In files of torch.save and of torch.distributed.checkpoint, nested."""
    state: dict[str, Any] = {
        "model": {"w": torch.ones(3)},
        "groups": [{"lr": 0.1, "betas": (0.9, 0.99)}],
        "epoch": 3,
        "name": "x",
    }
    torch.save(state, tmp_path / "a")
    write_dcp(state, tmp_path / "b")
    found = compare(open_state(tmp_path / "a"), open_state(tmp_path / "b"))
    assert found.equal, found
    assert found.entries == 6
    state["groups"][0]["betas"] = (0.9, 0.95)
    torch.save(state, tmp_path / "c")
    (one,) = compare(open_state(tmp_path / "c"), open_state(tmp_path / "b")).differences
    assert (one.name, one.kind, one.a, one.b) == ("groups.0.betas.1", "value", "0.95", "0.99")


class Evil:
    """What runs code where it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(Evil.where),)

    where = Path()


def poisoned_metadata(path: Path) -> Path:
    write_dcp({"w": torch.ones(2)}, path)
    index = pickle.loads((path / ".metadata").read_bytes())
    index.planner_data = Evil()
    (path / ".metadata").write_bytes(pickle.dumps(index))
    return path


def poisoned_file(path: Path) -> Path:
    torch.save({"w": torch.ones(2), "args": Evil()}, path)
    return path


def poisoned_value(path: Path) -> Path:
    write_dcp({"w": torch.ones(2), "args": Evil()}, path)
    return path


@pytest.mark.parametrize("write, refused", [(poisoned_metadata, True), (poisoned_file, True), (poisoned_value, False)])
def test_nothing_is_run(write: Callable[[Path], Path], refused: bool, tmp_path: Path) -> None:
    """What a file wants to run is named; of a value in a directory only the bytes are compared. --trust runs it."""
    Evil.where = tmp_path / "was here"
    path = write(tmp_path / "it")
    if refused:
        with pytest.raises(UsageError, match=r"posix\.mkdir.*--trust"):
            open_state(path)
    else:
        assert ddpdebug.compare_states(path, path).equal
        assert "bytes that were not looked into" in str(ddpdebug.compare_states(path, {"w": torch.ones(2)}))
    assert not Evil.where.exists()
    ddpdebug.compare_states(path, {"w": torch.ones(2)}, trust=True)
    assert Evil.where.exists()


def test_a_whole_module_and_other_objects_need_trust(tmp_path: Path) -> None:
    """Their names are in the message."""
    model = torch.nn.Linear(2, 3)
    torch.save({"model": model.state_dict(), "args": argparse.Namespace(lr=0.1)}, tmp_path / "a")
    with pytest.raises(UsageError, match=r"holds more than tensors and plain values: argparse\.Namespace; add --trust"):
        open_state(tmp_path / "a")
    torch.save({"model": model.state_dict(), "args": argparse.Namespace(lr=0.2)}, tmp_path / "b")
    found = compare(open_state(tmp_path / "a", trust=True), open_state(tmp_path / "b", trust=True))
    assert [one.name for one in found.differences] == ["args"]
    torch.save(model, tmp_path / "c")
    assert ddpdebug.compare_states(model.state_dict(), tmp_path / "c", trust=True).equal


def cut(path: Path) -> None:
    """Take the end of the largest file of a checkpoint away."""
    files = [path] if path.is_file() else [file for file in path.iterdir() if file.name != ".metadata"]
    largest = max(files, key=lambda file: file.stat().st_size)
    largest.write_bytes(largest.read_bytes()[:-600])


@pytest.mark.parametrize("kind", WRITERS)
def test_damage_is_an_error(kind: str, state: dict[str, torch.Tensor], tmp_path: Path) -> None:
    """And never a traceback."""
    path = tmp_path / "it"
    WRITERS[kind](state, path)
    path = path if path.exists() else path.with_suffix(".safetensors")
    cut(path)
    with pytest.raises(UsageError, match="it"):
        ddpdebug.compare_states(path, state)


def empty(path: Path) -> None:
    path.mkdir()


def two_files(path: Path) -> None:
    path.mkdir()
    for name in "ab":
        save_file({"w": torch.ones(1)}, path / f"{name}.safetensors")


def without_a_file(path: Path) -> None:
    path.mkdir()
    (path / "x.index.json").write_text('{"weight_map": {"w": "none.safetensors"}}')


def without_a_tensor(path: Path) -> None:
    path.mkdir()
    save_file({"v": torch.ones(1)}, path / "a.safetensors")
    (path / "x.index.json").write_text('{"weight_map": {"w": "a.safetensors"}}')


def without_names(path: Path) -> None:
    path.mkdir()
    (path / "x.index.json").write_text("[]")


def without_a_chunk(path: Path) -> None:
    write_dcp({"w": torch.ones(2)}, path)
    index = pickle.loads((path / ".metadata").read_bytes())
    index.state_dict_metadata["w"].chunks.clear()
    (path / ".metadata").write_bytes(pickle.dumps(index))


def elsewhere(path: Path) -> None:
    write_dcp({"w": torch.ones(2)}, path)
    index = pickle.loads((path / ".metadata").read_bytes())
    for info in index.storage_data.values():
        info.relative_path = "../other"
    (path / ".metadata").write_bytes(pickle.dumps(index))


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda path: None, "there is no checkpoint"),
        (empty, "is no checkpoint, or several: it has nothing; give a directory"),
        (two_files, r"it has a\.safetensors, b\.safetensors; give"),
        (without_a_file, r"there is no checkpoint .*none\.safetensors"),
        (without_a_tensor, "'a.safetensors' has no 'w', though"),
        (without_names, "has no weight_map"),
        (without_a_chunk, "is not complete: it has not all elements of 'w'"),
        (elsewhere, r"names a file elsewhere: '\.\./other'"),
        (lambda path: path.write_text("hello"), "is no file of torch.save, or damaged"),
    ],
)
def test_what_is_no_checkpoint(make: Callable[[Path], object], message: str, tmp_path: Path) -> None:
    """It is an error that says what was wanted."""
    make(tmp_path / "it")
    with pytest.raises(UsageError, match=message):
        ddpdebug.compare_states(tmp_path / "it", {"w": torch.ones(2)})


def test_one_piece_is_read_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each side one piece is held, and each is read once where the pieces are alike."""
    state = {f"w{i}": torch.full((100,), float(i)) for i in range(20)}
    write_dcp(state, tmp_path / "a")
    loaded: list[weakref.ref[torch.Tensor]] = []
    alive = []
    load = torch.load

    def watched(*args: Any, **more: Any) -> Any:
        alive.append(sum(one() is not None for one in loaded))
        found = load(*args, **more)
        loaded.append(weakref.ref(found))
        return found

    monkeypatch.setattr(torch, "load", watched)
    assert ddpdebug.compare_states(tmp_path / "a", tmp_path / "a").equal
    assert len(loaded) == 2 * 20
    assert max(alive) <= 2
