"""What watching costs on CUDA: fingerprints, launches, step times. Prints JSON as its last line; `make gpu` calls it.

    python benchmarks/gpu.py [--device cpu --small]

- `fingerprint`: bytes a second of the fingerprints of many tensors by one launch, of the same by operations of torch,
  and of a plain sum over one tensor of as many bytes; the best of the repetitions of each, by the device's events,
  which begin when the host has given the device all that is measured. `host`: seconds that the host takes for that.
- `launches`: what a step starts on the device (kernels, copies, fills), counted by torch's profiler: plain, and
  attached in a step that is checked in full and samples no layers, by what for.
- `cost`: of two models, one that keeps the device busy and one whose launches take the time, steps as ratios to plain
  DDP of one rank, in alternating blocks: `first` (steps 1 to 19 of a monitor), `steady` (those from `from` on),
  `every` (with `--every-step`) and `again`, which is plain a second time: how far that is from 1 is the noise. Wall
  time, and processor time of all threads; median and quartiles over the rounds.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from overhead import Model
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ddpdebug
from ddpdebug import device_fingerprint
from ddpdebug.fingerprint import words_of

#: Of the models' tensors, in elements: many small ones beside a few large ones, as models have them.
_SIZES = (1024, 4096, 1 << 20, 1 << 22, 1 << 24)


#: Cycles of a device, some milliseconds, in which the host gets ahead of it.
_WHILE = 8_000_000
#: What a step starts, by a word in the name of the kernel; the first that is in it counts.
_KINDS = {"_add_tiles": "fingerprints", "Norm": "norms", "MinMax": "ranges of modules' results"}
_KINDS |= {"sum_functor": "sums", "Mem": "copies and fills"}


class Shape(NamedTuple):
    """What a model is made of, and the batch of a step."""

    width: int
    depth: int
    batch: int
    tokens: int
    vocabulary: int = 512


_SMALL = Shape(64, 2, 2, 32)
#: Its launches are counted.
_COUNTED = Shape(1024, 16, 16, 512)
#: Model -> its shape; steps of a plain block, of an attached one until it has settled, and with every step checked.
_COSTS = {
    "the device is the bottleneck": (Shape(768, 12, 24, 1024, 25088), 32, 50, 16),
    "launches are the bottleneck": (Shape(256, 6, 8, 256), 128, 480, 40),
}


class Training:
    """A GPT in DDP with one rank, and its step."""

    def __init__(self, device: torch.device, shape: Shape, *, clips: bool = False) -> None:
        self.batch, self.tokens, self.clips = shape.batch, shape.tokens, clips
        torch.manual_seed(0)
        self.device = device
        self.module = Model(shape.width, shape.depth, shape.vocabulary).to(device)
        self.size = sum(p.numel() for p in self.module.parameters())
        on_cuda = device.type == "cuda"
        self.model = DistributedDataParallel(self.module, device_ids=[device.index] if on_cuda else None)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=on_cuda)
        self.data = torch.randint(0, shape.vocabulary, (self.batch, self.tokens + 1)).to(device)

    def step(self) -> None:
        """Take one step in bf16."""
        with torch.autocast(self.device.type, dtype=torch.bfloat16):
            logits = self.model(self.data[:, :-1])
        loss = nn.functional.cross_entropy(logits.float().flatten(0, 1), self.data[:, 1:].flatten())
        self.optimizer.zero_grad()
        loss.backward()
        if self.clips:
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds(call: Callable[[], Any], device: torch.device, repeat: int = 20) -> float:
    """Return the least time of a call, on CUDA that between two events, behind something that takes a while."""
    for _ in range(3):
        call()
    found = []
    for _ in range(repeat):
        _wait(device)
        if device.type == "cuda":
            first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(_WHILE)  # noqa: SLF001 - what torch's own benchmarks let a device wait by
            first.record()
            call()
            last.record()
            last.synchronize()
            found.append(first.elapsed_time(last) / 1e3)
        else:
            began = time.perf_counter()
            call()
            found.append(time.perf_counter() - began)
    return min(found)


def fingerprint(device: torch.device, *, small: bool) -> dict[str, Any]:
    """Measure the fingerprints against a plain sum."""
    sizes = _SIZES[:3] if small else _SIZES * 24
    tensors = [torch.ones(size, dtype=torch.bfloat16, device=device) for size in sizes]
    size = sum(tensor.nbytes for tensor in tensors)
    one = torch.ones(size // 4, dtype=torch.float32, device=device)
    words = [words_of(tensor) for tensor in tensors]
    by_torch = seconds(lambda: device_fingerprint.by_torch(words), device)
    ours = seconds(lambda: device_fingerprint.device_fingerprints(tensors), device)
    plain = seconds(one.sum, device)
    _wait(device)
    began = time.perf_counter()
    device_fingerprint.device_fingerprints(tensors)
    host = time.perf_counter() - began
    return {
        "host": host,
        "tensors": len(tensors),
        "bytes": size,
        "kernel": device.type == "cuda" and device_fingerprint._launch() is not None,  # noqa: SLF001 - what was measured
        "gb_per_second": {
            "fingerprints": size / ours / 1e9,
            "by torch": size / by_torch / 1e9,
            "plain sum": size / plain / 1e9,
        },
        "share": plain / ours,
    }


def started(call: Callable[[], Any]) -> Counter[str]:
    """Count what a call starts on the device, by kind."""
    torch.cuda.synchronize()
    kinds = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=kinds) as profile:
        call()
        torch.cuda.synchronize()
    cuda = torch.autograd.DeviceType.CUDA
    names = [event.name for event in profile.events() if event.device_type == cuda]
    return Counter(next((kind for word, kind in _KINDS.items() if word in name), "others") for name in names)


def launches(training: Training, scratch: Path) -> dict[str, Any] | None:
    """Count what steps start; None where torch's profiler sees no device."""
    if training.device.type != "cuda":
        return None
    for _ in range(5):
        training.step()
    plain = min((started(training.step) for _ in range(3)), key=Counter.total)
    options: dict[str, Any] = {"out": scratch / "launches", "metrics": "off", "quiet": True, "every_step": True}
    monitor = ddpdebug.watch(training.model, training.optimizer, **options)
    for _ in range(20):
        training.step()
    attached = min((started(training.step) for _ in range(8)), key=Counter.total)  # some steps sample layers besides
    monitor.close()
    added = {kind: number - plain[kind] for kind, number in attached.most_common() if number != plain[kind]}
    ours = attached.total() - plain.total()
    return {"plain": plain.total(), "ours": ours, "kinds": added, "tensors": len(_parameters(training))}


