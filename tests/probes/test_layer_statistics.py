"""Per-layer statistics: what is taken, of which steps, and that it is bounded and disturbs nothing."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from ddpdebug.isolation.guard import Guard
from ddpdebug.probes.entries import entries_of
from ddpdebug.probes.layer_statistics import (
    MAX_CALLS,
    MAX_ELEMENTS,
    MAX_PARAMETERS,
    Layers,
    LayerSamples,
    _std_mean,
    is_due,
)
from ddpdebug.probes.optimizers import OptimizerWatch
from ddpdebug.probes.record import SinceLastStep, StepRecord, encode_row
from ddpdebug.probes.step_digests import GradientDigests
from ddpdebug.schema.row import Flag, decode
from ddpdebug.schema.wire import to_json


class Net(nn.Module):
    """A network with activations as modules and as functions."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(4, 6), nn.Linear(6, 6), nn.Linear(6, 2)
        self.gate = nn.Sigmoid()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Use both kinds."""
        found: torch.Tensor = self.third(self.gate(self.second(torch.relu(self.first(x)))))
        return found


GUARD = Guard(lambda part, message: pytest.fail(f"{part}: {message}"))


def watch_of(optimizer: torch.optim.Optimizer, net: nn.Module) -> OptimizerWatch:
    """The watch of an optimizer whose model is known."""
    entries = entries_of(Guard(lambda part, message: pytest.fail(f"{part}: {message}")))
    entries.built.module(net)
    watch = OptimizerWatch(optimizer, 0, entries)
    watch.refresh([])
    return watch


def sample(net: nn.Module, layers: Layers, x: torch.Tensor, *, step: int = 0, lr: float = 0.1) -> StepRecord:
    """Train one step under the probe, as the recorder does."""
    since = SinceLastStep(number=step)
    assert layers.begin(since, net) is layers.sampling
    hook = torch.nn.modules.module.register_module_forward_hook(layers.look)
    output = net(x)
    hook.remove()
    layers.end(net, "", output)
    optimizer = torch.optim.SGD(net.parameters(), lr=lr)
    functional.mse_loss(output, torch.ones_like(output)).backward()
    watch = watch_of(optimizer, net)
    record = StepRecord(0, step, Flag(0), since, checked=True)
    record.names, record.owned = watch.names, watch.owned
    record.ids, record.slots = [id(p) for p in watch.params], watch.slots
    layers.before(watch, record)
    optimizer.step()
    layers.after(watch, record.parts.get(LayerSamples))
    return record


def detail(record: StepRecord) -> dict[str, Any]:
    """Return the JSON of the answer to a request."""
    found: dict[str, Any] = to_json(record.parts[LayerSamples].detail(record.parts[GradientDigests].norms(), {}))
    return found


def test_samples_grow_rare() -> None:
    """Often at first, then one of 64 checked steps; never none."""
    due = [count for count in range(2000) if is_due(count)]
    assert due[:12] == [0, 1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14]
    assert [b - a for a, b in pairwise(due)][-5:] == [64] * 5
    assert sum(count < 80 for count in due) < 25


def test_activations_of_modules_and_functions_are_described() -> None:
    """Kind, spread and dead units; the last layer's output is not hidden."""
    torch.manual_seed(0)
    net = Net()
    with torch.no_grad():
        net.first.bias[:3] = -100.0
    found = detail(sample(net, Layers(), torch.randn(32, 4)))["modules"]
    relu = found["second (input)"]
    assert relu["kind"] == "relu"
    assert relu["hidden"]
    assert relu["zero_units"] == 0.5
    assert relu["inputs"] == 32
    assert 0.5 <= relu["zero"] < 1
    assert found["gate"]["kind"] == "sigmoid"
    assert found["gate"]["saturated"] == 0.0
    assert found["gate"]["hidden"]
    assert not found["third"]["hidden"]
    assert found["first"]["class"] == "Linear"
    assert found["first"]["std"] == pytest.approx(float(net.first.weight.new_tensor(found["first"]["std"])))


