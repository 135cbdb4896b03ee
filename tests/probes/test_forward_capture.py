"""What is kept of a forward is enough to run it again, and keeps nothing alive that the job has let go."""

from __future__ import annotations

import gc
import weakref
from collections import namedtuple
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from ddpdebug.forensics.replay.investigator import investigate
from ddpdebug.instrument.probes import Probes
from ddpdebug.isolation.child import Children
from ddpdebug.isolation.guard import Guard
from ddpdebug.nested import leaves
from ddpdebug.probes.forward_capture import MAX_CAPTURES, ForwardCaptures
from ddpdebug.probes.holding import Counted, Lost, fetch, hold

GUARD = Guard(lambda part, message: pytest.fail(f"{part}: {message}"))


def test_arguments_keep_their_form() -> None:
    """Containers are copies, tensors are there while the job has them, and paths name them."""
    point = namedtuple("point", "x y")  # noqa: PYI024 - what users write
    x, y = torch.ones(2), torch.zeros(3)
    batch = {"a": [x, 1], "p": point(y, "text")}
    held = hold((batch,), {}, Counted())
    batch.pop("a")
    found = fetch(held)
    assert list(found[0]) == ["a", "p"]
    (first, number), second = found[0]["a"], found[0]["p"]
    assert type(found[0]["a"]) is list
    assert number == 1
    assert type(second) is point
    assert second.y == "text"
    assert first.is_set_to(x)
    assert second.x.is_set_to(y)
    assert [path for path, value in leaves((found, {"k": y})) if isinstance(value, torch.Tensor)] == [
        "args[0]['a'][0]",
        "args[0]['p'][0]",
        "k",
    ]
    del batch, x, found, first
    assert isinstance(fetch(held)[0]["a"][0], Lost)


def test_no_graph_is_held() -> None:
    """An input that another model made is kept without its graph."""
    captures, first, second = ForwardCaptures(GUARD), nn.Linear(4, 4), nn.Linear(4, 4)
    h = first(torch.ones(2, 4))
    assert h.grad_fn is not None
    mark = nn.Module()  # any object; it dies with the node
    h.grad_fn.metadata["mark"] = mark
    node = weakref.ref(mark)
    del mark
    captures.begin(second, (h,), {}, 0)
    values = h.detach().clone()
    (kept,) = captures.current[0].args
    assert kept.grad_fn is None
    assert kept.requires_grad
    del h, kept
    gc.collect()
    assert node() is None
    (kept,) = captures.current[0].args
    assert kept.requires_grad
    assert torch.equal(kept, values)


def test_outputs_and_models_are_not_kept() -> None:
    """Outputs, graphs and the model go when the job lets them go."""
    captures, model, x = ForwardCaptures(GUARD), nn.Linear(4, 4), torch.ones(2, 4)
    captures.begin(model, (x,), {}, 0)
    output = model(x)
    captures.end(model, output)
    refs = [weakref.ref(output), weakref.ref(model), weakref.ref(model.weight)]
    del output, model
    gc.collect()
    assert [ref() for ref in refs] == [None, None, None]
    assert torch.equal(captures.current[0].args[0], x)


def test_gradients_of_outputs() -> None:
    """Gradients are kept until the next step is reached, the newest as far as they fit."""
    captures, model, x = (
        ForwardCaptures(GUARD, limit=130),
        nn.Linear(4, 4),
        torch.ones(2, 4),
    )  # x and each gradient have 32 bytes
    for step in range(2):
        for factor in range(4):
            captures.begin(model, (x,), {}, step)
            output = model(x)
            captures.end(model, output)
            (output * (factor + torch.ones(2, 4))).sum().backward()
        captures_of_step = list(captures.current)
        assert [list(capture.gradients) for capture in captures_of_step] == [[], [0], [0], [0]]
        assert [capture.gradients_lost for capture in captures_of_step] == [32, 0, 0, 0]
        assert torch.equal(captures_of_step[3].gradients[0], torch.full((2, 4), 4.0))
        assert captures.room.used == 128
        captures.next_step()
        assert list(captures.previous) == captures_of_step
        assert not any(capture.gradients for capture in captures_of_step)
        assert captures.room.used == 32
    captures.clear()
    assert captures.room.used == 0


def test_bounded() -> None:
    """A step with many micro-batches keeps the last ones, and the ring holds two steps."""
    captures, model = ForwardCaptures(GUARD), nn.Linear(4, 4)
    for step in range(3):
        for _ in range(20):
            captures.begin(model, (torch.ones(2, 4),), {}, step)
        assert (len(captures.current), captures.dropped) == (MAX_CAPTURES, 20 - MAX_CAPTURES)
        captures.next_step()
    assert {capture.step for capture in (*captures.current, *captures.previous)} == {2}
    assert captures.dropped == 0


def test_only_training() -> None:
    """A forward without gradients is not kept."""
    captures, model = ForwardCaptures(GUARD), nn.Linear(4, 4)
    with torch.no_grad():
        captures.begin(model, (torch.ones(2, 4),), {}, 0)
    assert not captures.current