def _parameters(training: Training) -> list[torch.Tensor]:
    return list(training.module.parameters())


def block(training: Training, steps: int) -> tuple[float, float]:
    """Return the wall time and the processor time of a step, of so many."""
    _wait(training.device)
    began = time.perf_counter(), time.process_time()
    for _ in range(steps):
        training.step()
    _wait(training.device)
    return (time.perf_counter() - began[0]) / steps, (time.process_time() - began[1]) / steps


def cost(training: Training, scratch: Path, rounds: int, steps: int, learn: int, every: int) -> dict[str, Any]:
    """Compare plain, plain again and attached blocks."""
    block(training, 5)
    times: dict[str, list[tuple[float, float]]] = {}

    def attached(*parts: tuple[str, int], every_step: bool) -> None:
        options: dict[str, Any] = {"out": scratch / str(len(times["plain"])) / parts[0][0], "metrics": "off"}
        monitor = ddpdebug.watch(training.model, training.optimizer, quiet=True, every_step=every_step, **options)
        training.step()  # what attaching leaves for the first step is not counted
        for part, number in parts:
            times.setdefault(part, []).append(block(training, number))
        monitor.close()

    for _ in range(rounds):
        gc.collect()
        times.setdefault("plain", []).append(block(training, steps))
        attached(("first", 19), ("settling", learn), ("steady", steps), every_step=False)
        times.setdefault("again", []).append(block(training, steps))
        attached(("every", every), every_step=True)
    found: dict[str, Any] = {"rounds": rounds, "steps": steps, "from": 20 + learn, "parameters": training.size}
    found["seconds"] = statistics.median(wall for wall, _ in times["plain"])
    for way in ("again", "steady", "first", "every"):
        found[way] = {
            clock: _quartiles([own[at] / plain[at] for own, plain in zip(times[way], times["plain"], strict=True)])
            for at, clock in enumerate(("wall", "processor"))
        }
    return found


def _quartiles(ratios: list[float]) -> list[float]:
    """Return the median, and the quartiles around it."""
    low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
    return [middle, low, high]


def main() -> None:
    """Measure, and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--small", action="store_true", help="so little that it says nothing: to try the script")
    parser.add_argument("--rounds", type=int, default=4)
    args = parser.parse_args()
    device, rounds = torch.device(args.device), max(2, args.rounds)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    backend = "nccl" if device.type == "cuda" and dist.is_nccl_available() else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    found: dict[str, Any] = {"fingerprint": fingerprint(device, small=args.small)}
    training = Training(device, _SMALL if args.small else _COUNTED)
    found["model"] = {"parameters": training.size, "tensors": len(_parameters(training)), "backend": backend}
    with tempfile.TemporaryDirectory() as scratch:
        found["launches"] = launches(training, Path(scratch))
        del training
        found["cost"] = {}
        for number, (name, case) in enumerate(_COSTS.items()):
            shape, *steps = (_SMALL, 4, 4, 4) if args.small else case
            gc.collect()
            training = Training(device, shape, clips=True)
            found["cost"][name] = cost(training, Path(scratch) / str(number), rounds * (number + 1), *steps)
            del training
    gc.collect()
    dist.destroy_process_group()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