def test_updates_are_measured() -> None:
    """The norm of the change over the step, of every parameter and of all, and the order of the layers."""
    torch.manual_seed(0)
    net = Net()
    before = {name: p.detach().clone() for name, p in net.named_parameters()}
    record = sample(net, Layers(), torch.randn(32, 4))
    table = detail(record)["parameters"]
    for name, parameter in net.named_parameters():
        assert table[name]["update"] == pytest.approx(float((parameter.detach() - before[name]).norm()), rel=1e-3)
        assert table[name]["norm"] == pytest.approx(float(before[name].norm()), rel=1e-3)
        assert table[name]["lr"] == 0.1
    row = decode(encode_row(record, 0, GUARD))
    change = sum(float((p.detach() - before[n]).square().sum()) for n, p in net.named_parameters()) ** 0.5
    assert row.update_norm == pytest.approx(change, rel=1e-3)
    assert row.param_norm > 0


def test_units_that_fired_once_are_alive() -> None:
    """A unit is dead only if none of the last samples made it fire."""
    layers, net = Layers(), nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 1))
    with torch.no_grad():
        net[0].weight.copy_(torch.tensor([[1.0, 0.0], [-1.0, 0.0]]))
        net[0].bias.zero_()
    right, left = torch.tensor([[1.0, 0.0]] * 4), torch.tensor([[-1.0, 0.0]] * 4)
    shares = []
    for step, x in enumerate((right, left, right, right, right, right)):
        shares.append(detail(sample(net, layers, x, step=step, lr=0.0))["modules"]["1"]["zero_units"])
    assert shares == [0.5, 0.0, 0.0, 0.0, 0.0, 0.5]


def test_equal_rows_are_noticed_in_the_first_sample() -> None:
    """Zeros are a way to initialise, other constants are not."""
    net = Net()
    nn.init.constant_(net.first.weight, 0.5)
    nn.init.zeros_(net.second.weight)
    table = detail(sample(net, Layers(), torch.randn(8, 4)))["parameters"]
    assert [table[f"{n}.weight"]["symmetric"] for n in ("first", "second", "third")] == [True, False, False]


def test_everything_is_bounded() -> None:
    """A deep and wide model yields so many entries, from everywhere in its depth."""
    net = nn.Sequential(*[nn.Linear(3, 3) for _ in range(300)], nn.Linear(3, 2 * MAX_ELEMENTS))
    answer = detail(sample(net, Layers(), torch.randn(4, 3)))
    assert MAX_CALLS // 2 < len(answer["modules"]) <= MAX_CALLS
    assert MAX_PARAMETERS // 2 < len(answer["parameters"]) <= MAX_PARAMETERS
    assert max(int(path) for path in answer["modules"]) > 250


def test_a_step_that_did_not_happen_has_no_update() -> None:
    """The row of a step that was kept from the optimizer is made all the same."""
    net, layers = Net(), Layers()
    record = sample(net, layers, torch.randn(8, 4))
    watch = watch_of(torch.optim.SGD(net.parameters(), lr=0.1), net)
    layers.begin(SinceLastStep(number=1), net)
    kept = StepRecord(0, 1, Flag(0), SinceLastStep(number=1), checked=True)
    layers.before(watch, kept)
    row = decode(encode_row(kept, 0, GUARD))
    assert row.update_norm != row.update_norm
    assert detail(kept)["parameters"] == {}
    assert detail(record)["parameters"]


def test_training_is_not_disturbed() -> None:
    """Parameters and random state are the same, bit for bit, with and without the probe."""
    results = []
    for watched in (True, False):
        torch.manual_seed(3)
        net, x = Net(), torch.randn(16, 4)
        if watched:
            sample(net, Layers(), x)
        else:
            optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
            functional.mse_loss(net(x), torch.ones(16, 2)).backward()
            optimizer.step()
        results.append([*(p.detach().clone() for p in net.parameters()), torch.get_rng_state()])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_deviation_and_mean_are_those_of_torch() -> None:
    """They are computed another way, which takes less; equal elements have no deviation at all."""
    values = torch.randn(3, 40, 8, generator=torch.Generator().manual_seed(1)) * 0.5 + 100.0
    std, mean = _std_mean(values.clone())
    torch.testing.assert_close((std, mean), torch.std_mean(values.double(), correction=0), check_dtype=False)
    assert float(_std_mean(torch.full((16, 1000), 0.1))[0]) == 0.0


def test_what_is_written_in_place_later_was_seen_as_it_was() -> None:
    """The statistics are computed at the end of the forward, of copies made as the modules returned."""
    net = nn.Sequential(nn.Linear(4, 6), nn.ReLU(inplace=True), nn.Linear(6, 2))
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(2))
    expected = net[0](x).detach().mean()
    found = detail(sample(net, Layers(), x))["modules"]
    assert found["0"]["mean"] == pytest.approx(float(expected), rel=1e-4)
    assert found["1 (input)"]["zero"] > 0


