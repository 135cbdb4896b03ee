"""What nodes have saved is read without running hooks of the user's, also where torch does not tell of these."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks

from ddpdebug.instrument.patches import watch_saved_hooks
from ddpdebug.isolation.guard import Guard
from ddpdebug.probes.entries import Entries
from ddpdebug.torch_internals import graph


@pytest.fixture
def _told_by_nobody(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A torch whose saved tensors do not tell of hooks, under a monitor of which this is a part."""
    monkeypatch.setattr(graph, "TELLS_HOOKS", False)
    entries = Entries(Guard(lambda part, message: pytest.fail(f"{part}: {message}")))
    watch_saved_hooks(entries)
    assert not entries.left_out
    yield
    graph.saved_hooks.end()
    entries.close()


X = torch.ones(3, requires_grad=True)
BEFORE = X.log_softmax(0)


def _made() -> torch.Tensor:
    return X.log_softmax(0)


def _is_read(made: torch.Tensor) -> bool:
    value = graph.saved_tensor(made.grad_fn, "result")
    assert value is None or (torch.equal(value, made) and not value.requires_grad)
    return value is not None


@pytest.mark.usefixtures("_told_by_nobody")
def test_what_was_saved_inside_of_hooks_is_not_read() -> None:
    """Before and after it is, between two contexts too; what was there before anybody looked is not."""
    ran = []
    hooks = saved_tensors_hooks(lambda tensor: tensor, lambda tensor: ran.append(tensor) or tensor)
    first = _made()
    with hooks:
        one = _made()
        with save_on_cpu():
            two = _made()
        three = _made()
        assert not _is_read(three)
    between = _made()
    with hooks, pytest.raises(ZeroDivisionError), save_on_cpu():
        _ = 1 / 0
    last = _made()
    assert [_is_read(made) for made in (BEFORE, first, one, two, three, between, last)] == [
        *(False, True, False, False, False, True, True)
    ]
    assert not ran
    last.sum().backward()
    assert not _is_read(last)


@pytest.mark.usefixtures("_told_by_nobody")
def test_hooks_of_which_one_side_is_not_seen_leave_nothing_to_read() -> None:
    """Hooks put on one saved tensor, those that were there before anybody looked, and more than are remembered."""
    watched, outer = graph.saved_hooks, saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)
    with outer:
        watched.begin()
        inside = _made()
    after = _made()
    assert (_is_read(inside), _is_read(after)) == (False, True)
    made = []
    for _ in range(watched.MOST + 2):
        with outer:
            made.append(_made())
    assert not any(map(_is_read, made))
    assert not _is_read(after)
    newest = _made()
    assert _is_read(newest)
    newest.grad_fn._raw_saved_result.register_hooks(lambda tensor: tensor, lambda tensor: pytest.fail("it ran"))  # type: ignore[union-attr]
    assert not _is_read(newest)


@pytest.mark.usefixtures("_told_by_nobody")
def test_hooks_of_another_thread_do_not_end_with_ours() -> None:
    """Each thread has its own; while one is inside, nodes with numbers like its own are left alone."""
    entered, leaves = threading.Event(), threading.Event()

    def other() -> None:
        with save_on_cpu():
            entered.set()
            leaves.wait(60)

    thread = threading.Thread(target=other)
    thread.start()
    entered.wait(60)
    with save_on_cpu():
        inside = _made()
    leaves.set()
    thread.join()
    assert not _is_read(inside)
    assert _is_read(_made())
