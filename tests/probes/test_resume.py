"""Whether what was loaded, and what begins, belongs to one moment."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from ddpdebug.isolation.guard import Guard
from ddpdebug.probes.entries import entries_of
from ddpdebug.probes.training_events import CheckpointRead, EpochBegan, Loaded, ScalerSteps
from ddpdebug.probes.training_loop.resume import Resume
from ddpdebug.probes.training_loop.schedulers import Schedules
from ddpdebug.probes.training_loop.zero_grad import Clearing
from ddpdebug.schema.announcements import Restored

ENTRIES = entries_of(Guard(lambda part, message: pytest.fail(f"{part}: {message}")))


class Run:
    """A process that trains one model."""

    def __init__(self) -> None:
        self.told: list[Restored] = []
        self.schedules, self.clearing = Schedules(ENTRIES), Clearing()
        self.beside: list[nn.Module] = []
        self.resume = Resume(self.told.append, self.schedules, lambda: self.beside, self.clearing.writes)
        self.model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))

    def load(self, state: dict[str, torch.Tensor], part: nn.Module | None = None, *, strict: bool = False) -> None:
        """Load weights."""
        model = part or self.model
        result = model.load_state_dict(state, strict=strict)
        self.resume.loaded(Loaded(type(model).__name__, "train.py:3", model, result, state))

    def train(self, optimizer: torch.optim.Optimizer, steps: int = 3) -> None:
        """Take steps of an optimizer."""
        for _ in range(steps):
            self.resume.before_step(optimizer)
            self.schedules.before_step(optimizer, 1)
            dtype = next(self.model.parameters()).dtype
            self.model(torch.randn(5, 3, dtype=dtype)).square().mean().backward()
            optimizer.step()
            self.clearing.after_step(optimizer)

    def kinds(self) -> list[str]:
        """Return what was told, in order."""
        return [fact.kind for fact in self.told]


def adam(run: Run) -> torch.optim.Adam:
    """Make an optimizer for a run's model."""
    return torch.optim.Adam(run.model.parameters())


def test_names_that_differ_by_what_stands_before_them() -> None:
    """None has fitted, or some have not that would."""
    run = Run()
    own = run.model.state_dict()
    run.load({f"module.{name}": value for name, value in own.items()})
    run.load({})
    run.load({name if name.startswith("0.") else f"head.{name}": value for name, value in own.items()})
    assert run.told == []  # another load may follow
    run.train(adam(run))
    lacking = ("1.weight", "1.bias")
    assert [(fact.fitted, fact.names) for fact in run.told] == [(0, lacking), (0, lacking), (2, lacking)]


def test_a_load_that_is_tried_again_until_all_names_fit() -> None:
    """As a whole, or part by part."""
    run = Run()
    own = run.model.state_dict()
    run.load({f"module.{name}": value for name, value in own.items()})
    run.load(own)
    run.load({f"module.{name}": value for name, value in own.items()})
    for part in run.model:
        run.load(part.state_dict(), part)
    run.train(adam(run))
    assert run.kinds() == []


def test_a_load_that_leaves_a_part_out_by_choice() -> None:
    """A new head, an adapter alone, or all of it."""
    run = Run()
    own = run.model.state_dict()
    run.load({name: value for name, value in own.items() if name.startswith("0.")})
    run.load({**{name: value for name, value in own.items() if name.startswith("0.")}, "fc.weight": own["1.weight"]})
    run.load(own, strict=True)
    run.train(adam(run))
    assert run.kinds() == []


def test_weights_that_were_overwritten_before_the_first_step() -> None:
    """All of them; a part that is made anew is meant so."""

    def begin(change: Callable[[nn.Linear], object], steps: int = 0) -> list[str]:
        run = Run()
        before = adam(run)
        run.train(before, 1)
        run.load({name: value + 1 for name, value in run.model.state_dict().items()})
        run.train(before, steps)
        for module in run.model:
            assert isinstance(module, nn.Linear)
            change(module)
        run.train(torch.optim.SGD(run.model.parameters()))
        return run.kinds()

    assert begin(lambda module: module.reset_parameters()) == ["overwritten"]
    assert begin(lambda module: module.reset_parameters() if module.in_features == 4 else None) == []
    assert begin(lambda module: module.double()) == []
    assert begin(lambda module: None, steps=1) == []  # they were trained


