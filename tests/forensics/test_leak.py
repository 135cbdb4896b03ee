"""A model that sees the token it shall predict is told; one that does not, or sees it on purpose, is not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ddpdebug.detectors.rcp.rcp821_target_leak import TargetLeak
from ddpdebug.forensics import forward_trial, target_leak as leak, token_trial
from ddpdebug.forensics.replay.replay import replay
from ddpdebug.forensics.target_leak import Leaks
from ddpdebug.forensics.target_relation import is_moved_twice, relation
from ddpdebug.forensics.token_trial import look
from ddpdebug.isolation.child import Children
from ddpdebug.isolation.guard import Guard
from ddpdebug.probes.forward_capture import ForwardCapture, ForwardCaptures
from ddpdebug.schema.announcements import Announcement, TokenChange

GUARD = Guard(lambda part, message: pytest.fail(f"{part}: {message}"))

LENGTH = 10


class Model(nn.Module):
    """Embeds tokens, mixes positions as a test says, and predicts tokens."""

    def __init__(self, mix: Callable[[Tensor], Tensor], words: int = 12) -> None:
        super().__init__()
        self.words, self.mixer, self.head = nn.Embedding(words, 8), Mixer(mix), nn.Linear(8, words)
        self.norm, self.drop = nn.BatchNorm1d(LENGTH), nn.Dropout(0.3)

    def forward(self, text: Tensor, labels: Tensor | None = None) -> Any:
        return self.head(self.drop(self.norm(self.mixer(self.words(text)))))


class Mixer(nn.Module):
    def __init__(self, mix: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.mix = mix

    def forward(self, x: Tensor) -> Tensor:
        return self.mix(x)


def causal(x: Tensor) -> Tensor:
    return x.cumsum(1)


def everywhere(x: Tensor) -> Tensor:
    return x + x.roll(-1, 1)


def capture_of(model: nn.Module, *args: Any, **kwargs: Any) -> ForwardCapture:
    """Return what is kept of a training forward."""
    torch.manual_seed(3)
    captures = ForwardCaptures(GUARD)
    captures.begin(model, args, kwargs, 7)
    model(*args, **kwargs)
    return captures.current[-1]


def text(samples: int = 4, length: int = LENGTH) -> Tensor:
    return torch.randint(0, 12, (samples, length), generator=torch.Generator().manual_seed(1))


def told(model: nn.Module, tokens: Tensor, target: Tensor, *more: Any) -> TokenChange | None:
    """Return what is told of a model if the rule takes it for a leak."""
    capture = capture_of(model, tokens, *more)
    known = relation(capture, target, -100)
    fact = None if known is None else look(capture, known)
    return None if fact is None or TargetLeak().judge(fact) is None else fact


@pytest.mark.parametrize("order", ["inputs cut", "outputs cut", "labels given", "padded"])
def test_a_missing_mask_is_told(order: str) -> None:
    """Whichever way the targets are moved, the module that first mixes positions is named."""
    whole, more = text(length=LENGTH + 1), ()
    tokens, target = whole[:, :-1], whole[:, 1:]
    if order == "outputs cut":
        tokens, target = text(), text()[:, 1:]
    elif order == "labels given":
        more = (target,)
    elif order == "padded":
        target = target.clone()
        target[:2, 5:] = -100
    found = told(Model(everywhere), tokens, target.flatten(), *more)
    assert found is not None
    assert (found.targets, found.module, found.length) == ("moved", "mixer", LENGTH)
    assert found.before > 0.02
    assert told(Model(causal), tokens, target.flatten(), *more) is None


class Whole(nn.Module):
    """Computes its own loss, and returns nothing else."""

    def __init__(self, mix: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.model = Model(mix)

    def forward(self, text: Tensor, labels: Tensor) -> Tensor:
        scores = self.model(text)[:, : labels.shape[1]]
        return nn.functional.cross_entropy(scores.flatten(0, 1), labels.flatten())


@pytest.mark.parametrize("cut", [False, True])
def test_a_model_that_returns_its_loss_alone_is_asked_by_its_scores(cut: bool) -> None:
    """What the softmax of its loss is given; also where the last position, which has no target, is left out."""
    whole = text(length=LENGTH + 1)
    tokens, target = (text(), text()[:, 1:]) if cut else (whole[:, :-1], whole[:, 1:])
    found = told(Whole(everywhere), tokens, target.flatten(), target)
    assert found is not None
    assert found.module == "model.mixer"
    assert told(Whole(causal), tokens, target.flatten(), target) is None


def test_targets_that_were_not_moved() -> None:
    """A causal model that shall say what it is given is told; one that sees everything reconstructs."""
    found = told(Model(causal), text(), text().flatten())
    assert found is not None
    assert found.targets == "same"
    assert told(Model(everywhere), text(), text().flatten()) is None
    assert told(Model(lambda x: x), text(), text().flatten()) is None  # each token by itself


class Summary(nn.Module):
    """Encodes a text into one vector, and says it again with the tokens before as help."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.code, self.head = nn.Embedding(12, 8), nn.Linear(8, 8), nn.Linear(8, 12)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens)
        return self.head(self.code(x.mean(1))[:, None] + x.cumsum(1))


