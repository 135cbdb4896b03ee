"""A replay names the operation; in a copy of the process it leaves no trace."""

from __future__ import annotations

import copy
import inspect
import random
from collections import Counter, deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from ddpdebug.forensics.replay.replay import Trace, replay
from ddpdebug.isolation.child import Children
from ddpdebug.isolation.guard import Guard
from ddpdebug.nested import tensors_in
from ddpdebug.probes.forward_capture import ForwardCapture, ForwardCaptures

GUARD = Guard(lambda part, message: pytest.fail(f"{part}: {message}"))


def _line(function: Any, text: str) -> str:
    """Return `file:line` of the line of a function that contains `text`."""
    lines, first = inspect.getsourcelines(function)
    (found,) = [first + i for i, line in enumerate(lines) if text in line]
    return f"tests/forensics/test_replay.py:{found}"


def _capture(
    model: nn.Module,
    *args: Any,
    loss: Callable[[Any], torch.Tensor] | None = lambda output: output.float().sum(),
    **kwargs: Any,
) -> ForwardCapture:
    """Run a forward, and backward, as a training step does, and return what was kept of it."""
    captures = ForwardCaptures(GUARD)
    captures.begin(model, args, kwargs, 0)
    output = model(*args, **kwargs)
    captures.end(model, output)
    if loss is not None:
        loss(output).backward()
    (capture,) = captures.current
    capture.module = lambda: model  # it would be gone at the end of many tests
    return capture


def _found(model: nn.Module, *args: Any, **kwargs: Any) -> Trace:
    torch.manual_seed(0)
    trace = replay(_capture(model, *args, **kwargs))
    assert trace.complete, trace.reason
    return trace


