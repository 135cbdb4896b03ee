"""How fast fingerprints are, measured against `sum()` over the same memory. Run: python benchmarks/fingerprint.py."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping

import torch

from ddpdebug.device_fingerprint import device_fingerprints
from ddpdebug.fingerprint import fingerprint, fingerprints, sampled_fingerprint

ROUNDS = 9


def seconds(methods: Mapping[str, Callable[[], object]]) -> dict[str, float]:
    """Return the median time of each method, measured in alternation so that a busy machine is unfair to none."""
    times: dict[str, list[float]] = {name: [] for name in methods}
    for _ in range(ROUNDS):
        for name, method in methods.items():
            start = time.perf_counter()
            method()
            times[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in times.items()}


def large() -> None:
    """Print the throughput on one tensor of 100 MB."""
    tensor = torch.randn(25_000_000)
    transposed = tensor.view(5000, 5000).T
    found = seconds(
        {
            "sum()": tensor.sum,
            "fingerprint": lambda: fingerprint(tensor),
            "fingerprint, transposed": lambda: fingerprint(transposed),
            "sampled_fingerprint, 1 MiB": lambda: sampled_fingerprint(tensor),
            "device_fingerprints on the CPU": lambda: device_fingerprints([tensor]),
        }
    )
    for name, value in found.items():
        speed = tensor.nbytes / value / 1e9
        print(f"{name:32s} {value * 1e3:9.2f} ms  {speed:7.1f} GB/s  {value / found['sum()']:6.2f} x sum()")


def small() -> None:
    """Print the cost of one small tensor, where the Python code dominates."""
    tensors = [torch.nn.Parameter(torch.randn(64)) for _ in range(1000)]
    found = seconds({"fingerprints": lambda: fingerprints(tensors), "sum()": lambda: [t.sum() for t in tensors]})
    for name, value in found.items():
        print(f"{name + ', one of 1000 of 256 bytes':32s} {value * 1e3:9.2f} us  {value / found['sum()']:6.2f} x sum()")


def model() -> None:
    """Print the throughput over the parameters of a transformer."""
    layer = torch.nn.TransformerEncoderLayer(512, 8)
    parameters = list(torch.nn.TransformerEncoder(layer, 8, enable_nested_tensor=False).parameters())
    size = sum(p.nbytes for p in parameters)
    found = seconds({"sum()": lambda: [p.sum() for p in parameters], "fingerprints": lambda: fingerprints(parameters)})
    for name, value in found.items():
        label = f"{name}, {len(parameters)} parameters"
        print(
            f"{label:32s} {value * 1e3:9.2f} ms  {size / value / 1e9:7.1f} GB/s  {value / found['sum()']:6.2f} x sum()"
        )


if __name__ == "__main__":
    torch.set_num_threads(1)
    with torch.no_grad():
        large()
        model()
        small()
