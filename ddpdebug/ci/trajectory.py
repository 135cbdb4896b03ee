"""Writes the path that training takes, for `check --record` and `--golden`: every parameter after every step.

Rank 0 writes; a healthy job's ranks agree. The shaken run measures what rounding does to this script: after each step
every weight moves by as much as another order of summation could move it, alike on all ranks.
"""

from __future__ import annotations

import json
import math
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from ddpdebug.ci.faults import on_wrapping
from ddpdebug.ci.golden import TRAJECTORY
from ddpdebug.fingerprint import fingerprint


def install(environ: Mapping[str, str]) -> None:
    """Write the path of this run where its starter wants it, if it does."""
    shaken, _, file = environ.get(TRAJECTORY, "").partition(" ")
    if file:
        _Writer(Path(file) if environ.get("RANK", "0") == "0" else None, shaken == "1").install()


class _Writer:
    def __init__(self, file: Path | None, shaken: bool) -> None:  # noqa: FBT001 - internal
        self._file: IO[str] | None = None if file is None else file.open("w", encoding="utf-8")
        self._shaken = shaken
        self._names: dict[int, str] = {}
        self._steps: dict[int, int] = {}
        self._generator = torch.Generator().manual_seed(0)  # of its own: the job's random numbers stay the job's

    def install(self) -> None:
        on_wrapping(self._learn)
        register_optimizer_step_post_hook(self._after)

    def _learn(self, ddp: Any) -> None:
        self._names.update({id(param): name for name, param in ddp.module.named_parameters()})

    def _after(self, optimizer: Any, *_: Any) -> None:
        key = id(optimizer)
        number = list(self._steps).index(key) if key in self._steps else len(self._steps)
        step = self._steps[key] = self._steps.get(key, -1) + 1
        params = [param for group in optimizer.param_groups for param in group["params"]]
        if self._shaken:
            for param in params:
                self._shake(param.detach())
        if self._file is None:
            return
        if step == 0 and number == 0:
            self._write({"platform": _platform(params), "epsilon": _epsilon(params)})
        values = {
            self._names.get(id(param), f"parameter {place} of optimizer {number}"): [
                f"{fingerprint(param.detach()):016x}",
                float(torch.linalg.vector_norm(param.detach().double())),
            ]
            for place, param in enumerate(params)
        }
        self._write({"optimizer": number, "step": step, "params": values})

    def _write(self, record: Mapping[str, Any]) -> None:
        assert self._file is not None
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()

    def _shake(self, values: torch.Tensor) -> None:
        if values.is_floating_point() and values.numel():
            signs = torch.randint(0, 2, values.shape, generator=self._generator).to(values.device) * 2 - 1
            values.add_(values * signs * _epsilon([values]))


def _epsilon(params: list[torch.Tensor]) -> float:
    """Return the rounding error of a sum as long as the longest in these: it grows with the root of the length."""
    floating = [param for param in params if param.is_floating_point() and param.numel()]
    return max(
        (torch.finfo(param.dtype).eps * math.sqrt(max((1, *param.shape))) for param in floating),
        default=0.0,
    )


def _platform(params: list[torch.Tensor]) -> dict[str, Any]:
    """Return what must be equal for training to be equal bit for bit."""
    devices = sorted({param.device.type for param in params})
    names = [torch.cuda.get_device_name(param.device) for param in params[:1] if param.is_cuda]
    return {
        "torch": str(torch.__version__),
        "machine": platform.machine(),
        "processor": names[0] if names else _processor(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "devices": devices,
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
