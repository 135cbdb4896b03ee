"""Tensors are known again, and had again, without a reference to them."""

from __future__ import annotations

import weakref

import torch

from ddpdebug.torch_internals import Memory, Seen


def test_swapping_works_beside_what_we_remember() -> None:
    """A weak reference of any kind would forbid it."""
    first, second = torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.zeros(2))
    kept = Seen(first), Memory(first)
    torch.utils.swap_tensors(first, second)
    assert first.tolist() == [0, 0]
    kept[1].hold()
    torch.utils.swap_tensors(first, second)
    assert weakref.getweakrefcount(first) == 0


def test_a_tensor_is_known_again() -> None:
    """By itself on its own memory; neither an alias, nor itself on other memory, nor one that came in its place."""
    tensor = torch.ones(3)
    seen, alias = Seen(tensor), tensor.detach()
    assert seen.is_of(tensor)
    assert not seen.is_of(alias)
    tensor.data = torch.zeros(3)
    assert seen.is_alive()
    assert not seen.is_of(tensor)
    del alias
    assert not seen.is_alive()
    assert not Seen(torch.ones(2).to_sparse()).is_alive()


def test_memory_is_there_as_long_as_somebody_has_it() -> None:
    """Or it is held; it comes back as it lies, and writes are counted also while nothing is held."""
    base = torch.arange(12.0).view(3, 4)
    rows = base[1:]
    memory = Memory(rows)
    base.add_(1)
    found = memory.tensor()
    assert found is not None
    assert torch.equal(found, rows)
    assert memory.version == rows._version == 1
    memory.hold()
    address = rows.data_ptr()
    del rows, base, found
    held = memory.tensor()
    assert held is not None
    assert held.data_ptr() == address
    del held
    memory.let_go()
    assert memory.tensor() is None
