"""What watching costs: step time with ddpdebug as a ratio to plain DDP, in one run, alternating blocks, medians.

    OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 2 benchmarks/overhead.py

Two ratios for each way: of the median step's wall time, and (`cpu`) of the process's processor time, which a busy
machine disturbs less. The ways: `plain` twice (the ratio of the second is the noise), ddpdebug by default, ddpdebug
with every check on every step, its forward probes alone on every step, and what people do without it: all-gathering the
parameters, an `isfinite().all()` hook on every module, `detect_anomaly`, and `DebugUnderflowOverflow` of Hugging Face's
transformers where that is installed (`pip install transformers`).
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddpdebug.config import Config
from ddpdebug.monitor import Monitor
from ddpdebug.probes.guard import Guard
from ddpdebug.probes.looks import Looks
from ddpdebug.probes.modules import ForwardProbe


class Block(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (batch, time, width) to the same shape."""
        b, t, c = x.shape
        q, k, v = (h.view(b, t, 4, c // 4).transpose(1, 2) for h in self.qkv(self.norm1(x)).chunk(3, -1))
        x = x + self.out(nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class Model(nn.Module):
    """A small GPT."""

    def __init__(self, width: int, depth: int, vocabulary: int = 512) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(depth)))
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Map (batch, time) token ids to logits."""
        return self.head(self.blocks(self.embed(tokens)))


def monitored(*, every_step: bool, out: Path) -> tuple[Callable[[], None], Callable[[], None], Monitor]:
    """Return functions that attach and detach one monitor, which keeps what it has learned in between."""
    monitor = Monitor(Config(out=out, metrics="off", quiet=True, every_step=every_step))
    monitor._begin()  # noqa: SLF001 - the benchmark switches parts on and off

    def off() -> None:
        monitor.patches.remove()
        monitor.recorder.release()
        monitor.recorder.wrappers.clear()

    return monitor.patches.install, off, monitor


def finite_hooks(model: nn.Module) -> list[torch.utils.hooks.RemovableHandle]:
    """Install the naive NaN check: one host synchronisation per module."""

    def check(_module: nn.Module, _args: object, output: object) -> None:
        if isinstance(output, torch.Tensor) and not torch.isfinite(output).all():
            raise RuntimeError("not finite")

    return [m.register_forward_hook(check) for m in model.modules() if not list(m.children())]


def forward_probes(model: nn.Module) -> list[torch.utils.hooks.RemovableHandle]:
    """Install ddpdebug's forward probes alone."""
    probe = ForwardProbe(Guard(print))
    begin = model.register_forward_pre_hook(lambda _module, _args: probe.begin(Looks(), 0))
    return [begin, model.register_forward_hook(lambda module, _args, _output: probe.end(module, ""))]


def hugging_face_hooks(model: nn.Module) -> list[torch.utils.hooks.RemovableHandle]:
    """Install the detector of transformers, which keeps no handles: take those that it adds."""
    from transformers.debug_utils import DebugUnderflowOverflow  # noqa: PLC0415 - optional

    before = {id(m): set(m._forward_hooks) for m in model.modules()}  # noqa: SLF001 - as above
    DebugUnderflowOverflow(model)
    handles = []
    for module in model.modules():
        for key in set(module._forward_hooks) - before[id(module)]:  # noqa: SLF001
            handle = torch.utils.hooks.RemovableHandle(module._forward_hooks)  # noqa: SLF001
            handle.id = key
            handles.append(handle)
    return handles


HOOKS: dict[str, Callable[[nn.Module], list[torch.utils.hooks.RemovableHandle]]] = {
    "isfinite": finite_hooks,
    "forward-probes": forward_probes,
    "transformers": hugging_face_hooks,
}


class Training:
    """A model and its step, plain and with the parameters all-gathered after it."""

    def __init__(self, width: int, depth: int, batch: int, tokens: int) -> None:
        torch.manual_seed(0)
        self.module = Model(width, depth)
        self.size = sum(p.numel() for p in self.module.parameters())
        self.model = DistributedDataParallel(self.module)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.generator = torch.Generator().manual_seed(dist.get_rank())
        self.batch, self.tokens = batch, tokens

    def step(self) -> float:
        """Take one step; return its seconds."""
        tokens = torch.randint(0, 512, (self.batch, self.tokens + 1), generator=self.generator)
        start = time.perf_counter()
        loss = nn.functional.cross_entropy(self.model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return time.perf_counter() - start

    def all_gather_step(self) -> float:
        """Take one step and compare all parameters in full; return the seconds of both."""
        start = time.perf_counter()
        self.step()
        for p in self.model.parameters():
            outs = [torch.empty_like(p) for _ in range(dist.get_world_size())]
            dist.all_gather(outs, p.detach())
            for other in outs:
                torch.equal(other, p)
        return time.perf_counter() - start


def measure(training: Training, ways: list[str], monitors: dict[str, Any], rounds: int, block: int) -> dict[str, Any]:
    """Return the block medians of every way, in alternating order."""
    medians: dict[str, list[float]] = {way: [] for way in [*ways, *(f"{way}: cpu" for way in ways)]}
    for round_ in range(rounds):
        for way in ways[round_ % len(ways) :] + ways[: round_ % len(ways)]:
            handles = HOOKS[way](training.module) if way in HOOKS else []
            torch.autograd.set_detect_anomaly(way == "anomaly")
            if way in monitors:
                monitors[way][0]()
            run = training.all_gather_step if way == "all-gather" else training.step
            dist.barrier()
            gc.collect()
            gc.disable()
            run()
            cpu = time.process_time()
            medians[way].append(statistics.median(run() for _ in range(block)))
            medians[f"{way}: cpu"].append(time.process_time() - cpu)
            gc.enable()
            if way in monitors:
                monitors[way][1]()
            for handle in handles:
                handle.remove()
        if dist.get_rank() == 0:
            print(f"round {round_ + 1}/{rounds}", flush=True)
    return medians


def main() -> None:
    """Run the benchmark and print one line per way."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--depth", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--block", type=int, default=6)
    parser.add_argument("--learn", type=int, default=180, help="steps before timing in which the schedule settles")
    ways = "plain,again,default,every-step,forward-probes,all-gather,isfinite,anomaly"
    parser.add_argument("--ways", default=ways + (",transformers" if find_spec("transformers") else ""))
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", "Anomaly Detection has been enabled")
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    training = Training(args.width, args.depth, args.batch, args.tokens)
    ways = args.ways.split(",")
    with tempfile.TemporaryDirectory() as scratch:
        monitors = {
            way: monitored(every_step=way == "every-step", out=Path(scratch) / way)
            for way in ways
            if way in {"default", "every-step"}
        }
        for _ in range(3):
            training.step()
        if "default" in monitors:  # until it has learned what a check costs here and has chosen its interval
            monitors["default"][0]()
            for _ in range(args.learn):
                training.step()
            monitors["default"][1]()
        medians = measure(training, ways, monitors, args.rounds, args.block)
        result: dict[str, object] = {"parameters": training.size, "world": world}
        for way in ways:
            for name, base in ((way, "plain"), (f"{way}: cpu", "plain: cpu")):
                pairs = zip(medians[name], medians[base], strict=True)
                result[name] = round(statistics.median(mine / other for mine, other in pairs), 4)
        result["plain_step_seconds"] = round(statistics.median(medians["plain"]), 4)
        for way, (_, _, monitor) in monitors.items():
            exchange = monitor._exchange  # noqa: SLF001 - as above
            assert exchange is not None
            result[f"{way}: bytes per tick and rank"] = exchange.gathered_bytes // max(1, exchange.ticks) // world
            result[f"{way}: full check every ... steps"] = monitor.schedule.interval(10**9)
            monitor.close()
    if rank == 0:
        for key, value in result.items():
            print(f"{key:36} {value}")
        if args.json:
            args.json.write_text(json.dumps(result, indent=2) + "\n")
    del training
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