def test_parameters_that_were_loaded_can_be_swapped() -> None:
    """Which a weak reference to a tensor would keep from working."""
    run = Run()
    run.load(run.model.state_dict())
    for p in run.model.parameters():
        torch.utils.swap_tensors(p, nn.Parameter(torch.zeros_like(p)))
    run.train(adam(run))
    assert run.kinds() == []


def test_an_optimizer_that_begins_under_a_schedule_that_goes_on() -> None:
    """Of those that keep a state; with it the run is one that goes on."""

    def begin(kind: type[torch.optim.Optimizer], *, restored: bool) -> list[str]:
        run, before = Run(), Run()
        old = kind(before.model.parameters(), lr=0.1)
        before.train(old)
        optimizer = kind(run.model.parameters(), lr=0.1)
        if restored:
            optimizer.load_state_dict(old.state_dict())
        schedule = lr_scheduler.StepLR(optimizer, 10)
        run.schedules.built(schedule)
        schedule.load_state_dict({**schedule.state_dict(), "last_epoch": 50})
        run.train(optimizer)
        return run.kinds()

    assert begin(torch.optim.Adam, restored=False) == ["optimizer"]
    assert begin(torch.optim.Adam, restored=True) == ["resumed"]
    assert begin(torch.optim.SGD, restored=False) == []


@pytest.mark.parametrize(
    ("epoch", "weights", "restored", "told"),
    [
        (4, True, False, ["optimizer"]),
        (4, True, True, ["resumed"]),
        (4, False, False, []),
        (1, True, False, []),  # fine-tuning that counts epochs from 1
    ],
)
def test_an_optimizer_that_begins_in_a_later_epoch(epoch: int, weights: bool, restored: bool, told: list[str]) -> None:
    """With weights that were loaded the run goes on: moments are to be there as well."""
    run, before = Run(), Run()
    old = adam(before)
    before.train(old)
    if weights:
        run.load(before.model.state_dict())
    optimizer = adam(run)
    if restored:
        optimizer.load_state_dict(old.state_dict())
    data = TensorDataset(torch.zeros(8, 3))
    sampler = DistributedSampler(data, num_replicas=2, rank=0)
    for number in range(epoch, epoch + 2):
        sampler.set_epoch(number)
        run.resume.epoch_begins(EpochBegan(DataLoader(data, sampler=sampler)))
        run.train(optimizer)
    assert run.kinds() == told


def test_an_optimizer_that_is_made_again_and_again() -> None:
    """Of those that keep a state, and unless weights were loaded: rounds of averaging do that."""
    run = Run()
    for _ in range(3):
        run.train(adam(run))
    assert [(fact.kind, fact.calls, fact.steps) for fact in run.told] == [("rebuilt", 1, 3), ("rebuilt", 2, 3)]
    run.told.clear()
    for _ in range(3):
        run.load(run.model.state_dict())
        run.train(adam(run))
    for _ in range(3):
        run.train(torch.optim.SGD(run.model.parameters(), lr=0.1))
    assert run.kinds() == []


@pytest.mark.parametrize(
    ("builds", "wrong"),
    [
        ("alike", ()),
        ("in another order", ("1.bias", "1.weight", "0.bias", "0.weight")),
        ("for a wrapper", ()),
        ("bare", ()),
    ],
)
def test_an_optimizer_whose_parameters_are_in_another_order(builds: str, wrong: tuple[str, ...]) -> None:
    """Torch gives the first one the state of the first one; an optimizer that has no names says nothing."""
    run = Run()
    run.beside.append(run.model)
    named = list(run.model.named_parameters())
    before = torch.optim.Adam(named)
    run.train(before)
    state = before.state_dict()
    if builds == "in another order":
        named.reverse()
    elif builds == "for a wrapper":
        named = [(f"module.{name}", parameter) for name, parameter in named]
    after = torch.optim.Adam(run.model.parameters() if builds == "bare" else named)
    if builds == "bare":
        del state["param_groups"][0]["param_names"]
    after.load_state_dict(state)
    run.resume.loaded(Loaded("Adam", "train.py:7", after, None, state))
    assert [(fact.kind, fact.names) for fact in run.told] == ([("order", wrong)] if wrong else [])


