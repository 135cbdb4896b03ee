"""What the last step has left: it is handed over where nothing has rewritten it, and is not known otherwise."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch

from ddpdebug import fingerprint
from ddpdebug.isolation.guard import Guard
from ddpdebug.probes.entries import entries_of
from ddpdebug.probes.last_state import LastState, spots_on_device
from ddpdebug.probes.optimizers import OptimizerWatch, index_of
from ddpdebug.probes.record import SinceLastStep, StepRecord, encode_row
from ddpdebug.probes.step_digests import ParameterDigests
from ddpdebug.probes.step_state import StepState
from ddpdebug.probes.training_events import Bus, OptimizerEnded
from ddpdebug.schema.row import Flag, decode

GUARD = Guard(lambda part, message: pytest.fail(f"{part}: {message}"))


def stepped() -> tuple[torch.nn.Module, torch.optim.Optimizer, OptimizerWatch, LastState, list[StepRecord]]:
    """A model right after its optimizer's step 7, marked."""
    model = torch.nn.Sequential(torch.nn.Linear(40, 30), torch.nn.Linear(30, 2))
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 40)).sum().backward()
    optimizer.step()
    entries_of(GUARD).built.module(model)
    seen, bus = list[StepRecord](), Bus(GUARD)
    look = LastState(bus, StepState(), GUARD, seen.append, lambda *_: False)
    watch = OptimizerWatch(optimizer, 0, entries_of(GUARD), on_end=lambda ended: bus.emit(OptimizerEnded(ended)))
    watch.refresh([])
    look.mark(watch, StepRecord(0, 7, Flag.NO_DDP | Flag.CLIPPED, SinceLastStep(), checked=True))
    return model, optimizer, watch, look, seen


def left(record: StepRecord) -> dict[str, int]:
    """Return the digests of the parameters, by name."""
    after = record.parts[ParameterDigests].after
    assert after is not None
    return dict(zip(record.names, after(), strict=True))


@torch.no_grad()
def in_place(model: torch.nn.Module) -> None:
    next(model.parameters()).mul_(1.0)


def through_data(model: torch.nn.Module) -> None:
    for p in model.parameters():
        p.data.mul_(0.5)


def replaced(model: torch.nn.Module) -> None:
    model.half()


def test_what_is_left_is_handed_over_once() -> None:
    """With the digests of all parameters and of the state, under the step's number."""
    model, _, watch, look, seen = stepped()
    look.look(watch, False)
    look.look(watch, False)
    (record,) = seen
    row = decode(encode_row(record, 1, GUARD))
    assert (row.step, row.optimizer, row.rank) == (7, 0, 1)
    assert row.flags == int(Flag.LAST_STATE | Flag.CHECKED | Flag.NO_DDP)
    after = record.parts[ParameterDigests].after
    assert after is not None
    assert dict(zip(record.names, after(), strict=True)) == {
        n: fingerprint.fingerprint(p) for n, p in model.named_parameters()
    }
    assert row.params_after_digest
    assert row.state_digest


@pytest.mark.parametrize("rewrite", [in_place, through_data, replaced])
def test_what_was_rewritten_since_is_not_known(rewrite: Callable[[torch.nn.Module], None]) -> None:
    """The rank says so instead of being silent: nobody waits for it, and it is not compared."""
    model, _, watch, look, seen = stepped()
    rewrite(model)
    look.look(watch, False)
    row = decode(encode_row(seen[0], 0, GUARD))
    assert (row.params_after_digest, row.foreign_params_digest, row.state_digest) == (0, 0, 0)


def test_a_bit_that_flips_is_seen() -> None:
    """No counter moves, and the memory stays where it is: what is handed over holds it."""
    model, _, watch, look, seen = stepped()
    weight = next(model.parameters())
    before = fingerprint.fingerprint(weight)
    weight.data.view(torch.int32)[0, 0] ^= 1 << 22
    look.look(watch, False)
    after = left(seen[0])["0.weight"]
    assert after == fingerprint.fingerprint(weight) != before


def test_a_state_that_was_loaded_since_is_left_out() -> None:
    """The parameters are still those of the step."""
    _, _, watch, look, seen = stepped()
    look.look(watch, True)
    row = decode(encode_row(seen[0], 0, GUARD))
    assert row.params_after_digest
    assert not row.state_digest


def test_a_pause_leaves_what_is_swapped_to_the_end() -> None:
    """Averaged weights are put in for an evaluation, and the own ones back."""
    model, _, watch, look, seen = stepped()
    own = [p.data.clone() for p in model.parameters()]
    through_data(model)
    look.glance_back(watch)
    assert seen == []
    for p, value in zip(model.parameters(), own, strict=True):
        p.data.copy_(value)
    look.look(watch, False)
    assert decode(encode_row(seen[0], 0, GUARD)).params_after_digest


def test_a_pause_reads_the_parameters_only() -> None:
    """Once after a step, however many pauses there are."""
    _, _, watch, look, seen = stepped()
    look.glance_back(watch)
    look.glance_back(watch)
    look.look(watch, False)
    (row,) = [decode(encode_row(record, 0, GUARD)) for record in seen]
    assert row.params_after_digest
    assert not row.state_digest


def test_the_optimizer_that_dies_takes_nothing_along() -> None:
    """The parameters can still be read when it goes, for the watch holds them; its state is gone."""
    model, optimizer, _watch, _look, seen = stepped()
    del model, optimizer
    row = decode(encode_row(seen[0], 0, GUARD))
    assert row.params_after_digest


def test_nothing_is_read_once_nobody_listens() -> None:
    """After the end, and in a forked child."""
    _, _, watch, look, seen = stepped()
    look.close()
    look.look(watch, False)
    assert seen == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.complex64, torch.bool])
def test_spots_change_with_the_contents(dtype: torch.dtype) -> None:
    """On the CPU and on a device alike; a tensor of any length and kind."""
    for shape in ((), (3,), (70, 9)):
        tensors = [torch.ones(shape, dtype=dtype), torch.ones(5)]
        host, device = fingerprint.spots(tensors), spots_on_device(tensors)
        assert host == fingerprint.spots([t.clone() for t in tensors])
        tensors[0].zero_()
        assert fingerprint.spots(tensors) != host
        assert not torch.equal(spots_on_device(tensors), device)


@pytest.mark.smoke
def test_an_optimizer_that_is_built_again_takes_over_the_number() -> None:
    """Also after the first is gone and its parameters' memory is held by objects of ours."""
    model, optimizer, watch, _, _ = stepped()
    params = list(model.parameters())
    del optimizer
    gc.collect()
    assert not any(kept is p for kept, p in zip(watch.params, params, strict=True))
    assert index_of(torch.optim.Adam(params), [watch]) == watch.index
    assert index_of(torch.optim.Adam(params[:2]), [watch]) == watch.index + 1
