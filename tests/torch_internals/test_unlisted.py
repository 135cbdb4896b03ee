"""Tensors of ours are not among those that a script can count."""

from __future__ import annotations

import gc

import torch

from ddpdebug import torch_internals as internals


def _listed() -> set[int]:
    gc.collect()
    return {id(one) for one in gc.get_objects()}


def test_what_is_kept_is_not_listed() -> None:
    """Neither new tensors, nor aliases and copies of the job's, nor a memory that is held."""
    job = torch.ones(3)
    memory = internals.Memory(job)
    memory.hold()
    kept = [internals.unlisted(torch.zeros(2)), internals.alias(job), *internals.clones([job, job])]
    held = memory.tensor()
    assert held is not None
    assert not {id(one) for one in [*kept, held]} & _listed()
    assert id(job) in _listed()


def test_it_works_and_ends_as_any_other() -> None:
    """In operations, in a graph, and when the last reference goes."""
    tensor = internals.unlisted(torch.ones(3, requires_grad=True))
    (tensor * 2).sum().backward()
    assert tensor.grad is not None
    assert tensor.grad.tolist() == [2.0, 2.0, 2.0]
    seen = internals.Seen(tensor)
    del tensor
    assert not seen.is_alive()
