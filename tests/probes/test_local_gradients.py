"""Gradients are read while they are still this rank's own, however DDP reduces them and however backwards nest."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import ddpdebug
from ddpdebug.probes.gradients import GradientSums
from ddpdebug.probes.training_events import GradientsFinal


class Model(nn.Module):
    """Four layers: the first two may be computed again, in a backward of their own; the last may be left out."""

    def __init__(self, *, recomputed: bool, unused: bool) -> None:
        super().__init__()
        self.first, self.inner, self.last, self.unused = (nn.Linear(4, 4) for _ in range(4))
        self.recomputed, self.skips = recomputed, unused

    def forward(self, x: torch.Tensor) -> Any:
        """Map rows of 4 to rows of 4."""
        begin = nn.Sequential(self.first, self.inner)
        x = self.last(checkpoint(begin, x, use_reentrant=True) if self.recomputed else begin(x))
        return x if self.skips else self.unused(x)


@pytest.fixture
def _one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def _trebled(_: object, bucket: Any) -> Future[torch.Tensor]:
    future: Future[torch.Tensor] = Future()
    future.set_result(bucket.buffer().mul_(3))
    return future


_trebled.__annotations__.clear()  # DDP wants the class there, or nothing


@pytest.mark.usefixtures("_one_rank")
@pytest.mark.parametrize(
    ("options", "recomputed"),
    [
        ({}, False),
        ({}, True),
        ({"find_unused_parameters": True}, False),
        ({"gradient_as_bucket_view": True}, False),
        ({"static_graph": True}, True),
    ],
)
def test_they_are_not_yet_reduced(options: dict[str, Any], recomputed: bool, tmp_path: Path) -> None:
    """Each norm is that of what the backward has computed, though the reduction makes it three times as large."""
    net = Model(recomputed=recomputed, unused="find_unused_parameters" in options)
    model = DistributedDataParallel(net, bucket_cap_mb=1e-4, **options)
    model.register_comm_hook(None, _trebled)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    own: dict[int, float] = {}
    for parameter in net.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: own.update({id(p): float(p.grad.norm())}))
    with ddpdebug.watch(model, optimizer, out=tmp_path / "run", metrics="off", quiet=True, every_step=True) as monitor:
        seen: list[dict[int, float]] = []

        def note(event: GradientsFinal) -> None:
            local = event.record.since.parts[GradientSums].local
            seen.append({key: float(norm) for key, (_, norm) in local.items()})

        monitor.probes.bus.on("probe:step-gradients", GradientsFinal, note)
        for _ in range(3):
            own.clear()
            optimizer.zero_grad()
            model(torch.ones(2, 4, requires_grad=True)).square().mean().backward()
            reduced = {id(p): float(p.grad.norm()) for p in net.parameters() if p.grad is not None and id(p) in own}
            optimizer.step()
            assert seen[-1] == pytest.approx(own)
            assert reduced == pytest.approx({key: 3 * norm for key, norm in own.items()})
        assert not monitor.guard.off