def test_learns_which_buffers_are_written() -> None:
    """A constant buffer is never copied, one that forward writes is copied from its second forward on."""

    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.zeros(()))
            self.constant = nn.Module()
            self.constant.register_buffer("mask", torch.ones(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.count += 1
            return x

    captures, model, x = ForwardCaptures(GUARD), Counts(), torch.ones(2)
    seen = []
    for _ in range(3):
        captures.begin(model, (x,), {}, 0)
        captures.end(model, model(x))
        seen.append({name: value.item() for name, value in captures.current[-1].buffers.items()})
    assert seen == [{}, {"count": 1}, {"count": 2}]


def test_saved_output_warns_nobody(tmp_path: Path) -> None:
    """An output with our hook can be saved as without it."""
    captures, model, x = ForwardCaptures(GUARD), nn.Linear(4, 4), torch.ones(2, 4)
    captures.begin(model, (x,), {}, 0)
    output = model(x)
    captures.end(model, output)
    torch.save(output, tmp_path / "output.pt")
    assert torch.equal(torch.load(tmp_path / "output.pt"), output)


class Watched:
    def __init__(self) -> None:
        self.troubles: list[str] = []
        self.guard = Guard(lambda part, message: self.troubles.append(f"{part}: {message}"))
        self.probes = Probes(self.guard, lambda _: None, lambda *_: None, lambda *_: True)


@pytest.fixture
def watched(tmp_path: Path) -> Iterator[Watched]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    found = Watched()
    found.probes.patches.install()
    try:
        yield found
    finally:
        found.probes.remove()
        found.probes.release()
        dist.destroy_process_group()
    assert found.troubles == []


class Net(nn.Module):
    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4)
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = checkpoint(self.deep, self.first(x), use_reentrant=self.reentrant)
        return self.last(h)

    def deep(self, x: torch.Tensor) -> torch.Tensor:
        other = x != x[0]  # of equal rows the norm leaves nothing, or what rounding leaves, by torch's version
        return torch.sqrt(nn.functional.dropout(self.norm(x) * other).pow(2).sum(0))


@pytest.mark.smoke
@pytest.mark.parametrize("reentrant, find_unused", [(True, False), (False, False), (False, True)])  # what DDP supports
def test_in_place_under_ddp(watched: Watched, reentrant: bool, find_unused: bool, tmp_path: Path) -> None:
    """Before the optimizer step the guilty step is run again, and training goes on as without that."""
    weights = []
    for look in (False, True):
        torch.manual_seed(3)
        model = Net(reentrant=reentrant)
        ddp = DistributedDataParallel(model, find_unused_parameters=find_unused)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        for step in range(3):
            x = torch.randn(5, 4) * (step != 1)
            optimizer.zero_grad()
            ddp(x).sum().backward()
            if look:
                backwards = watched.probes.state.backwards
                children, told = Children(watched.guard), list[dict[str, Any]]()
                place = {"step": step, "rank": 0, "directory": tmp_path, "guard": watched.guard}
                investigate(watched.probes.captures, told.append, children, **place)
                children.finish(60)
                (found,) = told
                assert watched.probes.state.backwards == backwards
                assert found["complete"], found
                assert found["reproduced"] == (step > 0)
                if step == 1:
                    assert (found["node"], found["phase"]) == ("SqrtBackward0", "backward")
                    assert found["location"].startswith("tests/probes/test_forward_capture.py:")
                    assert found["bundle"] is not None
                if step == 2:
                    assert found["kind"] == "parameter"
            optimizer.step()
        weights.append([p.detach().numpy().tobytes() for p in (*model.parameters(), *model.buffers())])
        del ddp, optimizer
        gc.collect()
    assert weights[0] == weights[1]


def test_steps(watched: Watched) -> None:
    """Each optimizer step moves the forwards on; the line of the call and the step's number are known."""
    model = nn.Linear(4, 4)
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    captures: Any = watched.probes.captures
    first = len(watched.probes.state.watches)
    for step in range(3):
        x = torch.ones(2, 4)
        ddp(x).sum().backward()
        (capture,) = captures.current
        assert capture.args[0].data_ptr() == x.data_ptr()
        assert capture.step == step
        assert 0 in capture.gradients
        assert capture.changed() == []
        optimizer.step()
        assert captures.previous[0] is capture
        assert not captures.current
        assert capture.changed() == ["parameter weight", "parameter bias"]
        assert capture.location.startswith("tests/probes/test_forward_capture.py:")
    assert len(watched.probes.state.watches) == first + 1
    del ddp, optimizer


def test_an_output_that_the_loss_leaves_out(watched: Watched) -> None:
    """DDP tells its hooks that such an output has no gradient: the job trains on, and the others are kept."""

    class TwoHeads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.main, self.aux = nn.Linear(4, 2), nn.Linear(4, 2)

        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"aux": self.aux(x), "main": self.main(x)}

    ddp = DistributedDataParallel(TwoHeads(), find_unused_parameters=True)
    ddp(torch.ones(3, 4))["main"].sum().backward()
    assert ddp.module.main.weight.grad is not None
    (capture,) = watched.probes.captures.current
    assert list(capture.gradients) == [1]
    del ddp