class Recurrent(nn.Module):
    """Hands the last state of one recurrent layer to another."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(12, 8), nn.Linear(8, 12)
        self.encoder, self.decoder = nn.GRU(8, 8, batch_first=True), nn.GRU(8, 8, batch_first=True)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens)
        return self.head(self.decoder(x, self.encoder(x)[1])[0])


class Nested(nn.Module):
    """Mixes positions by itself, and lets a layer work on the result."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(everywhere(x))


def test_the_module_that_mixes_is_named() -> None:
    """A layer that was given what is mixed already is not to blame."""
    model = Model(causal)
    model.mixer = Nested()
    found = told(model, text(), text()[:, 1:].flatten())
    assert found is not None
    assert found.module == "mixer"


def test_other_tasks_are_let_pass() -> None:
    """Masked tokens, other labels, an encoder beside the decoder, and an auto-encoder are no leak."""
    tokens, whole = text(), text(length=LENGTH + 1)
    masked = tokens.clone()
    masked[:, 3] = 11
    target = tokens.where(masked != tokens, torch.tensor(-100))
    assert told(Model(everywhere), masked, target.flatten()) is None
    assert told(Model(everywhere), tokens, tokens.flip(0).flatten()) is None
    assert told(Model(everywhere), torch.ones_like(tokens), torch.ones_like(tokens).flatten()) is None
    assert told(Summary(), whole[:, :-1], whole[:, 1:].flatten()) is None
    assert told(Recurrent(), whole[:, :-1], whole[:, 1:].flatten()) is None
    encoder = torch.cat([torch.zeros(4, 1, dtype=torch.int64), whole[:, 1:]], 1)
    assert relation(capture_of(Model(everywhere), whole[:, :-1], encoder), whole[:, 1:].flatten(), -100) is None


class DTensor(torch.Tensor):
    """Goes by the name of torch's tensor that is spread over ranks."""


def test_a_part_that_is_spread_over_ranks_is_not_run() -> None:
    """One rank alone would wait for the others, or take what they send each other."""
    model = Model(everywhere)
    model.head.weight = nn.Parameter(model.head.weight.detach().as_subclass(DTensor))  # type: ignore[assignment]
    capture = capture_of(model, text())
    known = relation(capture, text()[:, 1:].flatten(), -100)
    assert known is not None
    assert forward_trial.refuses(model)
    assert look(capture, known) is None
    assert "head is a module of DTensors" in str(replay(capture).reason)


def _nothing(announcement: Announcement, number: int | None = None) -> None:
    del announcement, number


def _asking(*, asks_all: bool = False) -> tuple[list[TokenChange], Callable[..., None]]:
    """Return what is announced, and what takes a loss and waits for what comes of it."""
    told: list[TokenChange] = []
    children = Children(GUARD)
    leaks = Leaks(children, GUARD, lambda fact, number=None: told.append(fact), lambda: asks_all)

    def ask(capture: ForwardCapture, target: Tensor, reader: Any, step: int) -> None:
        leaks.loss(capture, target, -100, reader)
        leaks.work(step)
        children.finish(60)

    return told, ask


def test_a_model_is_asked_once_and_when_its_loss_is_low() -> None:
    """Above a tenth of the first loss nothing is asked, and after that never again."""
    told, ask = _asking()
    model = Model(everywhere)
    for step, loss in enumerate((3.0, 2.0, 0.31, 0.29, 0.2, 0.1, 0.1)):
        capture = capture_of(model, text())
        capture.step = step
        ask(capture, text()[:, 1:].flatten(), lambda loss=loss: lambda: loss, step)
    assert [(fact.step, fact.loss) for fact in told] == [(4, 0.29)]  # a step later than the loss of 0.29