class LogZero(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        return self.score(x * 0)

    def score(self, x: torch.Tensor) -> torch.Tensor:
        return torch.log(x)


def test_log_of_zero() -> None:
    """The operation is named with its line, its module, its operands and what ran before it."""
    trace = _found(LogZero(), torch.randn(3, 4))
    culprit = trace.culprit
    assert culprit is not None
    assert (culprit.kind, culprit.name, culprit.phase, culprit.value) == ("op", "aten.log.default", "forward", "inf")
    assert (culprit.module, culprit.module_class) == ("", "LogZero")
    assert culprit.operands[0]["zeros"] == 12
    assert culprit.operands[0]["shape"] == [3, 4]
    assert trace.location == _line(LogZero.score, "torch.log")
    assert [call["module"] for call in trace.calls] == ["layers.0", "layers.1"]
    assert trace.called_at is not None
    assert trace.called_at.startswith("tests/forensics/test_replay.py:")


class SqrtBackward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        nn.init.zeros_(self.inner.weight)
        nn.init.zeros_(self.inner.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        length = torch.sqrt(self.inner(x).pow(2).sum(-1))
        return length + 1


def test_sqrt_backward() -> None:
    """What goes wrong only in backward is named by its node and by the line of the forward that made the node."""
    trace = _found(SqrtBackward(), torch.randn(3, 4))
    culprit = trace.culprit
    assert culprit is not None
    assert (culprit.phase, culprit.node, culprit.forward_op) == ("backward", "SqrtBackward0", "aten.sqrt.default")
    assert trace.location == _line(SqrtBackward.forward, "torch.sqrt")
    assert trace.backward


class WhereTrap(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x * self.scale
        inverse = y.log()
        return torch.where(y > 0, inverse, torch.zeros(()))


def test_where_trap() -> None:
    """A branch that `where` did not take is found through its backward."""
    trace = _found(WhereTrap(), torch.tensor([0.0, 1.0, 2.0, 3.0]))
    culprit = trace.culprit
    assert culprit is not None
    assert (culprit.phase, culprit.node) == ("backward", "LogBackward0")
    assert trace.location == _line(WhereTrap.forward, "y.log()")
    assert [origin.name for origin in trace.masked] == ["aten.log.default"]


class MaskedMean(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, *, mask: torch.Tensor) -> dict[str, torch.Tensor]:
        h = self.inner(x)
        return {"hidden": h, "mean": (h * mask).sum() / mask.sum()}


def test_zero_by_zero() -> None:
    """A mean over nothing is named, also in a dict and with a keyword argument."""
    trace = _found(MaskedMean(), torch.randn(3, 4), mask=torch.zeros(3, 4), loss=lambda o: o["mean"])
    assert trace.culprit is not None
    assert (trace.culprit.name, trace.culprit.value) == ("aten.div.Tensor", "nan")
    assert trace.location == _line(MaskedMean.forward, "mask.sum()}")


class Attention(nn.Module):
    def __init__(self, size: float = 1.0) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(8, 8), nn.Linear(8, 8)
        self.size = size

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        logits = self.query(x * self.size) @ self.key(x * self.size).transpose(-1, -2)
        if mask is not None:
            logits = logits.masked_fill(~mask, float("-inf"))
        return logits.softmax(-1) @ x


def test_overflow_under_autocast() -> None:
    """An overflow in half precision is found under the autocast of the first time, and said to become NaN later."""
    model = Attention(1000.0)
    with torch.autocast("cpu", dtype=torch.float16):
        capture = _capture(model, torch.randn(2, 3, 8))
    trace = replay(capture)
    culprit = trace.culprit
    assert culprit is not None
    assert (culprit.name, culprit.value) == ("aten.bmm.default", "inf")
    assert {operand["dtype"] for operand in culprit.operands} == {"float16"}
    assert trace.location == _line(Attention.forward, "logits = self.query")
    assert "softmax" in str(culprit.became_nan)
    assert not torch.is_autocast_enabled("cpu")
    without = replay(capture, autocast=False)
    assert (without.complete, without.reproduced) == (True, False)


def test_mask_is_no_culprit() -> None:
    """Infinities that were written down are no finding while softmax can cope with them."""
    mask = torch.ones(3, 3).tril().bool()
    trace = _found(Attention(), torch.randn(2, 3, 8), mask)
    assert not trace.reproduced
    assert trace.masked == []
    assert "not reproduced" in trace.notes[-1]


def test_all_masked_row() -> None:
    """A row with nothing but -inf makes softmax the culprit, and the evidence says where the -inf was written."""
    mask = torch.ones(3, 3).bool()
    mask[1] = False
    trace = _found(Attention(), torch.randn(2, 3, 8), mask)
    culprit = trace.culprit
    assert culprit is not None
    assert culprit.name == "aten._softmax.default"
    assert trace.location == _line(Attention.forward, "logits.softmax")
    assert culprit.made_of is not None
    assert culprit.made_of.kind == "literal"
    assert "masked_fill" in culprit.made_of.name


class WrongBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clamp(min=0)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient / gradient.new_zeros(())


class UsesWrongBackward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return WrongBackward.apply(self.inner(x))


def test_custom_function() -> None:
    """A custom Function's wrong backward is named by its own line."""
    trace = _found(UsesWrongBackward(), torch.randn(3, 4))
    assert trace.culprit is not None
    assert (trace.culprit.name, trace.culprit.node) == ("aten.div.Tensor", "WrongBackwardBackward")
    assert trace.location == _line(WrongBackward.backward, "new_zeros")


def test_parameter_was_bad() -> None:
    """A parameter that was NaN before is the culprit, not the operation that reads it."""
    model = nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 4))
    with torch.no_grad():
        model[0].weight[3] = torch.nan
    trace = _found(model, torch.tensor([1, 3]))
    assert trace.culprit is not None
    assert (trace.culprit.kind, trace.culprit.name) == ("parameter", "0.weight")
    clean = _found(model, torch.tensor([1, 2]))
    assert not clean.reproduced


def test_input_was_bad() -> None:
    """A NaN in the batch is named by its argument."""
    x = torch.randn(3, 4)
    x[1, 2] = torch.nan
    trace = _found(nn.Linear(4, 4), x)
    assert trace.culprit is not None
    assert (trace.culprit.kind, trace.culprit.name) == ("input", "args[0]")


def test_bad_output_gradient() -> None:
    """When the gradient that enters the model is bad already, the loss did it."""
    trace = _found(nn.Linear(4, 4), torch.randn(3, 4), loss=lambda o: (o.sum() * 0).sqrt())
    assert trace.culprit is not None
    assert (trace.culprit.kind, trace.culprit.name) == ("output-gradient", "output 0")


def test_uninitialised_memory() -> None:
    """Memory that is allocated and then written is no culprit."""

    class Writes(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            buffer = torch.empty(3, 4)
            buffer.untyped_storage().fill_(255)  # every element is NaN now
            kept = torch.empty_like(buffer)
            torch.mul(x, 2, out=kept)
            return super().forward(kept + buffer.fill_(1))

    assert not _found(Writes(4, 4), torch.randn(3, 4)).reproduced


class Dropped(nn.Module):
    """Draws from every global generator."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = torch.rand(4) < 0.5
        kept = random.random() + float(np.random.rand())  # noqa: NPY002 - the global generator is what users draw from
        Dropped.drawn.append((mask.tolist(), kept))
        return self.inner(x)[:, mask] * kept

    drawn: list[Any] = []  # noqa: RUF012 - seen from outside of the module


def test_same_random_numbers() -> None:
    """All global generators start where they started the first time."""
    Dropped.drawn.clear()
    np.random.seed(5)  # noqa: NPY002 - as above
    capture = _capture(Dropped(), torch.randn(3, 4))
    torch.rand(7)
    random.random()
    np.random.rand(3)  # noqa: NPY002 - as above
    assert replay(capture).complete
    assert Dropped.drawn[0] == Dropped.drawn[1]


class Everything(nn.Module):
    """Changes all that a forward can change."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.utils.spectral_norm(nn.Linear(4, 4))
        self.norm = nn.BatchNorm1d(4)
        self.own = nn.Linear(4, 4)
        self.register_buffer("seen", torch.zeros(4))
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))
        self.codes = nn.Parameter(torch.ones(4))
        self.generator = torch.Generator().manual_seed(3)
        self.calls, self.history, self.table = 0, [], {"a": 1}
        self.nested: dict[str, Any] = {"log": [deque([1, 2], maxlen=2)], "count": Counter(a=3)}
        self.last: torch.Tensor | None = None

    def forward(self, x: torch.Tensor, scratch: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.history.append(self.calls)
        self.table["b"] = self.calls
        self.nested["log"][0].append(self.calls)
        self.nested["log"].append(self.calls)
        self.nested["count"].update("ab")
        self.steps += 1
        h = functional.dropout(self.norm(self.own(self.inner(x))))
        self.seen = self.seen * 0.9 + h.detach().mean(0) * 0.1
        self.last = h
        scratch.add_(1)
        with torch.no_grad():
            self.codes.mul_(1.5)
        noise = torch.rand(4, generator=self.generator) + random.random()
        return torch.log(h.abs() * 0) + noise * self.codes


def _state(model: Everything, *tensors: torch.Tensor) -> list[Any]:
    named = [*model.named_parameters(), *model.named_buffers(), *enumerate(tensors)]
    return [
        [(n, id(t), t._version, t.detach().numpy().tobytes(), t.requires_grad) for n, t in named],
        [
            (n, None if p.grad is None else (id(p.grad), p.grad._version, p.grad.numpy().tobytes()))
            for n, p in model.named_parameters()
        ],
        [(n, m.training, len(m._forward_hooks), len(m._forward_pre_hooks)) for n, m in model.named_modules()],
        torch.get_rng_state().tolist(),
        model.generator.get_state().tolist(),
        random.getstate(),
        str(np.random.get_state()),  # noqa: NPY002 - as above
        (
            model.calls,
            list(model.history),
            dict(model.table),
            repr(model.nested),
            id(model.last),
            torch.is_grad_enabled(),
        ),
        {name: id(value) for name, value in vars(model).items()},
        (torch.is_autocast_enabled("cpu"), torch.is_anomaly_enabled(), torch.get_num_threads()),
    ]


def test_nothing_is_changed() -> None:
    """A copy of the process changes nothing of the job: values, counters, generators, attributes; it finds the same."""
    model = Everything()
    x, scratch = torch.randn(3, 4, requires_grad=True), torch.zeros(3)
    capture = _capture(model, x, scratch, loss=lambda o: o.nan_to_num().sum())
    before = _state(model, x, scratch)
    children, found = Children(GUARD), []
    assert children.run("test", lambda: replay(capture).to_json(), 60, lambda *told: found.append(told)) is None
    children.finish(60)
    ((answer, reason),) = found
    assert reason is None
    assert answer["culprit"]["name"] == "aten.log.default"
    assert _state(model, x, scratch) == before


def test_buffers_of_the_first_time() -> None:
    """The replay starts with the statistics from before the forward, although they have changed since."""

    class Drifts(nn.BatchNorm1d):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            assert self.num_batches_tracked is not None
            seen.append(self.num_batches_tracked.item())
            return torch.log(super().forward(x) * 0)

    seen: list[float] = []
    model = Drifts(4)
    capture = _capture(model, torch.randn(3, 4))
    model(torch.randn(3, 4))
    assert replay(capture).reproduced
    assert seen == [0, 1, 0]


class Checkpointed(nn.Module):
    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), SqrtBackward()
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.second, self.first(x), use_reentrant=self.reentrant) * 2


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing(reentrant: bool) -> None:
    """A fault in the backward of a checkpointed part is found, without touching gradients."""
    model = Checkpointed(reentrant=reentrant)
    capture = _capture(model, torch.randn(3, 4))
    own = list(model.parameters())
    before = [None if p.grad is None else p.grad.clone() for p in own]
    fired: list[int] = []
    for parameter in own:
        parameter.register_post_accumulate_grad_hook(lambda _: fired.append(1))
    guard = Guard(lambda part, message: None)
    trace = replay(capture, guard=guard)
    assert trace.complete, trace.reason
    assert trace.culprit is not None
    assert (trace.culprit.phase, trace.culprit.node) == ("backward", "SqrtBackward0")
    assert trace.location == _line(SqrtBackward.forward, "torch.sqrt")
    assert trace.culprit.module == "second"
    assert fired == []
    assert not guard.quiet
    for value, parameter in zip(before, own, strict=True):
        assert value is None or (
            parameter.grad is not None and torch.equal(value, parameter.grad) | value.isnan().any()
        )


