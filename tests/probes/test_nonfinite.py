"""The numeric probes in one process: what is seen of inputs, module calls, loss, gradients, parameters."""

from __future__ import annotations

import ast
import copy
import gc
import math
import pickle
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import ddpdebug
from ddpdebug.isolation.guard import Guard
from ddpdebug.probes import inputs, module_outputs as modules, ranges
from ddpdebug.probes.loop_calls import Losses
from ddpdebug.probes.loss_line import line_of_loss
from ddpdebug.probes.module_outputs import ForwardProbe
from ddpdebug.probes.nonfinite_detail import complete
from ddpdebug.probes.nonfinite_notes import Judgement, Looks, Replaying
from ddpdebug.probes.record import SinceLastStep, StepRecord
from ddpdebug.probes.step_digests import GradientDigests
from ddpdebug.probes.training_events import NonfiniteMade
from ddpdebug.run_directory.reader import read_steps
from ddpdebug.schema.details import BadInput, EntryGradient, ModuleCall, NearLimit, NonfiniteLoss
from ddpdebug.schema.likeliest import untagged
from ddpdebug.schema.row import Flag

NAN, INF = math.nan, math.inf
FLOAT8 = [getattr(torch, name) for name in ("float8_e4m3fn", "float8_e5m2") if hasattr(torch, name)]


def look_at(model: nn.Module, *args: Any, **kwargs: Any) -> Looks:
    """Run one forward under the probe; a probe that fails is an error here."""
    troubles: list[str] = []
    probe, looks = ForwardProbe(Guard(lambda part, text: troubles.append(f"{part}: {text}"))), Looks()
    probe.begin(looks, 3)
    try:
        model(*args, **kwargs)
    finally:
        probe.end(model, "")
    assert troubles == []
    return looks


# --- ranges -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16, *FLOAT8], ids=str)
def test_ranges_of_all_float_types(dtype: torch.dtype) -> None:
    """The range is exact, and NaN shows in it, whatever the float type."""
    tensor = torch.tensor([[-2.0, 0.5], [3.0, 1.0]]).to(dtype)
    assert ranges.read(tensor) == (-2.0, 3.0)
    bad = torch.tensor([1.0, NAN, 2.0]).to(dtype)
    assert ranges.kinds_of(*ranges.read(bad) or (0.0, 0.0)) == ["NaN"]


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor([1, 2]),
        torch.tensor([True]),
        torch.empty(0),
        torch.ones(3, device="meta"),
        torch.ones(3, 3).to_sparse(),
    ],
    ids=["integers", "booleans", "empty", "meta", "sparse"],
)
def test_what_has_no_range_is_left_alone(tensor: torch.Tensor) -> None:
    """Integers, empty tensors and those without memory of their own are not looked at."""
    assert ranges.look(tensor) is None


def test_complex_numbers_and_overflowing_sums() -> None:
    """A complex tensor is looked at by its parts; large finite numbers are not taken for Inf."""
    assert ranges.read(torch.tensor([1 + 2j, -3j]).conj()) == (-2.0, 3.0)
    large = torch.full((1000,), 3e38)
    assert torch.isinf(large.sum())
    assert ranges.nonfinite([large, torch.tensor([1.0, INF]), torch.full((10,), 1e200, dtype=torch.float64)]) == [1]


@pytest.mark.parametrize("dtype", FLOAT8)
def test_the_ends_of_float8_are_those_of_its_numbers(dtype: torch.dtype) -> None:
    """They are read as integers, of either sign, with NaN of either sign."""
    every = torch.arange(256, dtype=torch.uint8)
    for bits in (every[:3], every[-3:], every[:128], every[128:200], every[100:200], every[5:6]):
        expected = torch.aminmax(bits.view(dtype).to(torch.float32))
        torch.testing.assert_close(ranges.look(bits.view(dtype)), tuple(expected), equal_nan=True)