def test_a_hidden_activation_is_hidden_wherever_it_lay() -> None:
    """Its memory may have been used again for the output, which is told apart from the output itself."""
    net, layers = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)), Layers()
    assert layers.begin(SinceLastStep(), net)
    memory = bytearray(4 * 64 * 64)
    hidden = torch.frombuffer(memory, dtype=torch.float32).view(64, 64)
    layers.look(net[0], (), hidden)
    del hidden
    output = torch.frombuffer(memory, dtype=torch.float32).view(64, 64)  # at the same address
    layers.look(net[1], (), output)
    layers.end(net, "", output)
    notes = layers._notes
    assert [(call["path"], call["hidden"]) for call in notes.calls] == [("0", True), ("1", False)]


class Attending(nn.Module):
    """Attention as people write it, whose weights no module returns, and probabilities at the end."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale, self.qk, self.out = scale, nn.Linear(4, 8), nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Weigh the inputs."""
        q, k = self.qk(x).chunk(2, -1)
        weights = torch.softmax(self.scale * q @ k.transpose(-2, -1), -1)
        found: torch.Tensor = self.out((weights @ x).mean(1)).softmax(-1)
        return found


@pytest.mark.parametrize(("scale", "ended"), [(1e6, True), (0.1, False)])
def test_the_weights_of_a_softmax_in_the_code_of_a_module_are_described(scale: float, ended: bool) -> None:
    """Only of one that weighs something: the one at the end makes the output."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Identity(), Attending(scale))
    found = detail(sample(net, Layers(), torch.randn(16, 6, 4)))["modules"]
    weights = {path: about for path, about in found.items() if about["role"] == "weights"}
    assert list(weights) == ["1 (softmax)"]
    assert (weights["1 (softmax)"]["saturated"] > 0.8) is ended
    assert weights["1 (softmax)"]["hidden"]


class Linked(nn.Module):
    """Attention along the links of a graph; most nodes have none but to themselves."""

    def __init__(self, scale: float, how: str, temperature: float) -> None:
        super().__init__()
        self.scale, self.how, self.temperature = scale, how, temperature
        self.qk, self.out = nn.Linear(4, 8), nn.Linear(4, 3)
        self.register_buffer("linked", torch.eye(12, dtype=torch.bool))
        self.linked[:3] = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Weigh what nodes are linked to."""
        q, k = self.qk(x).chunk(2, -1)
        scores = self.scale * q @ k.transpose(-2, -1)
        if self.how == "where":
            scores = torch.where(self.linked, scores, torch.full_like(scores, -9e15))
        elif self.how == "masked_fill":
            scores = scores.masked_fill(~self.linked, -torch.inf)
        found: torch.Tensor = self.out((scores / self.temperature).softmax(-1) @ x)
        return found


@pytest.mark.parametrize("how", ["where", "masked_fill", "no mask"])
@pytest.mark.parametrize(("scale", "ended"), [(1e6, True), (0.1, False)])
def test_a_row_of_one_entry_is_not_saturated(how: str, scale: float, ended: bool) -> None:
    """Nothing is left to choose where a mask leaves one."""
    torch.manual_seed(0)
    found = detail(sample(Linked(scale, how, 2.0), Layers(), torch.randn(16, 12, 4)))["modules"]
    shares = [about["saturated"] for about in found.values() if about["role"] == "weights"]
    assert [share > 0.6 for share in shares] == [ended]


def test_a_low_temperature_is_one_on_purpose() -> None:
    """Scores that are divided by a number below 1 shall be sharp."""
    torch.manual_seed(0)
    found = detail(sample(Linked(1.0, "no mask", 1e-6), Layers(), torch.randn(16, 12, 4)))["modules"]
    assert not [about for about in found.values() if about["role"] == "weights"]


def test_what_a_bias_adds_is_no_difference_between_inputs() -> None:
    """Units that stand apart from each other, alike for all inputs, carry no signal."""
    torch.manual_seed(0)
    net = Net()
    nn.init.zeros_(net.second.weight)
    nn.init.normal_(net.second.bias)
    second = detail(sample(net, Layers(), torch.randn(32, 4)))["modules"]["second (call 1)"]
    assert second["std"] > 0.1
    assert second["spread"] == pytest.approx(0.0, abs=1e-6)