def test_module_called_twice() -> None:
    """A module that is used several times is named with the number of the call."""

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.shared = WhereTrap()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            first = self.shared(x + 1)
            return self.shared.forward(first) + self.shared(x) + 1 / (first * 0)

    trace = _found(Twice(), torch.tensor([0.0, 1.0, 2.0, 3.0]))
    assert trace.culprit is not None
    assert (trace.culprit.name, trace.culprit.module) == ("aten.reciprocal.default", "")
    assert [(call["module"], call["call"]) for call in trace.calls] == [("shared", 1), ("shared", 2)]


def test_several_outputs() -> None:
    """Of outputs that depend on each other, each recorded gradient is used once."""

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), SqrtBackward()

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            h = self.a(x)
            return h, self.b(h)

    trace = _found(Both(), torch.randn(3, 4), loss=lambda o: o[0].sum() + o[1].sum())
    assert trace.culprit is not None
    assert trace.culprit.node == "SqrtBackward0"


def test_refuses_collectives(tmp_path: Any) -> None:
    """A forward that communicates ends the replay before anything is sent, even where exceptions are swallowed."""

    class Talks(nn.Linear):
        sent = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = super().forward(x)
            try:
                dist.all_reduce(x.detach())
                type(self).sent += 1
            except Exception:  # noqa: BLE001 - a user's, on purpose
                x = x * 2
            return x

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        capture = _capture(Talks(4, 4), torch.randn(3, 4))
        trace = replay(capture)
        assert Talks.sent == 1
        wrapped = nn.Sequential(nn.parallel.DistributedDataParallel(nn.Linear(4, 4)))
        refused = replay(_capture(wrapped, torch.randn(3, 4), loss=None))
        del wrapped
    finally:
        dist.destroy_process_group()
    assert not trace.complete
    assert "communicates (c10d.allreduce_" in str(trace.reason)
    assert not refused.complete
    assert "0 is a DistributedDataParallel" in str(refused.reason)


