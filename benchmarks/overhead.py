"""What watching costs: each way of it as a ratio to plain DDP, in one run, in alternating blocks.

    OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 2 benchmarks/overhead.py
    OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 2 benchmarks/overhead.py --busy 2 --rounds 5

A block attaches anew and has three parts: the first steps after attaching (`start`, 16), the others of the 64 in
each of which the ranks are compared (`early`, 48), and those after them, as in the rest of a run (`steady`, 32).
Of each part three ratios to the plain block of the same round are printed, each the median over the rounds with the
quartiles in brackets: of the wall time, of the processor time of all threads of all ranks (`processor`: `process_time`,
so the background thread, gloo's threads and the metrics server count), and of the training threads alone (`training`:
`thread_time`). `again` is plain a second time: how far it is from 1 is the noise. Attaching and detaching are not part
of a block; what attaching takes is printed by itself. Garbage collection is left as it is.

The ways: `default` (ddpdebug as `watch` attaches it, with its metrics endpoint), `settled` (the same monitor in all
blocks, after `--learn` steps), `every-step`, `forward-probes` (alone, in every step), and what people do without
ddpdebug: all-gathering the parameters, an `isfinite().all()` hook on every module, `detect_anomaly`, and
`DebugUnderflowOverflow` of Hugging Face's transformers where that is installed.

`--busy N` runs N busy loops beside the job, which compete for its cores as loaders and other jobs do.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ddpdebug
from ddpdebug.config.settings import Config
from ddpdebug.isolation.guard import Guard
from ddpdebug.monitor.monitor import Monitor
from ddpdebug.probes.module_outputs import ForwardProbe
from ddpdebug.probes.nonfinite_notes import Looks

#: Ends by itself when the benchmark was killed.
_LOOP = "import os\nparent = os.getppid()\nwhile os.getppid() == parent:\n    sum(range(200_000))\n"
PARTS, CLOCKS = ("start", "early", "steady"), ("wall", "processor", "training")
Detach = Callable[[], None]


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


def attached(training: Training, out: Path, *, every_step: bool) -> Detach:
    """Attach as a user does; return what detaches."""
    monitor = ddpdebug.watch(
        training.model, training.optimizer, out=out, metrics_port=0, quiet=True, every_step=every_step
    )
    return monitor.close


class Settled:
    """One monitor that is attached and detached again and keeps what it has learned in between."""

    def __init__(self, out: Path) -> None:
        self.monitor = Monitor(Config(out=out, metrics_port=0, quiet=True))
        self.monitor._begin()  # noqa: SLF001 - the benchmark switches parts on and off

    def attach(self) -> Detach:
        """Put the hooks in place; return what takes them away."""
        self.monitor.probes.patches.install()
        return self._detach

    def _detach(self) -> None:
        self.monitor.probes.remove()
        self.monitor.probes.release()
        self.monitor.probes.state.wrappers.clear()


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

    def step(self) -> None:
        """Take one step."""
        tokens = torch.randint(0, 512, (self.batch, self.tokens + 1), generator=self.generator)
        loss = nn.functional.cross_entropy(self.model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()

    def all_gather_step(self) -> None:
        """Take one step and compare all parameters in full."""
        self.step()
        for p in self.model.parameters():
            outs = [torch.empty_like(p) for _ in range(dist.get_world_size())]
            dist.all_gather(outs, p.detach())
            for other in outs:
                torch.equal(other, p)


class Clocks:
    """The clocks of this rank, all in seconds."""

    def __init__(self) -> None:
        self._at = time.perf_counter(), time.process_time(), time.thread_time()

    def lap(self) -> list[float]:
        """Return what has passed since the last lap, in the order of `CLOCKS`."""
        before, self._at = self._at, (time.perf_counter(), time.process_time(), time.thread_time())
        return [now - then for now, then in zip(self._at, before, strict=True)]


class Bench:
    """Runs blocks of steps and keeps their times: `times[way][part]` has one (wall, processor, training) a block."""

    def __init__(self, training: Training, scratch: Path, steps: dict[str, int]) -> None:
        self.training, self.scratch, self.steps = training, scratch, steps
        self.times: dict[str, dict[str, list[list[float]]]] = {}
        self.attaching: list[list[float]] = []
        self.settled: Settled | None = None
        self._blocks = 0

    def block(self, way: str) -> None:
        """Run one block."""
        self._blocks += 1
        gc.collect()
        dist.barrier()
        clocks = Clocks()
        detach = self._attach(way)
        attaching = clocks.lap()
        if way in {"default", "every-step"}:
            self.attaching.append(attaching)
        run = self.training.all_gather_step if way == "all-gather" else self.training.step
        for part, count in self.steps.items():
            dist.barrier()
            clocks.lap()
            for _ in range(count):
                run()
            self.times.setdefault(way, {}).setdefault(part, []).append(clocks.lap())
        detach()

    def _attach(self, way: str) -> Detach:
        training = self.training
        if way in {"default", "every-step"}:
            return attached(training, self.scratch / f"{way}-{self._blocks}", every_step=way == "every-step")
        if way == "settled":
            assert self.settled is not None
            return self.settled.attach()
        torch.autograd.set_detect_anomaly(way == "anomaly")
        handles = HOOKS[way](training.module) if way in HOOKS else []

        def detach() -> None:
            torch.autograd.set_detect_anomaly(False)
            for handle in handles:
                handle.remove()

        return detach

    def learn(self, steps: int) -> None:
        """Let the schedule of the settled monitor settle."""
        self.settled = Settled(self.scratch / "settled")
        detach = self.settled.attach()
        for _ in range(steps):
            self.training.step()
        detach()


def summed(times: dict[str, dict[str, list[list[float]]]]) -> dict[str, dict[str, list[list[float]]]]:
    """Return the sums over all ranks."""
    everyone: list[dict[str, dict[str, list[list[float]]]]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyone, times)
    return {
        way: {
            part: [
                [sum(clock) for clock in zip(*ranks, strict=True)]
                for ranks in zip(*(own[way][part] for own in everyone), strict=True)
            ]
            for part in parts
        }
        for way, parts in times.items()
    }


def ratios(mine: list[list[float]], plain: list[list[float]]) -> dict[str, list[float]]:
    """Return clock -> (median, lower quartile, upper quartile) of the rounds' ratios."""
    found = {}
    for number, clock in enumerate(CLOCKS):
        values = [own[number] / other[number] for own, other in zip(mine, plain, strict=True)]
        low, middle, high = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else values * 3
        found[clock] = [round(value, 4) for value in (middle, low, high)]
    return found


