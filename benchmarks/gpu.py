"""What watching costs on CUDA: fingerprints, launches, step times. Prints JSON as its last line; `make gpu` calls it.

    python benchmarks/gpu.py [--device cpu --small]

- `fingerprint`: bytes a second of the fingerprints of many tensors by one launch, of the same by operations of torch,
  and of a plain sum over one tensor of as many bytes; the best of the repetitions of each, by the device's events,
  which begin when the host has given the device all that is measured. `host`: seconds that the host takes for that.
- `launches`: what a step starts on the device (kernels, copies, fills), counted by torch's profiler: plain, and
  attached in a step that is checked in full and samples no layers, by what for.
- `step`: the step time as a ratio to plain DDP of one rank, in alternating blocks: `default` (a monitor that has
  settled in) and `again`, which is plain a second time: how far that is from 1 is the noise. Median and quartiles.
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
from typing import Any

import torch
import torch.distributed as dist
from overhead import Model, Settled
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


class Training:
    """A GPT in DDP with one rank, and its step."""

    def __init__(self, device: torch.device, *, small: bool) -> None:
        width, depth, self.batch, self.tokens = (64, 2, 2, 32) if small else (1024, 16, 16, 512)
        torch.manual_seed(0)
        self.device = device
        self.module = Model(width, depth).to(device)
        self.size = sum(p.numel() for p in self.module.parameters())
        on_cuda = device.type == "cuda"
        self.model = DistributedDataParallel(self.module, device_ids=[device.index] if on_cuda else None)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=on_cuda)
        self.data = torch.randint(0, 512, (self.batch, self.tokens + 1)).to(device)

    def step(self) -> None:
        """Take one step in bf16."""
        with torch.autocast(self.device.type, dtype=torch.bfloat16):
            logits = self.model(self.data[:, :-1])
        loss = nn.functional.cross_entropy(logits.float().flatten(0, 1), self.data[:, 1:].flatten())
        self.optimizer.zero_grad()
        loss.backward()
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


def step_ratio(training: Training, scratch: Path, rounds: int, steps: int, learn: int) -> dict[str, Any]:
    """Compare plain, plain again and attached blocks."""
    for _ in range(5):
        training.step()
    settled = Settled(scratch / "settled")
    detach = settled.attach()
    for _ in range(learn):
        training.step()
    detach()
    times: dict[str, list[float]] = {"plain": [], "again": [], "default": []}
    for number in range(rounds):
        ways = list(times)
        at = number % len(ways)
        for way in ways[at:] + ways[:at]:
            gc.collect()
            detach = settled.attach() if way == "default" else lambda: None
            training.step()  # what attaching leaves for the first step is not counted
            _wait(training.device)
            began = time.perf_counter()
            for _ in range(steps):
                training.step()
            _wait(training.device)
            times[way].append((time.perf_counter() - began) / steps)
            detach()
    settled.monitor.close()
    found: dict[str, Any] = {"rounds": rounds, "steps": steps, "seconds": statistics.median(times["plain"])}
    for way in ("default", "again"):
        ratios = [own / plain for own, plain in zip(times[way], times["plain"], strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
        found[way] = [middle, low, high]
    return found


def main() -> None:
    """Measure, and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--small", action="store_true", help="so little that it says nothing: to try the script")
    parser.add_argument("--rounds", type=int, default=12)
    args = parser.parse_args()
    device, rounds = torch.device(args.device), max(2, args.rounds)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    backend = "nccl" if device.type == "cuda" and dist.is_nccl_available() else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    found: dict[str, Any] = {"fingerprint": fingerprint(device, small=args.small)}
    training = Training(device, small=args.small)
    found["model"] = {"parameters": training.size, "tensors": len(_parameters(training)), "backend": backend}
    with tempfile.TemporaryDirectory() as scratch:
        found["launches"] = launches(training, Path(scratch))
        steps, learn = (4, 8) if args.small else (32, 200)
        found["step"] = step_ratio(training, Path(scratch), rounds, steps, learn)
    del training
    gc.collect()
    dist.destroy_process_group()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