def test_refuses_synchronised_statistics(monkeypatch: pytest.MonkeyPatch) -> None:
    """SyncBatchNorm in training over several ranks is refused with its name; in eval mode it does not communicate."""
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda group=None: 2)
    model = nn.Sequential(nn.Linear(4, 4), nn.SyncBatchNorm(4).eval())
    capture = _capture(model, torch.randn(3, 4))
    assert replay(capture).complete
    capture.read_modes = lambda: bytes([1, 1, 1])
    assert str(replay(capture).reason).startswith("1 is a SyncBatchNorm in training")


def test_refuses_torchscript() -> None:
    """What has no Python lines is refused."""
    capture = _capture(nn.Sequential(torch.jit.trace(nn.Linear(4, 4), torch.randn(3, 4))), torch.randn(3, 4))
    assert str(replay(capture).reason).startswith("0 is TorchScript")


def test_computing_hooks_run() -> None:
    """Hooks that are part of the computation run."""
    model = nn.utils.weight_norm(nn.Linear(4, 4))
    with torch.no_grad():
        model.weight_v.zero_()
    trace = replay(_capture(model, torch.randn(3, 4)))
    assert trace.culprit is not None
    assert "_weight_norm_interface" in trace.culprit.name


_MODULES: dict[str, Callable[[], tuple[nn.Module, torch.Tensor]]] = {
    "lstm": lambda: (nn.LSTM(4, 4, num_layers=2, dropout=0.5), torch.randn(3, 2, 4)),
    "embedding with a largest norm": lambda: (nn.Embedding(8, 4, max_norm=0.1), torch.tensor([[1, 2], [3, 3]])),
    "attention": lambda: (nn.TransformerEncoderLayer(4, 2, 8), torch.randn(3, 2, 4)),
    "instance norm": lambda: (nn.InstanceNorm1d(4, affine=True, track_running_stats=True), torch.randn(3, 4, 5)),
    "batch norm": lambda: (nn.BatchNorm2d(4, momentum=None), torch.randn(3, 4, 5, 5).requires_grad_()),
    "spectral norm": lambda: (nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4)), torch.randn(3, 4)),
    "weight norm": lambda: (nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)), torch.randn(3, 4)),
    "shared": lambda: (nn.Sequential(*[nn.Linear(4, 4)] * 2, nn.RReLU(inplace=True)), torch.randn(3, 4)),
    "half": lambda: (nn.Sequential(nn.Linear(4, 4), nn.GELU()).bfloat16(), torch.randn(3, 4).bfloat16()),
    "complex": lambda: (nn.Linear(4, 4, dtype=torch.complex64), torch.randn(3, 4, dtype=torch.complex64)),
}