@pytest.mark.parametrize("shape", [(7, 11), (11, 7), (77,)])
def test_pieces_say_what_the_whole_says(shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Lazily conjugated numbers, and what is counted of others, are converted a few at a time."""
    whole = torch.arange(77.0).view(shape)
    for bad in (whole, whole.clone().view(-1).index_fill(0, torch.tensor([5, 60]), -INF).view(shape), whole * NAN):
        for tensor in (bad, torch.complex(bad, -whole).conj(), bad.to(torch.float8_e5m2)):
            large = [ask(tensor) for ask in (ranges.read, ranges.describe, ranges.samples, ranges.is_additive_mask)]
            with monkeypatch.context() as patch:
                patch.setattr(ranges, "_PIECE", 6)
                small = [ask(tensor) for ask in (ranges.read, ranges.describe, ranges.samples, ranges.is_additive_mask)]
                assert len(ranges._pieces(tensor)) > 5
            assert repr(small) == repr(large)


def test_tensors_of_other_kinds_are_not_asked() -> None:
    """A subclass with a dispatch of its own may communicate when it is read, and vmap has no numbers yet."""

    class Dispatching(torch.Tensor):
        @classmethod
        def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
            raise AssertionError("was asked")

    wrapped = torch.Tensor._make_subclass(Dispatching, torch.ones(3))
    assert ranges.look(wrapped) is None
    seen: list[Any] = []
    torch.vmap(lambda x: seen.append(ranges.look(x)) or x * 2)(torch.ones(2, 3))
    assert seen == [None]


def test_what_is_repeated_is_read_once() -> None:
    """Of 2^40 elements that are one, a copy would not fit anywhere."""
    for value in (1.0, math.nan):
        wide = torch.tensor([[value]]).expand(1 << 20, 1 << 20)
        assert ranges.is_surely_finite(wide) == math.isfinite(value)
        assert ranges.nonfinite([wide]) == ([] if math.isfinite(value) else [0])
        low, _ = ranges.read(wide) or (0.0, 0.0)
        assert low == value or math.isnan(value)
    assert ranges.describe(torch.full((1, 2), math.nan).expand(1 << 30, 2))["kinds"] == (ranges.NAN,)


def test_the_limit_of_16_bits() -> None:
    """Above half of the maximum is near; a mask made of large negative constants is not, nor is float32."""
    assert ranges.near_limit(torch.float16, -40000.0, 30000.0) == 40000.0
    assert ranges.near_limit(torch.float16, -65504.0, 11.0) is None
    assert ranges.near_limit(torch.float16, -30000.0, 30000.0) is None
    assert ranges.near_limit(torch.float32, 0.0, 3e38) is None
    assert ranges.near_limit(torch.bfloat16, 0.0, 3e38) == 3e38


# --- module calls -----------------------------------------------------------------------------------------------------


class Log(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.log(x)


@dataclass
class Result:
    first: torch.Tensor
    rest: dict[str, Any]


class Pair(NamedTuple):
    left: torch.Tensor
    right: torch.Tensor


class Returning(nn.Module):
    def __init__(self, make: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.make = make

    def forward(self, x: torch.Tensor) -> Any:
        return self.make(x)


@pytest.mark.parametrize(
    "make, position",
    [
        (lambda x: x / 0, 0),
        (lambda x: (torch.ones(2), x / 0), 1),
        (lambda x: {"a": torch.ones(2), "b": [torch.ones(1), x / 0]}, 2),
        (lambda x: Result(torch.ones(2), {"y": x / 0}), 1),
        (lambda x: Pair(x / 0, torch.ones(2)), 0),
        (lambda x: {"text": "x", "count": torch.tensor([1]), "y": x / 0}, 1),
        (lambda x: torch.complex(x / 0, x), 0),
    ],
    ids=["tensor", "tuple", "nested dict", "dataclass", "named tuple", "not only floats", "complex"],
)
def test_outputs_in_any_structure(make: Callable[[torch.Tensor], Any], position: int) -> None:
    """A bad tensor is found in whatever a module returns, with its place in it."""
    (call,) = look_at(nn.Sequential(nn.Identity(), Returning(make)), torch.ones(2)).forward[:1]
    assert (call.module, call.output, call.kinds) == ("1", position, ("+Inf",))
    assert (call.input_range, call.input_nonfinite) == ((1.0, 1.0), False)


def test_calls_are_told_apart() -> None:
    """A module that is called several times is named with the call, and only that one is bad."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.log = Log()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.log(x)
            self.log(x - 2).sum()
            return self.log(x)

    (call,) = look_at(Net(), torch.ones(3)).forward
    assert (call.module, call.call, call.kinds, call.count) == ("log", 1, ("NaN",), 3)


def test_a_shared_module_is_named_by_who_calls_it() -> None:
    """A module that is registered twice has the path under which it was called."""

    class Block(nn.Module):
        def __init__(self, log: nn.Module) -> None:
            super().__init__()
            self.log = log

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.log(x)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            log = Log()
            self.blocks = nn.ModuleList([Block(log), Block(log)])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.blocks[1](self.blocks[0](x) - 5)

    call = look_at(Net(), torch.ones(3)).forward[0]
    assert (call.module, call.caller) == ("blocks.1.log", "blocks.1")


def test_a_container_that_hands_on_is_not_looked_at_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same tensor, unchanged, costs one pass however many modules return it; one changed in place costs another."""
    looked: list[tuple[int, ...]] = []
    original = ranges.is_surely_finite

    def look(tensor: torch.Tensor) -> bool:
        looked.append(tuple(tensor.shape))
        return original(tensor)

    monkeypatch.setattr(ranges, "is_surely_finite", look)
    look_at(nn.Sequential(nn.Sequential(nn.Linear(2, 3)), nn.Identity()), torch.ones(1, 2))
    assert looked == [(1, 3)]
    looked.clear()
    look_at(nn.Sequential(nn.Linear(2, 3), nn.ReLU(inplace=True)), torch.ones(1, 2))
    assert looked == [(1, 3), (1, 3)]


def test_nothing_of_the_forward_is_kept() -> None:
    """Activations are freed as without the probe."""
    seen: list[weakref.ref[torch.Tensor]] = []

    def note(module: nn.Module, args: Any, output: torch.Tensor) -> None:
        seen.append(weakref.ref(output))

    net = nn.Sequential(nn.Linear(2, 3), Log())
    net[0].register_forward_hook(note)
    with torch.no_grad():
        looks = look_at(net, torch.ones(1, 2))
    assert looks.forward
    gc.collect()
    assert [ref() for ref in seen] == [None]


def test_the_probe_leaves_nothing_behind() -> None:
    """During a forward, after it, and after one that raises, torch has no hook of ours."""
    hooks: list[int] = []
    note = Returning(lambda x: (hooks.append(len(torch.nn.modules.module._global_forward_hooks)), x)[1])
    net = nn.Sequential(nn.Linear(2, 2), note)
    look_at(net, torch.ones(1, 2))
    with pytest.raises(RuntimeError):
        look_at(net, torch.ones(1, 3))
    assert hooks == [0]
    assert not [m for m in net.modules() if m._forward_hooks or m._forward_pre_hooks]


def test_the_history_of_16_bit_outputs() -> None:
    """Outputs near the limit of float16 come with the magnitudes of the steps before."""
    scale = Returning(lambda x: x)
    net = nn.Sequential(scale)
    troubles: list[Any] = []
    probe, looks = ForwardProbe(Guard(lambda *args: troubles.append(args))), Looks()
    for step, factor in enumerate((1.0, 1000.0, 40000.0)):
        scale.make = lambda x, factor=factor: x * factor
        probe.begin(looks, step)
        net(torch.ones(3, dtype=torch.float16))
        probe.end(net, "")
    assert troubles == []
    near = looks.near[0]
    assert (near.module, near.largest, near.limit) == ("0", 40000.0, 65504.0)
    assert near.history == ((0, 1.0), (1, 1000.0), (2, 40000.0))


# --- inputs -----------------------------------------------------------------------------------------------------------


class Model(nn.Module):
    def forward(self, x: torch.Tensor, *more: Any, mask: Any = None, **options: Any) -> torch.Tensor:
        return x


def test_arguments_are_named_as_in_the_signature() -> None:
    """A bad argument has the name under which forward knows it, wherever it is nested, and its bad samples."""
    x = torch.ones(4, 2)
    x[1, 0], x[3, 1] = NAN, INF
    fine = torch.ones(2)
    deep = {"ids": torch.tensor([1]), "y": [fine, Pair(fine, x[:2])]}
    found = inputs.bad(Model(), (x, fine, x), {"batch": deep})
    assert [(entry.argument, entry.samples) for entry in found] == [
        ("x", (1, 3)),
        ("more[1]", (1, 3)),
        ("batch['y'][1].right", (1,)),
    ]
    assert found[0].kinds == ("NaN", "+Inf")


def test_masks_are_no_bad_input() -> None:
    """-Inf on purpose: a mask by its name or by holding nothing but 0 and -Inf; log(0) among features is not."""
    scores = torch.tensor([[0.5, -INF], [1.0, 2.0]])
    mask = torch.tensor([[0.0, -INF], [0.0, 0.0]])
    assert inputs.bad(Model(), (mask,), {"mask": scores}) == []
    assert [entry.argument for entry in inputs.bad(Model(), (scores,), {})] == ["x"]


# --- the line of the loss ---------------------------------------------------------------------------------------------

_SOURCE = """
def train(scaler, model, x, y):
    out = model(x)
    {0}
    return out
"""


@pytest.mark.parametrize(
    "body, line",
    [
        ("loss = f(out)\n    loss.backward()", 4),
        ("loss = f(out)\n    loss = loss / 4\n    loss.backward()", 4),
        ("loss = f(out)\n    loss /= len(x)\n    scaler.scale(loss).backward()", 4),
        ("a, b = f(out)\n    total = a + b\n    total.mean().backward()", 5),
        ("f(model(x), y).backward()", 4),
        ("loss = f(out)\n    loss = loss + g(out)\n    accelerator.backward(loss)", 5),
        ("pass\n    x.backward()", None),
    ],
)
def test_the_line_that_made_the_loss(body: str, line: int | None) -> None:
    """The last assignment before backward that does more than rescale, or the call itself."""
    source = _SOURCE.format(body)
    at = next(i for i, text in enumerate(source.splitlines(), 1) if "backward(" in text)
    assert line_of_loss(ast.parse(source), at) == line


# --- a whole step, through `watch` ------------------------------------------------------------------------------------


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(4, 4), nn.Linear(4, 1)

    def forward(self, x: torch.Tensor, bad: str = "") -> torch.Tensor:
        x = self.body(x)
        if bad == "forward":
            x = torch.log(x - 50)
        if bad == "backward":
            x = x + (x * 0).sqrt()
        if bad == "checkpointed":
            x = checkpoint(lambda x: torch.log(x - 50), x, use_reentrant=False)
        return self.head(x)


@pytest.fixture
def watched(tmp_path: Path) -> Iterator[Callable[..., tuple[nn.Module, torch.optim.Optimizer, ddpdebug.Monitor]]]:
    """Watch a model in this process."""
    monitors: list[ddpdebug.Monitor] = []

    def watch(model: nn.Module, optimizer: torch.optim.Optimizer | None = None, **options: Any) -> Any:
        optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=1e-2)
        monitor = ddpdebug.watch(model, optimizer, out=tmp_path, metrics="off", quiet=True, **options)
        monitors.append(monitor)
        return model, optimizer, monitor

    yield watch
    for monitor in monitors:
        monitor.close()


def train(model: nn.Module, optimizer: torch.optim.Optimizer, *, bad: str = "", steps: int = 6, at: int = 3) -> None:
    torch.manual_seed(0)
    for step in range(steps):
        now = bad if step == at else ""
        x = torch.randn(5, 4)
        if now == "input":
            x[2, 1] = NAN
        loss = model(x, bad=now).square().mean()
        if now == "loss":
            loss = loss * torch.log(loss.detach() * 0)
        if now == "parameter":
            with torch.no_grad():
                model.head.weight[0, 1] = NAN  # type: ignore[union-attr,operator,index]
        if now == "rate":
            optimizer.param_groups[0]["lr"] = INF
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


_PLACES = {
    "forward": ("NUM301", 3, "(model)"),
    "checkpointed": ("NUM301", 3, "(model)"),
    "backward": ("NUM303", 3, "body"),
    "loss": ("NUM302", 3, "loss"),
    "input": ("NUM305", 3, "x"),
    "rate": ("NUM304", 3, "body.bias"),
    "": None,
}


@pytest.mark.parametrize("bad", _PLACES)
def test_one_process_without_ddp(bad: str, watched: Callable[..., Any]) -> None:
    """`watch` finds on a laptop what it finds in a job, once each."""
    model, optimizer, monitor = watched(Net())
    train(model, optimizer, bad=bad)
    monitor.close()
    expected = _PLACES[bad]
    assert [(f.code, f.step, f.subject[0]) for f in monitor.findings] == ([] if expected is None else [expected])


@pytest.mark.parametrize(
    ("phase", "cause"),
    [("optimizer", "an update that divides by zero"), ("outside-optimizer", "a checkpoint, an average")],
)
def test_the_causes_of_a_bad_parameter_fit_what_wrote_it(phase: str, cause: str, watched: Callable[..., Any]) -> None:
    """Of one that was written between two steps the optimizer is the last to be suspected."""
    model, optimizer, monitor = watched(Net())
    for step in range(5):
        optimizer.param_groups[0]["lr"] = INF if step == 3 and phase == "optimizer" else 0.01
        optimizer.zero_grad()
        model(torch.randn(5, 4)).square().mean().backward()
        optimizer.step()
        if step == 3 and phase == "outside-optimizer":
            with torch.no_grad():
                model.head.weight[0, 1] = NAN
    monitor.close()
    finding = monitor.findings[0]
    assert (finding.code, finding.phase) == ("NUM304", phase)
    assert untagged(finding.causes[0]).startswith(cause)


def spoilt_loss(output: torch.Tensor, kind: str) -> torch.Tensor:
    """Return a loss that is bad, or that has a bad gradient."""
    if kind == "log":
        return torch.log(output * 0).sum()  # the logarithm
    if kind == "root":
        return (output - output.detach()).pow(2).sum(1).sqrt().sum()  # the root
    if kind == "target":
        return nn.functional.mse_loss(output, torch.full_like(output, NAN))  # the target
    return output.square().mean()


@pytest.mark.parametrize(
    ("kind", "mark", "phase", "operation", "cause"),
    [
        ("log", "the logarithm", "loss", "LogBackward0", "`torch.log` of a probability that is exactly 0"),
        ("root", "the root", "loss-backward", "SqrtBackward0", "the derivative at 0 of sqrt"),
        ("target", "the target", "loss", "MseLossBackward0", "nan in labels, weights"),
    ],
)
def test_the_operation_of_a_loss(
    kind: str, mark: str, phase: str, operation: str, cause: str, watched: Callable[..., Any]
) -> None:
    """Its line is that of the operation in the loss function, its cause the one that fits, and it is found once."""
    model, optimizer, monitor = watched(Net())
    for step in range(5):
        loss = spoilt_loss(model(torch.randn(5, 4)), kind if step == 3 else "")
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    monitor.close()
    (finding,) = monitor.findings
    line = 1 + next(i for i, text in enumerate(Path(__file__).read_text().splitlines()) if text.endswith(f"# {mark}"))
    assert (finding.code, finding.step, finding.phase) == ("NUM302", 3, phase)
    assert finding.location is not None
    assert finding.location.endswith(f"test_nonfinite.py:{line}")
    assert finding.evidence["operation"] == operation
    assert finding.evidence["operands"]
    assert untagged(finding.causes[0]).startswith(cause)


@pytest.mark.parametrize("told", [False, True])
def test_a_loss_scale_that_has_fallen_to_zero_switches_nothing_off(
    told: bool, watched: Callable[..., Any], tmp_path: Path
) -> None:
    """The loss cannot be known then unless the script tells it, but whether it is finite can."""
    model, optimizer, monitor = watched(Net(), every_step=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=2e-45, backoff_factor=0.25)
    for bad in (True, False, True, False):
        loss = model(torch.randn(5, 4)).square().mean()
        optimizer.zero_grad()
        scaler.scale(loss * INF if bad else loss).backward()
        if told:
            ddpdebug.observe(loss=3.0)
        scaler.step(optimizer)
        scaler.update()
    assert scaler.get_scale() == 0
    monitor.close()
    assert not [*tmp_path.rglob("trouble.jsonl")]
    rows = [step.rows[0] for step in read_steps(tmp_path)]
    assert [row.has(Flag.LOSS_NONFINITE) for row in rows[:2]] == ([False, False] if told else [True, False])
    assert [row.loss for row in rows[1:2]] == ([3.0] if told else [pytest.approx(NAN, nan_ok=True)])


def test_stop_in_one_process(watched: Callable[..., Any]) -> None:
    """The optimizer does not apply the bad update, and the error says where it came from."""
    model, optimizer, _ = watched(Net(), guard="stop")
    with pytest.raises(ddpdebug.FindingError, match=r"NUM301 .* at step 3"):
        train(model, optimizer, bad="forward")
    assert all(torch.isfinite(p).all() for p in model.parameters())


def test_the_call_site_sees_the_step_before_it_happens(watched: Callable[..., Any]) -> None:
    """What is registered for a replay is called once, with everything as it was, and its answer is kept."""
    seen: list[Any] = []
    model, optimizer, monitor = watched(Net())

    def replay(event: Any) -> None:
        record, looks = event.record, event.record.since.parts[Looks]
        finite = all(bool(torch.isfinite(p).all()) for p in looks.module().parameters())
        capture = monitor.probes.captures.newest(looks.module())
        seen.append((record.step, finite, tuple(capture.args[0].shape)))
        answer = {"op": "aten.log.default", "location": "train.py:12", "module": "body"}
        record.parts[Judgement].replaying = Replaying(answer)

    monitor.probes.bus.on("forensics:mine", NonfiniteMade, replay)
    train(model, optimizer, bad="forward")
    monitor.close()
    assert seen == [(3, True, (5, 4))]
    (finding,) = monitor.findings
    assert (finding.location, finding.subject[0]) == ("train.py:12", "body")
    assert finding.evidence["operation"] == "aten.log.default"
    assert untagged(finding.causes[0]).startswith("log of zero")


def test_a_replay_that_raises_leaves_training_alone(watched: Callable[..., Any]) -> None:
    """The finding is made without it."""
    model, optimizer, monitor = watched(Net())
    monitor.probes.bus.on("forensics:mine", NonfiniteMade, lambda event: 1 / 0)
    train(model, optimizer, bad="forward")
    monitor.close()
    assert [f.code for f in monitor.findings] == ["NUM301"]


def test_evaluation_is_not_looked_at(watched: Callable[..., Any]) -> None:
    """A forward without gradients may return what it likes."""
    model, optimizer, monitor = watched(Net())
    train(model, optimizer, steps=2)
    with torch.no_grad():
        model(torch.full((2, 4), NAN))
    train(model, optimizer, steps=2)
    monitor.close()
    assert monitor.findings == []


def test_watched_models_stay_what_they_are(watched: Callable[..., Any]) -> None:
    """A watched module can be copied and pickled, and its class is as before afterwards."""
    own = vars(Net)["forward"]
    model, optimizer, monitor = watched(Net())
    train(model, optimizer, steps=1)
    pickle.loads(pickle.dumps(model))
    copy.deepcopy(model)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    monitor.close()
    assert vars(Net)["forward"] is own


@pytest.mark.smoke
def test_inputs_are_let_go(watched: Callable[..., Any]) -> None:
    """A small batch's memory is held for a replay until the next step is over, no longer; the batch itself is not."""
    model, optimizer, monitor = watched(Net())
    x = torch.randn(5, 4)
    ref, memory = weakref.ref(x), x.untyped_storage()._weak_ref()
    model(x).sum().backward()
    optimizer.step()
    del x
    assert ref() is None
    for held in (True, False):
        assert torch.UntypedStorage._expired(memory) is not held
        model(torch.randn(5, 4)).sum().backward()
        optimizer.step()
        gc.collect()
    assert monitor.findings == []


@pytest.mark.smoke
def test_compiled_models_are_not_hooked(watched: Callable[..., Any]) -> None:
    """Under torch.compile only the model's own result is looked at; nothing is compiled again."""
    from torch._dynamo.testing import CompileCounter

    counter = CompileCounter()
    model, optimizer, monitor = watched(Net())
    compiled = torch.compile(model, backend=counter)
    train(compiled, optimizer, steps=4)
    assert counter.frame_count == 1
    assert monitor.findings == []
    torch._dynamo.reset()


# --- what is read later, from a device --------------------------------------------------------------------------------


def test_ranges_that_are_read_later() -> None:
    """What a device has measured is judged by the same measure: kinds, inputs, nearness to the limit."""

    def pending(name: str, role: str, low: float, high: float, dtype: str = "float32") -> tuple[Any, ...]:
        entry = {"module": name, "call": 0, "micro_batch": 0, "order": 1, "output": 0, "dtype": dtype, "shape": (2,)}
        return {**entry, "class_name": "Log", "role": role}, torch.tensor(low), torch.tensor(high)

    read = modules._later(
        [
            pending("a", "output", -1.0, 1.0),
            pending("b", "input", -4.0, INF),
            pending("b", "output", NAN, NAN),
            pending("c", "input", -2.0, 5.0),
            pending("c", "output", -INF, 3.0),
            pending("d", "output", -1.0, 6e4, "float16"),
        ]
    )
    first, second, near = read()
    assert isinstance(first, ModuleCall)
    assert isinstance(second, ModuleCall)
    assert (first.module, first.kinds, first.input_nonfinite) == ("b", ("NaN",), True)
    assert (second.module, second.kinds, second.input_range) == ("c", ("-Inf",), (-2.0, 5.0))
    assert near == NearLimit(module="d", dtype="float16", largest=6e4, limit=65504.0)


def test_a_step_that_is_judged_later() -> None:
    """The flags and the detail of a step on a device say the same as on the CPU."""
    looks = Looks(later_outputs=[(torch.tensor(NAN), torch.tensor(NAN))])
    looks.later_entries.append((torch.tensor(-1.0), torch.tensor(2.0)))
    looks.later_inputs.append(lambda: [BadInput(argument="x", dtype="float32", kinds=("NaN",))])
    bad = ModuleCall(module="a", class_name="Log", dtype="float32", kinds=("NaN",))
    looks.later.append(lambda: [bad, NearLimit(module="b", dtype="float16", largest=6e4, limit=65504.0)])
    looks.loss = NonfiniteLoss(value=NAN, backward="train.py:3")
    record = StepRecord(0, 3, Flag(0), SinceLastStep(), checked=True, names=["w", "v"], ids=[1, 2], slots={1: 0, 2: 1})
    record.since.parts[Losses].given.append(lambda: INF)
    record.parts[GradientDigests] = GradientDigests(
        names=record.names, local=lambda: [1.0, INF], summed=[0, 1], unsummed=frozenset({0, 1})
    )
    flags = complete(record, looks)()
    assert flags == Flag.FORWARD_NONFINITE | Flag.INPUT_NONFINITE | Flag.NEAR_OVERFLOW
    detail = record.parts[Judgement].detail
    assert detail.loss == replace(looks.loss, value=INF)
    assert (detail.output_finite, detail.local) == (False, ("v",))
    assert detail.entry == EntryGradient(finite=True, range=(-1.0, 2.0))
    assert (detail.forward, detail.near[0].module) == ((bad,), "b")