@pytest.mark.parametrize(
    ("keeps", "told"), [("references", ["itself"]), ("copies", []), ("references, averaged", []), ("some", [])]
)
def test_a_load_of_what_the_model_has_anyway(keeps: str, told: list[str]) -> None:
    """References that have changed with the model; not where somebody has written them, or other weights are among."""
    run = Run()
    optimizer = adam(run)
    run.load(run.model.state_dict())  # before training it is harmless
    run.train(optimizer)
    kept = run.model.state_dict()
    if keeps != "references, averaged":
        run.train(optimizer)
    if keeps == "copies":
        kept = copy.deepcopy(kept)
    elif keeps == "some":
        kept["1.bias"] = torch.zeros(2)
    elif keeps == "references, averaged":  # over ranks, in place
        for value in kept.values():
            value.div_(2)
    run.load(kept)
    run.train(optimizer)
    assert run.kinds() == told


@pytest.mark.parametrize(
    ("case", "told"),
    [
        ("left out", ["average"]),
        ("loaded", []),
        ("loaded before", []),
        ("copied by hand", []),
        ("made afterwards", []),
        ("set to the model", []),
        ("a reference", []),
        ("a second model", []),
        ("in the middle of training", []),
    ],
)
def test_an_average_that_is_left_out_by_a_load(case: str, told: list[str]) -> None:
    """It follows from where it was made; one that is restored in any way does not."""
    run = Run()
    saved = {name: value + 1 for name, value in run.model.state_dict().items()}
    average = copy.deepcopy(run.model).requires_grad_(case == "a second model")
    run.beside = [run.model] if case == "made afterwards" else [run.model, average]
    if case == "loaded before":
        run.load(saved, average)
    params = [*run.model.parameters(), *(average.parameters() if case == "a second model" else ())]
    optimizer = torch.optim.SGD(params, lr=0.1, weight_decay=0.1)
    if case == "in the middle of training":
        run.train(optimizer)
    run.load(saved)
    if case == "loaded":
        run.load(saved, average)
    if case == "copied by hand":
        with torch.no_grad():
            for name, p in average.named_parameters():
                p.copy_(saved[name])
    run.beside = [run.model, average]
    for _ in range(6):
        run.train(optimizer, 1)
        with torch.no_grad():
            for mine, other in zip(average.parameters(), run.model.parameters(), strict=True):
                if case != "a reference":
                    mine.lerp_(other, 1.0 if case == "set to the model" else 0.1)
    assert run.kinds() == told


@pytest.mark.parametrize(("length", "told"), [(40, ["ended"]), (60, [])])
def test_a_schedule_that_is_over_as_training_begins(length: int, told: list[str]) -> None:
    """It was loaded from a run that came to its end."""
    run, before = Run(), Run()
    old = torch.optim.SGD(before.model.parameters(), lr=0.1)
    schedule = lr_scheduler.CosineAnnealingLR(old, length)
    for _ in range(40):
        old.step()
        schedule.step()
    optimizer = torch.optim.SGD(run.model.parameters(), lr=0.1)
    optimizer.load_state_dict(old.state_dict())
    new = lr_scheduler.CosineAnnealingLR(optimizer, 80)
    run.schedules.built(new)
    new.load_state_dict(schedule.state_dict())
    optimizer.load_state_dict(old.state_dict())
    run.train(optimizer)
    assert run.kinds() == told


@pytest.mark.parametrize("each", ["step", "optimizer", "run"])
def test_loss_scalers_that_begin_anew(each: str) -> None:
    """A new one for each step of one optimizer; one for each optimizer is its own."""
    run = Run()
    optimizer, scaler = adam(run), torch.amp.GradScaler("cpu")
    for _ in range(4):
        if each == "optimizer":
            run.model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
            optimizer = adam(run)
        if each != "run":
            scaler = torch.amp.GradScaler("cpu")
        run.resume.scaler_steps(ScalerSteps(scaler, optimizer))
    assert [(fact.class_name, fact.calls) for fact in run.told] == [
        ("GradScaler", n) for n in (1, 2, 3) if each == "step"
    ]