@pytest.mark.parametrize("case", _MODULES)
def test_torch_modules(case: str) -> None:
    """Torch's own modules run again on what they had, and are finite."""
    torch.manual_seed(0)
    model, x = _MODULES[case]()
    capture = _capture(model, x, loss=lambda o: sum(abs(t).float().sum() for t in tensors_in(o)))
    trace = replay(capture)
    assert trace.complete, trace.reason
    assert not trace.reproduced
    assert trace.backward


def test_inputs_written_since() -> None:
    """Inputs that were changed after the forward are named, and a fault that is gone is not reproduced."""
    x = torch.zeros(3, 4)
    model = WhereTrap()
    capture = _capture(model, x)
    x += 1
    trace = replay(capture)
    assert (trace.complete, trace.reproduced) == (True, False)
    assert "written in place since the forward: args[0]" in trace.notes


def test_out_of_time() -> None:
    """The time is bounded, and what was seen until then is kept."""
    capture = _capture(LogZero(), torch.randn(3, 4))
    trace = replay(capture, seconds=-1)
    assert not trace.complete
    assert "out of time" in str(trace.reason)


def test_model_that_raises() -> None:
    """What the model raises becomes the reason."""

    class Fails(nn.Linear):
        fail = False

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if Fails.fail:
                raise RuntimeError("no second time")
            return super().forward(x)

    capture = _capture(Fails(4, 4), torch.randn(3, 4))
    Fails.fail = True
    trace = replay(capture)
    assert (trace.complete, trace.reason) == (False, "RuntimeError: no second time")


def test_compiled_modules_run_uncompiled() -> None:
    """Of a compiled module the original runs, and the trace says so."""
    compiled = torch.compile(LogZero(), backend="eager")
    capture = _capture(copy.copy(compiled)._orig_mod, torch.randn(3, 4))
    capture.module = lambda: compiled
    trace = replay(capture)
    assert trace.reproduced
    assert any("torch.compile" in note for note in trace.notes)


def test_gone_model() -> None:
    """A capture does not keep its model alive."""
    captures = ForwardCaptures(GUARD)
    captures.begin(nn.Linear(4, 4), (torch.randn(3, 4),), {}, 0)
    assert replay(captures.current[0]).reason == "the model is gone"
