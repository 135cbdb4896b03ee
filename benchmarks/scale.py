"""What very many ranks cost each of them: thousands as light objects around the classes that a job runs.

    python benchmarks/scale.py [--worlds 64,1024,8192] [--steps 16]

Every rank of a world has its real row, its real place in the tree and what its real classes make of it; only gloo is
not there: bytes go from hand to hand in one thread. Printed are processor times for a step (the least of the rounds,
for the machine has other work), the bytes that come into a rank for a healthy step, connections, and what the rank that
judges keeps.
"""

from __future__ import annotations

import argparse
import random
import time
import tracemalloc
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from ddpdebug.diagnosis.engine import Diagnosis
from ddpdebug.exchange.partial import Partial
from ddpdebug.exchange.tree import Circle, _packed, _unpacked, circles
from ddpdebug.monitor.many_ranks import ManyRanks, chosen_step
from ddpdebug.monitor.sampling import Schedule
from ddpdebug.schema.announcements import read_announcement
from ddpdebug.schema.row import DIGESTS, Flag, Row, encode

_OF_ONE = ("batch_digest", "record_digest", "output_digest", "rng_digest")


def row(rank: int, step: int, draw: random.Random) -> bytes:
    """Return the row of a rank in a checked step of healthy training."""
    fields: dict[str, Any] = {
        name: hash((name, step)) & ((1 << 63) - 1) for name in DIGESTS if not name.startswith("eval")
    }
    fields |= {name: draw.getrandbits(63) for name in _OF_ONE}
    for slot in range(8):
        fields |= {f"local_sum_{slot}": draw.gauss(0, 1), f"local_norm_{slot}": draw.random()}
        fields[f"reduced_sum_{slot}"] = (hash((step, slot)) % 1000) / 7
    fields |= {"step_seconds": draw.gauss(0.25, 0.01), "data_seconds": 0.01, "forward_seconds": 0.08}
    fields |= {"backward_seconds": 0.14, "backward_local_seconds": draw.gauss(0.12, 0.005), "optimizer_seconds": 0.01}
    fields |= {"sync_wait_seconds": 0.02, "collective_seconds": 0.0, "overhead_seconds": 0.002, "cpu_seconds": 0.24}
    fields |= {"host_private_bytes": 1_000_000_000 + draw.randrange(1 << 26), "batch_elements": 4096}
    known = {"loss": draw.gauss(2, 0.1), "lr": 1e-3, "grad_norm": 1.5, "local_grad_norm": draw.gauss(2, 0.1)}
    return encode(
        Row(rank=rank, step=step, flags=int(Flag.CHECKED), syncs=step + 1, micro_batches=1, **fields, **known)
    )


class World:
    """All ranks, in one thread."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.groups: dict[int, set[Circle]] = defaultdict(set)
        self.connections = 0
        for rank in range(size):
            own = circles(range(size), rank)
            self.connections = max(self.connections, sum(len(circle.members) - 1 for circle in own))
            for circle in own:
                self.groups[circle.level].add(circle)

    def tick(self, partials: list[Partial], spent: dict[str, float], came: list[int]) -> Partial:
        """Return what all ranks hear; add the times of each role and the bytes that came in."""
        here = dict(enumerate(partials))
        for level in sorted(self.groups):
            for circle in self.groups[level]:
                role = "leads neighbours" if level == 0 else "leads all" if circle.members[0] == 0 else "leads a group"
                sent = [_packed(here.pop(rank)) for rank in circle.members[1:]]
                begun = time.thread_time()
                own = here[circle.members[0]]
                for data in sent:
                    own.merge(_unpacked(data))
                _packed(own)
                spent[role] = max(spent.get(role, 0.0), time.thread_time() - begun)
                came[circle.members[0]] += sum(map(len, sent))
        data = _packed(here[0])
        for rank in range(1, self.size):
            came[rank] += len(data)
        begun = time.thread_time()
        found = _unpacked(data)
        spent["hears"] = time.thread_time() - begun
        return found


def measure(size: int, steps: int) -> dict[str, Any]:
    """Return what a world of this size costs."""
    draw, world = random.Random(size), World(size)  # noqa: S311 - no secret
    many, schedule = ManyRanks(size, lambda _: None), Schedule(budget=0.01, every_step=False)
    diagnosis = Diagnosis(world=size, config={"world": size})
    times: dict[str, list[float]] = defaultdict(list)
    came = [0] * size
    everyone = (1 << size) - 1
    for number in range(0, steps, 4):
        partials = []
        for rank in range(size):
            own = Partial(progress=number + 4, least=number + 4)
            for step in range(64 + number, 64 + number + 4):
                own.add_row(row(rank, step, draw))
            partials.append(own)
        spent: dict[str, float] = {}
        heard = world.tick(partials, spent, came)
        for role, seconds in spent.items():
            times[role].append(seconds / 4)
        begun = time.thread_time()
        for key, part in heard.steps.items():
            many.parts.add(key, part)
        chosen = [(key, part, chosen_step(key, part)) for key, part in many.parts.ready(everyone)]
        for _, _, step in chosen:
            schedule.learn(step, step.step + 1)
        times["follows"].append((time.thread_time() - begun) / 4)
        begun = time.thread_time()
        for _, _, step in chosen:
            diagnosis.feed(step)
        diagnosis.tick()
        times["judges"].append((time.thread_time() - begun) / 4)
    return {
        "times": {role: 1e3 * min(values) for role, values in times.items()},
        "bytes": {"most": max(came) / steps, "median": sorted(came)[size // 2] / steps},
        "connections": world.connections,
        "levels": len(world.groups),
    }


def kept(size: int, tensors: int = 288) -> float:
    """Return how many MiB the judge keeps of the ranks' announcements of a model's structure and values."""
    names = [f"layers.{number // 12}.block.{number % 12}.weight" for number in range(tensors)]
    values: dict[str, Callable[[], Any]] = {
        "structure:0": lambda: {"digest": "00", "parameters": [[name, [64, 64], "float32"] for name in names]},
        "group:0": lambda: {"ranks": list(range(size))},
    }
    tracemalloc.start()
    diagnosis = Diagnosis(world=size, config={"world": size})
    for topic, make in values.items():
        announcement = read_announcement(topic, make())
        for rank in range(size):
            diagnosis.tell(topic, rank, announcement)
    diagnosis.tick()
    used, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return used / (1 << 20)


def main() -> None:
    """Print a table for each world."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--worlds", default="64,1024,8192")
    parser.add_argument("--steps", type=int, default=16)
    arguments = parser.parse_args()
    for size in map(int, arguments.worlds.split(",")):
        result = measure(size, arguments.steps)
        print(f"\n{size} ranks, {result['levels']} levels, at most {result['connections']} connections")
        for role, milliseconds in result["times"].items():
            print(f"  {role:<18} {milliseconds:8.3f} ms of processor time a step")
        bytes_ = result["bytes"]
        print(f"  bytes into a rank  {bytes_['median']:8.0f} a step in the median, {bytes_['most']:.0f} at most")
        print(f"  kept of announcements {kept(size):8.1f} MiB on the rank that judges")


if __name__ == "__main__":
    main()