@pytest.mark.parametrize(
    ("make", "calls", "told"),
    [
        (lambda o: lr_scheduler.CosineAnnealingLR(o, 30), 10, [1, 2]),
        (lambda o: lr_scheduler.CosineAnnealingLR(o, 10), 10, []),  # cycles, each to its end
        (lambda o: lr_scheduler.LambdaLR(o, lambda n: 1 - n / 30), 10, [1, 2]),
        (lambda o: lr_scheduler.LambdaLR(o, lambda n: 1 - n / 10), 10, []),
        (lambda o: lr_scheduler.LambdaLR(o, lambda n: min(1.0, n / 4)), 10, []),  # a warm-up for each stage
    ],
)
def test_schedules_that_cut_one_another_short(
    make: Callable[[torch.optim.Optimizer], lr_scheduler.LRScheduler], calls: int, told: list[int]
) -> None:
    """Of one optimizer; of another one it is another run."""
    for same in (True, False):
        run = Run()
        optimizer = torch.optim.SGD(run.model.parameters(), lr=0.1)
        for _ in range(3):
            if not same:
                optimizer = torch.optim.SGD(run.model.parameters(), lr=0.1)
            schedule = make(optimizer)
            run.schedules.built(schedule)
            for _ in range(calls):
                run.train(optimizer, 1)
                run.schedules.called(schedule)
                schedule.step()
        run.train(optimizer, 1)
        assert [fact.calls for fact in run.told if fact.kind == "rebuilt"] == (told if same else [])


def _reads(run: Run, stored: Sequence[str], wanted: Sequence[str] = ("model.0.weight", "model.0.bias")) -> None:
    run.beside = [run.model]
    run.resume.read(CheckpointRead({*wanted}, {*stored}, "train.py:5"))


_STATE = [f"optim.state.{name}.{kind}" for name in ("0.weight", "0.bias") for kind in ("step", "exp_avg", "exp_avg_sq")]
_NAMES = ["model.0.weight", "model.0.bias"]


@pytest.mark.parametrize(
    ("stored", "wanted", "told"),
    [
        (_NAMES, _NAMES, []),
        ([*_NAMES, *_STATE], [*_NAMES, *_STATE], []),
        ([*_NAMES, *_STATE], _NAMES, ["left"]),
        (["model.module.0.weight", "model.module.0.bias"], _NAMES, ["names"]),
        (["other"], _NAMES, ["names"]),
        (["model.0.weight"], _NAMES, []),  # a new parameter
    ],
)
def test_what_a_distributed_checkpoint_has_and_what_is_read_of_it(
    stored: list[str], wanted: list[str], told: list[str]
) -> None:
    """Names that do not fit, and an optimizer's state that is left there."""
    run = Run()
    _reads(run, stored, wanted)
    run.train(adam(run))
    assert run.kinds() == told


def test_state_that_is_read_for_itself_or_is_of_another_optimizer() -> None:
    """And parameters that get their values in another way."""
    run = Run()
    _reads(run, [*_NAMES, *_STATE])
    _reads(run, [*_NAMES, *_STATE], _STATE)
    run.train(adam(run))
    run = Run()
    _reads(run, [*_NAMES, *_STATE])
    run.train(torch.optim.SGD(run.model.parameters(), momentum=0.9))
    _reads(run, ["other"])
    with torch.no_grad():
        run.model[0].weight.add_(1)
        run.model[0].bias.add_(1)
    run.train(adam(run))
    assert run.kinds() == []


def test_names_that_have_a_word_more() -> None:
    """Of the module; what the parameter is called counts as it is."""
    run = Run()
    run.model = nn.Sequential(OrderedDict(lm_head=nn.Linear(3, 4), body=nn.Linear(4, 2)))
    own = run.model.state_dict()
    run.load({name.removeprefix("lm_"): value for name, value in own.items()})
    run.train(adam(run))
    assert [fact.names for fact in run.told] == [("lm_head.weight", "lm_head.bias")]
