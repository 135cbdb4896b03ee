"""Seeds all generators of this process, so that ranks begin with the same model and see different noise.

| generator | seed | why |
|---|---|---|
| torch, on the CPU and on all devices | the same on all ranks | weights are initialised alike |
| Python's `random`, numpy's global generator | of the rank | augmentation in the training process |
| `Seeds.generator()`, for `DataLoader(generator=...)` | of the rank | the workers, all three generators |
| torch, after `Seeds.separate()` | of the rank | dropout; to be called once the model is built |

The order of a `DistributedSampler` is the business of its own `seed`, which has to be the same on all ranks.
"""

from __future__ import annotations

import importlib
import os
import random
from dataclasses import dataclass

import torch

from ddpdebug.errors import UsageError
from ddpdebug.fingerprint import of_text

#: What numpy's global generator takes.
_MOST = 2**32
#: What cuBLAS needs to be deterministic, by its documentation: two buffers of 4 MiB, or eight of 16 KiB.
WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
_WORKSPACE_SIZE = ":4096:8"

_COSTS = (
    "operations without a deterministic implementation raise a RuntimeError: the message names them",
    "cuDNN uses its deterministic algorithms and no longer chooses the fastest by trying: often 10 to 20 % slower",
    "index_add, scatter_add, cumsum and the backward of interpolation sort or run serially on a device",
    "new memory is filled before it is used (`torch.utils.deterministic.fill_uninitialized_memory`)",
    "cuBLAS keeps 32 MiB of workspace per handle",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Seeds:
    """What was seeded with what.

    Args:
        seed: of torch, the same on all ranks.
        data_seed: of what makes data, another on each rank.
        done: what was set, in words.
        left: what cannot be set from here, in words.
        costs: what deterministic mode costs; empty without it.
    """

    seed: int
    rank: int
    data_seed: int
    deterministic: bool
    done: tuple[str, ...]
    left: tuple[str, ...]
    costs: tuple[str, ...]

    def generator(self) -> torch.Generator:
        """Return a new generator for `DataLoader(generator=...)`: its workers are seeded from it."""
        return torch.Generator().manual_seed(self.data_seed)

    def separate(self) -> None:
        """Seed torch by rank from here on, so that dropout differs between ranks. Call it once the model is built."""
        torch.manual_seed(self.data_seed)


def seed_everything(seed: int, deterministic: bool = False, rank: int | None = None) -> Seeds:  # noqa: FBT001, FBT002 - the established signature
    """Seed Python, numpy and torch; the seed of the model is shared by the ranks, that of the data is not.

    Args:
        seed: from 0 to 2**32 - 1, the same on all ranks.
        deterministic: let torch use deterministic algorithms only. Call it before the first use of a GPU.
        rank: of this process. [default: the environment's RANK, else 0]

    Raises:
        ddpdebug.UsageError: the seed or the rank is none.
    """
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < _MOST:
        raise UsageError(f"seed must be a whole number from 0 to {_MOST - 1}, got {seed!r}")
    rank = int(os.environ.get("RANK", "0")) if rank is None else rank
    if rank < 0:
        raise UsageError(f"rank must not be negative, got {rank!r}")
    data_seed = of_text(f"data {seed} {rank}") % _MOST
    torch.manual_seed(seed)  # all devices too, also those that are not in use yet
    random.seed(data_seed)
    done = [f"torch: {seed}", f"random: {data_seed}"]
    try:
        importlib.import_module("numpy.random").seed(data_seed)
        done.append(f"numpy.random: {data_seed}")
    except ImportError:
        pass
    left = ["DataLoader: pass `generator=seeds.generator()`", "numpy.random.default_rng: pass it `seeds.data_seed`"]
    if not os.environ.get("PYTHONHASHSEED", "").isdecimal():
        left.append("PYTHONHASHSEED: set it before Python starts, or do not depend on the order of sets of strings")
    if deterministic:
        done += _be_deterministic(left)
    return Seeds(
        seed=seed,
        rank=rank,
        data_seed=data_seed,
        deterministic=deterministic,
        done=tuple(done),
        left=tuple(left),
        costs=_COSTS if deterministic else (),
    )


def _be_deterministic(left: list[str]) -> list[str]:
    torch.use_deterministic_algorithms(mode=True)
    torch.backends.cudnn.benchmark = False
    torch.backends.cudnn.deterministic = True
    done = ["torch.use_deterministic_algorithms(True)", "cudnn.benchmark = False", "cudnn.deterministic = True"]
    if WORKSPACE not in os.environ:
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            left.append(f"{WORKSPACE}: set it to {_WORKSPACE_SIZE} before the first use of a GPU")
        else:
            os.environ[WORKSPACE] = _WORKSPACE_SIZE
            done.append(f"{WORKSPACE}={_WORKSPACE_SIZE}")
    return done