@contextmanager
def busy(count: int) -> Iterator[None]:
    """Keep so many busy loops running, on rank 0's machine."""
    number = count if dist.get_rank() == 0 else 0
    loops = [
        subprocess.Popen([sys.executable, "-c", _LOOP])  # noqa: S603 - our own text
        for _ in range(number)
    ]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def main() -> None:
    """Run the benchmark and print one line per way and part."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--depth", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--first", type=int, default=16, help="steps of the part `start`")
    parser.add_argument("--early", type=int, default=48, help="steps of the part `early`")
    parser.add_argument("--steady", type=int, default=32, help="steps of the part `steady`")
    parser.add_argument("--learn", type=int, default=100, help="steps in which the `settled` monitor settles")
    parser.add_argument("--busy", type=int, default=0, help="busy loops beside the job")
    parser.add_argument("--ways", default="plain,again,default")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", "Anomaly Detection has been enabled")
    dist.init_process_group("gloo")
    training = Training(args.width, args.depth, args.batch, args.tokens)
    ways = ["plain", *(way for way in args.ways.split(",") if way != "plain")]
    with tempfile.TemporaryDirectory() as scratch, busy(args.busy):
        bench = Bench(training, Path(scratch), dict(zip(PARTS, (args.first, args.early, args.steady), strict=True)))
        for _ in range(3):
            training.step()
        if "settled" in ways:
            bench.learn(args.learn)
        for number in range(args.rounds):
            at = number % len(ways)
            for way in ways[at:] + ways[:at]:
                bench.block(way)
            if dist.get_rank() == 0:
                print(f"round {number + 1}/{args.rounds}", flush=True)
        if bench.settled is not None:
            bench.settled.monitor.close()
    times = summed(bench.times)
    if dist.get_rank() == 0:
        report(times, bench, args)
    del bench, training
    gc.collect()
    dist.destroy_process_group()


def report(times: dict[str, dict[str, list[list[float]]]], bench: Bench, args: argparse.Namespace) -> None:
    """Print what was measured, and write it where that is wanted."""
    steady = [block[0] / dist.get_world_size() / args.steady for block in times["plain"]["steady"]]
    result: dict[str, object] = {
        "parameters": bench.training.size,
        "world": dist.get_world_size(),
        "busy": args.busy,
        "plain_step_seconds": round(statistics.median(steady), 4),
    }
    if bench.attaching:
        seconds = [round(lap[1], 3) for lap in bench.attaching]
        result["attaching the first time, processor seconds"] = seconds[0]
        result["attaching again, processor seconds"] = statistics.median(seconds[1:] or seconds)
    for key, value in result.items():
        print(f"{key}: {value}")
    print(f"{'':24}" + "".join(f"{clock:>24}" for clock in CLOCKS))
    for way, parts in times.items():
        for part, blocks in parts.items():
            if way != "plain":
                result[f"{way}: {part}"] = found = ratios(blocks, times["plain"][part])
                shown = [f"{middle:.3f} [{low:.3f}, {high:.3f}]" for middle, low, high in found.values()]
                print(f"{way + ', ' + part:24}" + "".join(f"{text:>24}" for text in shown))
    if args.json:
        args.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
