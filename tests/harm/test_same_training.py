"""Training is bit for bit the same with ddpdebug as without it."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

#: name -> (script, arguments, ranks)
SCRIPTS: dict[str, tuple[str, list[str], int]] = {
    "convolutions, BatchNorm, dropout, clipping, scheduler": ("cnn.py", [], 2),
    "transformer with autocast and GradScaler": ("transformer_amp.py", [], 2),
    "accumulation with no_sync, gradients as bucket views": ("accumulation.py", [], 2),
    "GAN with a gradient penalty": ("gan.py", [], 2),
    "unused parameters": ("unused_parameters.py", [], 2),
    "uneven data with Join": ("join_uneven.py", [], 2),
    "static graph with checkpointing": ("static_graph.py", [], 2),
    "LBFGS": ("lbfgs.py", [], 2),
    "torch.compile inside, around, of the step": ("compiled.py", [], 2),
    "optimizers inside backward": ("optimizer_in_backward.py", [], 2),
    "comm hooks": ("comm_hooks.py", [], 2),
    "EMA by deepcopy, whole modules pickled": ("ema_and_pickle.py", ["."], 2),
    "DataLoader workers by fork and by spawn": ("loader_workers.py", [], 2),
    "a script that starts its own ranks": ("starts_processes.py", [], 1),
    "groups and models that come and go": ("groups_come_and_go.py", [], 2),
    "nested outputs, shared modules, masks of -inf, checkpointing": ("numerics.py", ["none", "adamw"], 2),
    "one process without a group": ("one_process.py", [], 1),
    "dropout in eval mode and a mask that is missing, compiled too": ("recipes.py", [], 2),
}
#: Also with sampling, which in runs as short as these differs little from checking every step.
_SAMPLED = {"convolutions, BatchNorm, dropout, clipping, scheduler", "GAN with a gradient penalty", "unused parameters"}
#: What CI runs of these for each change; the others are `make test-slow`.
_ALWAYS = {
    "convolutions, BatchNorm, dropout, clipping, scheduler",
    "transformer with autocast and GradScaler",
    "accumulation with no_sync, gradients as bucket views",
    "GAN with a gradient penalty",
    "unused parameters",
}
_UNWATCHED = {"a script that starts its own ranks"}
_MODES: dict[str, list[str] | None] = {
    "plain": None,
    "default": [],
    "every step": ["--every-step"],
}


def _cases() -> list[Any]:
    mark = {name: pytest.mark.smoke if name in _ALWAYS else pytest.mark.slow for name in SCRIPTS}
    cases = [pytest.param(name, "every step", marks=mark[name]) for name in SCRIPTS]
    return cases + [pytest.param(name, "default", marks=pytest.mark.thorough) for name in sorted(_SAMPLED)]


@pytest.fixture(scope="module")
def results(
    run_jobs: Callable[..., Any], selected: set[tuple[str, ...]], tmp_path_factory: pytest.TempPathFactory
) -> dict[tuple[str, str], Any]:
    """Run what is selected once; plain and watched directly after each other, so that the times can be compared."""
    keys, jobs = [], []
    for name, (script, args, ranks) in SCRIPTS.items():
        for mode, options in _MODES.items():
            if mode != "plain" and (name, mode) not in selected:
                continue
            if mode == "plain" and not any(case[0] == name for case in selected):
                continue
            cwd = tmp_path_factory.mktemp("run")
            keys.append((name, mode))
            jobs.append({"script": script, "args": args, "ranks": ranks, "options": options, "cwd": str(cwd)})
    done = run_jobs(jobs)
    return {key: (job["cwd"], result) for key, job, result in zip(keys, jobs, done, strict=True)}


@pytest.mark.jobs
@pytest.mark.parametrize("name, mode", _cases())
def test_same(name: str, mode: str, results: dict[tuple[str, str], Any], compare: Callable[..., list[str]]) -> None:
    """Weights, optimizer state, random state, losses, output and exit status are equal."""
    _, plain = results[name, "plain"]
    _, watched = results[name, mode]
    assert all(rank["status"] == 0 and rank["out"] for rank in plain), plain
    assert compare(plain, watched) == []
    if name not in _UNWATCHED:
        _was_watched(results[name, mode])


def _was_watched(result: tuple[str, Any]) -> None:
    """Check that the comparison meant something: steps were seen, and no part of ddpdebug has switched itself off."""
    folder, watched = result
    err = watched[0]["err"]
    assert "switched itself off" not in err, err
    assert "no optimizer step was seen" not in err, err
    assert list(Path(folder).glob("ddpdebug-runs/*/run.json"))


@pytest.mark.jobs
@pytest.mark.slow
@pytest.mark.parametrize("name, mode", [("EMA by deepcopy, whole modules pickled", "every step")])
def test_pickles_need_no_ddpdebug(
    name: str,
    mode: str,
    results: dict[tuple[str, str], Any],
    python: Callable[..., subprocess.CompletedProcess[str]],
    tmp_path: Path,
) -> None:
    """A whole module that was saved under ddpdebug loads and runs where ddpdebug is not installed."""
    folder, _ = results[name, mode]
    source = """
import sys
sys.modules["ddpdebug"] = None
import torch
saved = torch.load(sys.argv[1], weights_only=False)
for module in saved.values():
    assert not any(len(m._forward_pre_hooks) for m in module.modules())
    module(torch.ones(2, 8))
"""
    done = python(source, tmp_path, f"{folder}/whole.pt")
    assert done.returncode == 0, done.stderr


@pytest.mark.jobs
@pytest.mark.slow
@pytest.mark.parametrize(
    "name, mode", [("dropout in eval mode and a mask that is missing, compiled too", "every step")]
)
def test_forwards_that_were_followed(name: str, mode: str, results: dict[tuple[str, str], Any]) -> None:
    """The comparison of this script meant something: an evaluation was followed, and a forward was run again."""
    folder, _ = results[name, mode]
    (run,) = Path(folder).glob("ddpdebug-runs/*/findings.jsonl")
    assert all(f'"code": "{code}"' in run.read_text() for code in ("RCP820", "RCP821"))


_HARMS = {
    "draws a random number": "import torch; torch.rand(1)",
    "changes one bit of a weight": "w = args[0].ddp.module[0].weight.data.view(torch.int32); w[0] ^= 1",
}


@pytest.mark.slow
@pytest.mark.jobs
def test_sees_harm(run_jobs: Callable[..., Any], compare: Callable[..., list[str]]) -> None:
    """The comparison is not blind: one random number drawn, or one bit flipped, is seen on every rank."""
    jobs: list[dict[str, Any]] = [{"script": "steady.py", "args": ["6", "-"], "options": None}]
    for harm in _HARMS.values():
        source = f"""
import torch
from ddpdebug.probes.recorder import Recorder
original = Recorder.end_forward
def end_forward(self, *args):
    {harm}
    return original(self, *args)
Recorder.end_forward = end_forward
"""
        jobs.append({**jobs[0], "options": [], "inject": {"0": source, "1": source}})
    plain, *harmed = run_jobs(jobs)
    for result in harmed:
        assert [rank["status"] for rank in result] == [0, 0], result
        assert len([text for text in compare(plain, result) if "output\n" in text]) == 2
