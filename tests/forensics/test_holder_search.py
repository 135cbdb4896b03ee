"""One rank searches, once for each cause."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ddpdebug.detectors.examples import step_at
from ddpdebug.forensics.memory import holders
from ddpdebug.forensics.memory.holder_search import MAX_SEARCHES, HolderSearch
from ddpdebug.isolation.guard import Guard
from ddpdebug.probes.step_state import StepState
from ddpdebug.probes.training_events import Bus

CLOSING: Any = None  # the event, of which nothing is read


@pytest.fixture(autouse=True)
def _one_script(monkeypatch: pytest.MonkeyPatch) -> None:
    """What other test modules hold is no part of the job that is searched."""
    monkeypatch.setattr(holders, "sys", SimpleNamespace(modules={__name__: sys.modules[__name__]}))


def _search(rank: int) -> HolderSearch:
    search = HolderSearch(Bus(Guard(lambda *_: None)), StepState())
    search.rank = rank
    return search


def _grow(search: HolderSearch, number: int, odd: Mapping[int, Mapping[str, Any]]) -> None:
    search.learn(step_at(number, odd=odd))


def test_the_lowest_growing_rank_searches() -> None:
    """By living graphs, else by memory."""
    search = _search(0)
    _grow(search, 0, {})
    _grow(search, 1, {2: {"host_private_bytes": 900}, 3: {"host_private_bytes": 1000}})
    assert search.chosen() == 2
    _grow(search, 2, {3: {"live_graphs": 20}})
    assert search.chosen() == 3


def test_others_answer_at_once_without_a_search() -> None:
    """They have nothing to say."""
    search = _search(0)
    _grow(search, 2, {3: {"live_graphs": 20}})
    assert search.known()
    search.boundary(CLOSING)
    assert (search.found(), search.searches) == (None, 0)


def _searches(search: HolderSearch) -> list[tuple[bool, bool, int]]:
    """Grow again and again; of each round: whether an answer was known before and after, and how often was searched.

    Nothing is asserted here: pytest makes functions with assertions ask for their `locals`, which are then not read.
    """
    losses = [torch.ones(2, requires_grad=True) * 1 for _ in range(20)]
    seen = []
    for round_ in range(1, MAX_SEARCHES + 3):
        _grow(search, 2 * round_, {1: {"live_graphs": 20}})
        before = search.known()
        search.boundary(CLOSING)
        after = search.known()
        search.boundary(CLOSING)
        seen.append((before, after, search.searches))
        _grow(search, 2 * round_ + 1, {1: {"live_graphs": 7}})
    del losses
    return seen


def test_one_search_for_one_cause() -> None:
    """Asked again it has the same answer, until most of the graphs are gone; and never without end."""
    search = _search(1)
    rounds = range(1, MAX_SEARCHES + 3)
    assert _searches(search) == [(n > MAX_SEARCHES, True, min(n, MAX_SEARCHES)) for n in rounds]
    assert any(holder.name == "losses" for holder in search.found().holders)
