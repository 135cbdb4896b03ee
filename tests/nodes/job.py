"""A training job on several hosts; writes down what it has trained.

    torchrun ... tests/nodes/job.py --out FOLDER [--backend store] [--tree] [--fault rate]

Between the steps it pauses as long as it is told to: slow links need time.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class ThroughTheStore(dist.ProcessGroup):
    """A process group that is not gloo's, and whose ranks talk through the store alone."""

    def __init__(self, store: Any, rank: int, world: int) -> None:
        super().__init__(rank, world)
        self._store, self._mine, self._world, self._calls = store, rank, world, 0

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        """Return the name under which it is registered."""
        return "store"

    def _told(self, tensors: list[torch.Tensor]) -> list[list[torch.Tensor]]:
        self._calls += 1
        data = io.BytesIO()
        torch.save([tensor.detach().clone() for tensor in tensors], data)
        self._store.set(f"call/{self._calls}/{self._mine}", data.getvalue())
        keys = [f"call/{self._calls}/{rank}" for rank in range(self._world)]
        return [torch.load(io.BytesIO(self._store.get(key))) for key in keys]

    @staticmethod
    def _done(result: Any) -> dist.Work:
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result(result)
        return torch._C._distributed_c10d._create_work_from_future(future)

    def allreduce(self, tensors: list[torch.Tensor], options: object = None) -> dist.Work:
        """Sum."""
        for own, *all_of_it in zip(tensors, *self._told(tensors), strict=True):
            own.detach().copy_(torch.stack(all_of_it).sum(0))
        return self._done(tensors)

    def broadcast(self, tensors: list[torch.Tensor], options: Any = None) -> dist.Work:
        """Give what the root has."""
        root = 0 if options is None else options.rootRank
        for own, given in zip(tensors, self._told(tensors)[root], strict=True):
            own.detach().copy_(given)
        return self._done(tensors)

    def allgather(
        self, outputs: list[list[torch.Tensor]], tensors: list[torch.Tensor], options: object = None
    ) -> dist.Work:
        """Give everybody everything."""
        for out, given in zip(outputs[0], self._told(tensors), strict=True):
            out.copy_(given[0])
        return self._done(outputs)

    def barrier(self, opts: object = None) -> dist.Work:
        """Wait for all."""
        self._told([torch.zeros(1)])
        return self._done(None)


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--backend", default="gloo")
    parser.add_argument("--tree", action="store_true")
    parser.add_argument("--fault", default="none", help="rate: rank 2 has another learning rate")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--pause", type=float, default=0.02)
    args = parser.parse_args()
    if args.tree and "ddpdebug" in sys.modules:
        sys.path.append(str(Path(__file__).parent.parent / "support"))
        from many_ranks import become_many

        become_many()
    dist.Backend.register_backend(
        "store", lambda store, rank, world, _: ThroughTheStore(store, rank, world), devices=["cpu"]
    )
    dist.init_process_group(args.backend)
    rank = dist.get_rank()
    torch.manual_seed(3)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)))
    faulty = args.fault == "rate" and rank == 2
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2 if faulty else 0.1)
    generator, losses = torch.Generator().manual_seed(rank), []
    for _ in range(args.steps):
        loss = model(torch.randn(4, 8, generator=generator)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        time.sleep(args.pause)
    weights = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()
    result = {"rank": rank, "host": os.uname().nodename, "weights": weights, "losses": losses}
    (args.out / f"{rank}.json").write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