@pytest.mark.parametrize("moved, asked", [(False, [False] * 4 + [True, False, False]), (True, [False] * 7)])
def test_targets_that_were_not_moved_are_asked_about_early(moved: bool, asked: list[bool]) -> None:
    """In the fifth step, however high the loss is; two steps must have shown them."""
    told, ask = _asking()
    model = Model(causal)
    for step in range(7):
        capture = capture_of(model, text())
        capture.step = step
        target = text()[:, 1:].flatten() if moved else text().flatten()
        ask(capture, target, lambda: lambda: 3.0, step)
    assert [step in {fact.step for fact in told} for step in range(7)] == asked
    for fact in told:
        assert fact.targets == "same"
        assert fact.location is not None
        assert TargetLeak().judge(fact) is not None


@pytest.mark.parametrize("sees, leaks", [(everywhere, True), (causal, False)])
def test_where_every_step_is_checked_a_model_is_asked_at_once(sees: Any, leaks: bool) -> None:
    """Once, and the loss may be as high as it was."""
    told, ask = _asking(asks_all=True)
    model = Model(sees)
    for step in range(7):
        capture = capture_of(model, text())
        capture.step = step
        ask(capture, text()[:, 1:].flatten(), lambda: lambda: 3.0, step)
    assert [(fact.step, fact.targets) for fact in told] == [(3, "moved")]
    assert (TargetLeak().judge(told[0]) is not None) == leaks


def test_a_device_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loss before is read once the device has come so far; what comes meanwhile is left out."""
    done, read = [False], []
    monkeypatch.setattr(leak, "_arrival", lambda _: lambda: done[0])
    leaks, model = Leaks(None, GUARD, _nothing), Model(everywhere)
    for step, arrives in enumerate((False, False, True, False, True)):
        done[0] = arrives
        capture = capture_of(model, text())
        capture.step = step
        leaks.loss(capture, text()[:, 1:].flatten(), -100, lambda step=step: lambda: read.append(step) or 3.0)
    assert read == [0, 2]


def test_of_a_large_vocabulary_a_part_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """It tells as much."""
    monkeypatch.setattr(token_trial, "_KEPT_BYTES", LENGTH * 12 * 4 // 3)
    assert told(Model(causal), text(), text()[:, 1:].flatten()) is None
    monkeypatch.setattr(token_trial, "_mixer", lambda at, one, other: tuple(one.outputs[0].shape))
    found = told(Model(everywhere), text(), text()[:, 1:].flatten())
    assert found is not None
    assert found.module == (LENGTH, 3)


def test_a_model_whose_loss_was_never_high() -> None:
    """A loss that begins low says nothing by being low."""
    told, ask = _asking()
    model = Model(everywhere)
    for step in range(4):
        capture = capture_of(model, text())
        capture.step = step
        ask(capture, text()[:, 1:].flatten(), lambda step=step: lambda: 0.001 if step else 0.4, step)
    assert told == []


@pytest.mark.parametrize(
    ("moved", "labels", "twice"),
    [
        (2, "none", True),
        (2, "ignored at the end", True),
        (1, "none", False),
        (0, "none", False),
        (2, "a mask", True),
    ],
)
def test_targets_that_are_moved_by_two(moved: int, labels: str, twice: bool) -> None:
    """By the loop and by the model; a text of labels is known by what the loss ignores; a mask is none."""
    tokens = text(length=LENGTH)
    target = torch.full_like(tokens, -100)
    target[:, : LENGTH - moved] = tokens[:, moved:]
    more = {"none": [], "ignored at the end": [target.roll(1, 1)], "a mask": [torch.ones_like(tokens)]}[labels]
    found = is_moved_twice(capture_of(Model(causal, words=14), tokens, *more), target.flatten(), -100)
    assert found is twice


@pytest.mark.parametrize(("moved", "said"), [(1, ["twice"]), (0, [])])
def test_labels_that_a_model_is_given_and_moves_itself(moved: int, said: list[str]) -> None:
    """They were moved before, so that they are what the targets are moved from by one; or they are the tokens."""
    told, ask = _asking()
    model, whole = Model(causal, words=14), text(length=LENGTH + 1)
    tokens, labels = whole[:, :LENGTH], whole[:, moved : LENGTH + moved]
    for step in range(8):
        capture = capture_of(model, tokens, labels)
        capture.step = step
        ask(capture, labels[:, 1:].flatten(), lambda: lambda: 3.0, step)
    assert [fact.targets for fact in told] == said


def test_rows_of_one_token_are_not_moved_twice() -> None:
    """They are the same moved by one position and by two."""
    tokens = torch.arange(1, 5)[:, None].expand(4, LENGTH).contiguous()
    target = tokens.clone()
    target[:, -2:] = -100
    capture = capture_of(Model(causal, words=14), tokens)
    assert not is_moved_twice(capture, target.flatten(), -100)
