"""The store of the newest process group is taken only as long as that group is the job's."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from ddpdebug import torch_internals as internals
from ddpdebug.monitor.side_groups import SideGroups


def _taken(monkeypatch: pytest.MonkeyPatch, now: object, store: Any, world: int = 2) -> tuple[bool, Any, Any]:
    """Take the store of the group "new" while `now` is the job's group; return what came of it, store and group."""

    def private_store() -> Any:
        if isinstance(store, Exception):
            raise store
        return store

    monkeypatch.setattr(internals, "default_group_id", lambda: now)
    monkeypatch.setattr(internals, "private_store", private_store)
    monkeypatch.setattr(dist, "get_rank", lambda: 1)
    monkeypatch.setattr(dist, "get_world_size", lambda: world)
    groups: Any = SimpleNamespace(rank=1, world=2, store="old store", _group="old")
    found = SideGroups.take_store(groups, "new")
    return found, groups.store, groups._group


def test_store_and_group_are_taken_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that whoever meets in the store watches the group that it belongs to."""
    assert _taken(monkeypatch, "new", "store") == (True, "store", "new")


@pytest.mark.parametrize("store", ["store", ConnectionError("the group is gone")])
def test_a_group_that_ends_meanwhile_is_none(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever its store was then: the next group is waited for."""
    assert _taken(monkeypatch, None, store, world=3) == (False, "old store", "old")


@pytest.mark.parametrize(
    "store, world, said", [(ConnectionError("no second"), 2, "no second"), ("store", 3, "3 ranks, not 2")]
)
def test_a_group_that_cannot_be_met_in_is_told(
    store: Any, world: int, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One whose store gives no second connection, or that has other ranks."""
    with pytest.raises(ConnectionError, match=said):
        _taken(monkeypatch, "new", store, world)
