"""What a step uses: gradients that carry no loss scale, and that a clipping has seen."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from ddpdebug.instrument.probes import Probes
from ddpdebug.isolation.guard import Guard
from ddpdebug.probes.record import StepRecord
from ddpdebug.probes.training_loop.training_loop import RecipeNotes


def instead(step: str, clips: str) -> list[str | None]:
    """Train for two steps; return what is said of the clippings."""
    troubles: list[str] = []
    records: list[StepRecord] = []
    probes = Probes(Guard(lambda *said: troubles.append(str(said))), records.append, lambda *_: None, lambda *_: True)
    probes.patches.install()
    try:
        model, other = nn.Linear(3, 2), nn.Linear(3, 2)
        optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), torch.amp.GradScaler("cpu", init_scale=8.0)
        used_up: Any = filter(lambda _: True, other.parameters()) if "filter" in clips else other.parameters()
        list(used_up)
        for _ in range(2):
            optimizer.zero_grad()
            loss = model(torch.randn(4, 3)).square().mean()
            (loss if step == "unscaled" else scaler.scale(loss)).backward()
            if clips == "the model":
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            elif clips.startswith("a used up"):
                nn.utils.clip_grad_norm_(used_up, 1.0)
            elif clips == "another model":
                nn.utils.clip_grad_norm_(list(other.parameters()), 1.0)
            elif clips == "both":
                nn.utils.clip_grad_norm_(list(other.parameters()), 1.0)
                nn.utils.clip_grad_norm_(list(model.parameters()), 1.0)
            if step == "by hand":
                for p in model.parameters():
                    assert p.grad is not None
                    p.grad /= 8.0
            if step == "by the scaler":
                scaler.step(optimizer)
                scaler.update()
            else:
                optimizer.step()
        clippings = [record.since.parts[RecipeNotes].recipe.get("clip") for record in records]
    finally:
        probes.remove()
        probes.release()
    assert troubles == []
    return [None if clipping is None else clipping.instead for clipping in clippings]


@pytest.mark.filterwarnings("ignore:.parameters. is an empty generator")
@pytest.mark.parametrize(
    ("clips", "said"),
    [
        ("the model", None),
        ("a used up generator", "nothing"),
        ("a used up filter", "nothing"),
        ("another model", "nothing"),
        ("both", None),
    ],
)
def test_what_is_clipped(clips: str, said: str | None) -> None:
    """A generator that was used up, or another model's parameters, have no gradients."""
    assert instead("unscaled", clips) == [said, said]


@pytest.mark.parametrize(("step", "said"), [("past the scaler", "step"), ("by the scaler", None), ("by hand", None)])
def test_gradients_that_still_carry_the_loss_scale(step: str, said: str | None) -> None:
    """The scaler's own step unscales them, and a script may."""
    assert instead(step, "nothing") == [said, said]
