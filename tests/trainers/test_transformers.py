"""The Trainer of Transformers under `ddpdebug run` and with the callback, against what it logs and leaves."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from ddpdebug.run_directory.reader import read_findings, read_run, read_steps
from ddpdebug.schema.finding import Severity
from ddpdebug.schema.step import Step

pytest.importorskip("accelerate")
pytest.importorskip("transformers")
pytestmark = [pytest.mark.jobs, pytest.mark.slow]

_PARTS = """
import json, os, pickle, sys
import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

class Texts(Dataset):
    def __init__(self, count):
        numbers = torch.arange(12)
        self.rows = [(n + (1 + n % 3) * numbers) % 30 for n in range(count)]
    def __len__(self):
        return len(self.rows)
    def __getitem__(self, n):
        labels = self.rows[n].clone()
        labels[: n % 5] = -100
        return {"input_ids": self.rows[n], "labels": labels}

def model():
    sizes = dict(vocab_size=30, n_positions=16, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
    return GPT2LMHeadModel(GPT2Config(**sizes))

def arguments(**more):
    given = dict(per_device_train_batch_size=4, learning_rate=2e-3, report_to=[], disable_tqdm=True, use_cpu=True)
    return TrainingArguments("out", **(given | more))

set_seed(0)
"""
#: 14 batches on each rank, three to a step: the last step of an epoch has two.
_SCRIPT = (
    _PARTS
    + """
args = arguments(
    num_train_epochs=2, gradient_accumulation_steps=3, bf16=True, ddp_backend="gloo", logging_steps=1,
    per_device_eval_batch_size=8, eval_strategy="steps", eval_steps=4, save_strategy="epoch",
)
callbacks = []
if "callback" in sys.argv:
    from ddpdebug.trainers.transformers import DebugCallback
    callbacks = [DebugCallback(out="o", every_step=True, metrics="off")]
trainer = Trainer(model(), args, train_dataset=Texts(112), eval_dataset=Texts(39), callbacks=callbacks)
trainer.train(resume_from_checkpoint="out/checkpoint-5" if "callback" in sys.argv else None)
"""
)
_EVENTS = (
    _PARTS
    + """
from ddpdebug.monitor.attach import current
from ddpdebug.trainers.transformers import DebugCallback

class Fails(Trainer):
    at = None
    def compute_loss(self, *args, **kwargs):
        if self.state.global_step == self.at:
            raise LookupError("no such text")
        return super().compute_loss(*args, **kwargs)

callback = DebugCallback(val_loss="eval_second_loss", metrics="off")
args = arguments(max_steps=3, save_strategy="no", eval_strategy="steps", eval_steps=1)
data = {"first": Texts(4), "second": Texts(8)}
trainer = Fails(model(), args, train_dataset=Texts(32), eval_dataset=data, callbacks=[callback])
opened = current()
trainer.evaluate()
copy = pickle.loads(pickle.dumps(callback))
told = [opened.probes.calls.tells_validation]
trainer.train()
told += [opened.probes.calls.tells_validation, opened.closed, current() is None]
trainer.at = 1
try:
    trainer.train()
except LookupError:
    told.append(current() is not None)
trainer.at = None
trainer.train()
told.append(current() is None)
wrong = Trainer(model(), args, train_dataset=Texts(32), eval_dataset=data, callbacks=[DebugCallback(val_loss="loss")])
wrong.train()
json.dump(told, open("told.json", "w"))
trainer.at = 2
trainer.train()
"""
)
_SETTINGS = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "DDPDEBUG_METRICS": "off"}
_TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
_WATCHED = ["-m", "ddpdebug", "run", "--nproc-per-node", "2", "--every-step", "--out", "o"]


def _run(cwd: Path, *words: str) -> str:
    done = subprocess.run(
        [sys.executable, *words], cwd=cwd, env={**os.environ, **_SETTINGS}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stderr


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    """Train plain, watched, and with the callback from the plain one's first checkpoint on."""
    found = {name: tmp_path_factory.mktemp(name) for name in ("plain", "watched", "callback")}
    for folder in found.values():
        (folder / "train.py").write_text(_SCRIPT, "utf-8")
    _run(found["plain"], *_TORCHRUN, "train.py")
    _run(found["watched"], *_WATCHED, "train.py")
    shutil.copytree(found["plain"] / "out" / "checkpoint-5", found["callback"] / "out" / "checkpoint-5")
    _run(found["callback"], *_TORCHRUN, "train.py", "callback")
    return found


def _log(folder: Path, key: str) -> dict[int, Any]:
    """Return what the trainer has logged under a name, by its step."""
    state = json.loads((folder / "out" / "checkpoint-10" / "trainer_state.json").read_text("utf-8"))
    return {entry["step"]: entry[key] for entry in state["log_history"] if key in entry}


def _steps(folder: Path) -> list[Step]:
    return list(read_steps(folder / "o"))


def _mean(step: Step, name: str) -> float:
    """Return a column's mean over both ranks."""
    values = [float(getattr(row, name)) for row in step.rows.values()]
    assert len(values) == 2
    return sum(values) / 2


@pytest.mark.parametrize("how", ["watched", "callback"])
def test_it_trains_as_it_does_without(how: str, runs: Mapping[str, Path]) -> None:
    """Weights, optimizer, schedule, random states and losses at the end, also from a checkpoint on."""
    plain, other = (runs[name] / "out" / "checkpoint-10" for name in ("plain", how))
    names = sorted(path.name for path in plain.iterdir())
    assert {"model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state_1.pth"} < set(names)
    assert sorted(path.name for path in other.iterdir()) == names
    different = [name for name in names if (plain / name).read_bytes() != (other / name).read_bytes()]
    assert set(different) <= {"trainer_state.json"}  # which has times in it
    for key in ("loss", "grad_norm", "learning_rate", "eval_loss"):
        assert _log(runs[how], key) == _log(runs["plain"], key)


def test_each_steps_loss_is_the_logged_one(runs: Mapping[str, Path]) -> None:
    """In bfloat16 too, and in the steps at the ends of the epochs, which have fewer micro-batches."""
    steps, logged = _steps(runs["watched"]), _log(runs["watched"], "loss")
    assert [[row.micro_batches for row in step.rows.values()] for step in steps] == 2 * (4 * [[3, 3]] + [[2, 2]])
    assert [_mean(step, "loss") for step in steps] == pytest.approx([logged[n] for n in range(1, 11)], rel=1e-5)
    norms = [step.rows[0].clip_norm for step in steps]
    assert norms == pytest.approx(list(_log(runs["watched"], "grad_norm").values()), rel=1e-5)


def test_validation_losses_are_seen_without_code(runs: Mapping[str, Path]) -> None:
    """The mean of the batches, where the trainer has that of the texts."""
    steps, logged = _steps(runs["watched"]), _log(runs["watched"], "eval_loss")
    seen = {n: value for n, step in enumerate(steps) if (value := _mean(step, "val_loss")) == value}
    assert seen == {n: pytest.approx(logged[n], rel=5e-3) for n in (4, 8)}


def test_the_callback_tells_the_validation_loss(runs: Mapping[str, Path]) -> None:
    """To the bit, with the step that follows; the resumed training begins with step 0."""
    steps, logged = _steps(runs["callback"]), _log(runs["callback"], "eval_loss")
    assert len(steps) == 5
    assert {n: value for n, step in enumerate(steps) if (value := _mean(step, "val_loss")) == value} == {3: logged[8]}


@pytest.mark.parametrize("how", ["watched", "callback"])
def test_nothing_is_found_in_a_training_that_is_right(how: str, runs: Mapping[str, Path]) -> None:
    """No warning for accumulation, evaluation, checkpoints, or the way back from one."""
    # which rank is slow is the machine's affair
    found = [f for f in read_findings(runs[how] / "o") if f.severity >= Severity.WARNING]
    assert [f for f in found if not f.code.startswith("SLOW")] == []
    outcome = read_run(runs[how] / "o")["outcome"]
    assert (outcome["reason"], outcome["exit_code"]) == ("finished", 0)


def test_each_training_is_a_run(tmp_path: Path) -> None:
    """A second one as well; one that an exception has ended goes on in the next, or has it for its outcome."""
    (tmp_path / "events.py").write_text(_EVENTS, "utf-8")
    done = subprocess.run(
        [sys.executable, "events.py"],
        cwd=tmp_path,
        env={**os.environ, **_SETTINGS},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert json.loads((tmp_path / "told.json").read_text("utf-8")) == [False, True, True, True, True, True], done.stderr
    assert done.stderr.count("ddpdebug: no metric 'loss' for the validation loss; logged were: 'epoch'") == 1
    assert "no metric 'eval_second_loss'" not in done.stderr
    found = [read_run(path)["outcome"] for path in sorted((tmp_path / "ddpdebug-runs").iterdir())]
    reasons = sorted((outcome["reason"], outcome["steps"]["0"]) for outcome in found)
    assert reasons == [("exception: LookupError: no such text", 2), *[("finished", 3)] * 2, ("finished", 4)]


def test_an_evaluation_without_metrics_is_none() -> None:
    """A Trainer's own `evaluate` may call back with nothing."""
    from ddpdebug.trainers.transformers import DebugCallback

    callback = DebugCallback()
    callback._trains = True
    callback.on_evaluate(None, None, None)
    callback.on_evaluate(None, None, None, metrics={"eval_runtime": 1.0})
    assert callback._metrics == {"eval_runtime": 1.0}
