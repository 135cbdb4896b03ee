"""The callback for Lightning in a real Trainer of one process, and what Lightning loads of ours."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import ddpdebug
from ddpdebug.config.settings import Config
from ddpdebug.isolation.guard import Guard
from ddpdebug.monitor.attach import current
from ddpdebug.run_directory.reader import read_rows, read_run
from ddpdebug.trainers import launched, lightning_plugin

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of its own imports
    import lightning

    from ddpdebug.trainers.lightning import AddedCallback, DebugCallback

pytestmark = pytest.mark.filterwarnings("ignore")  # Lightning advises more workers, a log directory and so on


class Line(lightning.LightningModule):
    def __init__(self, fails: bool = False) -> None:
        super().__init__()
        self.net, self.fails = torch.nn.Linear(2, 1), fails

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        if self.fails and self.global_step == 2:
            raise ZeroDivisionError("on purpose")
        return self.net(batch[0]).square().mean()

    def validation_step(self, batch: Any, index: int) -> None:
        self.log("val_loss", torch.tensor(2.5))
        self.log("accuracy", torch.tensor(0.5))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.fixture
def fit(tmp_path: Path) -> Callable[..., lightning.Trainer]:
    """Train for two epochs of three steps."""

    def run(*callbacks: Any, fails: bool = False, **options: Any) -> lightning.Trainer:
        trainer = lightning.Trainer(
            accelerator="cpu",
            max_epochs=2,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=tmp_path,
            callbacks=list(callbacks),
            **options,
        )
        loader = DataLoader(TensorDataset(torch.randn(12, 2)), batch_size=4)
        trainer.fit(Line(fails), loader, loader)
        return trainer

    return run


def test_a_wrong_option_is_an_error_where_the_callback_is_made() -> None:
    """Before there is a model, and with the names that are valid."""
    with pytest.raises(ddpdebug.UsageError, match="every_step"):
        DebugCallback(every_stop=True)


def test_each_fit_is_a_run(fit: Callable[..., Any], tmp_path: Path) -> None:
    """It has its steps, the validation loss of both epochs but the last, and an outcome; then nothing is attached."""
    seen: list[Any] = []

    class Looks(lightning.Callback):
        def on_train_start(self, *_: Any) -> None:
            seen.append(current())

    for name in ("one", "two"):
        trainer = fit(DebugCallback(out=tmp_path / name, metrics="off"), Looks())
        assert not any(isinstance(one, AddedCallback) for one in trainer.callbacks)
        run, rows = read_run(tmp_path / name), list(read_rows(tmp_path / name))
        assert run["outcome"]["reason"] == "finished"
        assert [row.step for row in rows] == list(range(6))
        assert [row.val_loss for row in rows if row.val_loss == row.val_loss] == [2.5]
        assert current() is None
    assert len({id(one) for one in seen if one is not None}) == 2


def test_a_fit_without_a_step_leaves_nothing_attached(fit: Callable[..., Any], tmp_path: Path) -> None:
    """Lightning tells of no end of training then."""
    callback = DebugCallback(out=tmp_path / "run", metrics="off")
    fit(callback, limit_train_batches=0)
    assert current() is None


@pytest.mark.smoke
@pytest.mark.parametrize("name, value", [("DDPDEBUG_FOO", "1"), ("DDPDEBUG_BUDGET", "much")])
def test_a_variable_that_is_wrong_later_ends_nothing(
    fit: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    """Settings are read once: where the callback is made, or the process was attached to."""
    callback = DebugCallback(out=tmp_path / "run", metrics="off")
    with ddpdebug.watch(out=tmp_path / "watched", metrics="off"):
        monkeypatch.setenv(name, value)
        assert fit().global_step == 6
    assert fit(callback).global_step == 6
    assert read_run(tmp_path / "run")["outcome"]["reason"] == "finished"


def test_what_fails_is_the_outcome(fit: Callable[..., Any], tmp_path: Path) -> None:
    """The error comes through and is named."""
    with pytest.raises(ZeroDivisionError, match="on purpose"):
        fit(DebugCallback(out=tmp_path / "run", metrics="off"), fails=True)
    assert read_run(tmp_path / "run")["outcome"]["reason"] == "exception: ZeroDivisionError: on purpose"
    assert current() is None


def test_a_monitor_that_is_there_is_used_and_left(fit: Callable[..., Any], tmp_path: Path) -> None:
    """Its validation losses come by the callback that Lightning adds, without a word in the script."""
    with ddpdebug.watch(out=tmp_path / "run", metrics="off") as monitor:
        trainer = fit()
        assert [type(one) for one in trainer.callbacks if isinstance(one, DebugCallback)] == [AddedCallback]
        fit(DebugCallback(val_loss="accuracy", out=tmp_path / "none"))
        assert current() is monitor
    assert not (tmp_path / "none").exists()
    losses = [row.val_loss for row in read_rows(tmp_path / "run") if row.val_loss == row.val_loss]
    assert losses == [2.5, 2.5, 0.5]  # and the last evaluation, after which there is no step


def test_a_monitor_that_cannot_be_made_ends_no_training(
    fit: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is said."""

    def fails(*_: Any, **__: Any) -> None:
        raise OSError("no room")

    monkeypatch.setattr("ddpdebug.trainers.attachment.install", fails)
    assert fit(DebugCallback()).global_step == 6
    assert "could not attach, training runs without it: OSError: no room" in capsys.readouterr().err


def test_a_metric_that_is_not_there_is_said_once(
    fit: Callable[..., Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With those that are."""
    fit(DebugCallback(val_loss="loss/val", out=tmp_path / "run", metrics="off"))
    said = "ddpdebug: no metric 'loss/val' for the validation loss; logged were: 'accuracy', 'val_loss'\n"
    assert capsys.readouterr().err.count(said) == 1


_NAMES = {"val_loss", "valid/loss", "eval_loss", "val_loss_epoch", "Validation Loss"}
_OTHERS = {"train_loss", "val_accuracy", "loss", "val_loss_step"}


@pytest.mark.parametrize("name", sorted(_NAMES | _OTHERS))
def test_names_of_validation_losses(name: str) -> None:
    """Those that say it, whatever stands between the words."""
    told: list[Any] = []

    class Monitor:
        guard = Guard(lambda part, message: pytest.fail(f"{part}: {message}"))

        def observe(self, **values: Any) -> None:
            told.append(values)

    callback = DebugCallback()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ddpdebug.trainers.attachment.current", Monitor)
        callback._attachment.tell({"other": 1.0, name: 2.0})
    assert told == ([{"val_loss": 2.0}] if name in _NAMES else [])


def test_lightning_loads_nothing_where_nobody_watches() -> None:
    """Its entry points are loaded in all its jobs, also those that have nothing to do with ddpdebug."""
    code = (
        "import sys; from importlib.metadata import entry_points\n"
        "groups = 'lightning.pytorch', 'pytorch_lightning', 'lightning.fabric', 'lightning_fabric'\n"
        "ours = {'name': 'ddpdebug'}\n"
        "found = [one for group in groups for one in entry_points(group=group + '.callbacks_factory', **ours)]\n"
        "made = [one.load()() for one in found]\n"
        "assert made == [[], [], [], []], made\n"
        "print(sorted(name for name in sys.modules if name == 'torch' or name.startswith('ddpdebug')))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    light = [
        "ddpdebug",
        "ddpdebug._version",
        "ddpdebug.clock",
        "ddpdebug.printing",
        "ddpdebug.signals",
        "ddpdebug.trainers",
        "ddpdebug.trainers.lightning_plugin",
    ]
    assert done.stdout == f"{light}\n"


@pytest.mark.parametrize(
    "starter, rank, said",
    [("parent", "1", "could not attach, training runs without it: 'run'"), ("parent", "0", ""), ("another", "1", "")],
)
def test_what_fails_keeps_no_trainer_from_being_made(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], starter: str, rank: str, said: str
) -> None:
    """It is said, and training goes on; what else a first rank starts, or a process of it, is left alone."""
    monkeypatch.setenv(lightning_plugin.LAUNCHED, f"{os.getppid() if starter == 'parent' else os.getpid()} {{}}")
    monkeypatch.setenv("LOCAL_RANK", rank)
    assert "ddpdebug.monitor.attach" in sys.modules  # the script may have imported what is in it
    assert lightning_plugin.trainer_callbacks() == lightning_plugin.fabric_callbacks() == []
    err = capsys.readouterr().err
    assert said in err if said else err == ""


def test_who_is_invited() -> None:
    """Ranks of the script of `ddpdebug run`, not those that somebody else starts, nor of one that attaches itself."""

    class Monitor:
        starts: Any = object()
        config = Config(every_step=True, out=Path("/seen"), threshold={"straggler_share": 0.3}, ignore=("RANK110",))
        run_id = "abc"

    told = launched.invitation(Monitor(), {})  # type: ignore[arg-type]
    assert told is not None
    known = json.loads(told)
    assert known["run"] == "abc"
    config = Config.load(known["settings"], {}, Path("/"))
    assert replace(config, shows_metrics=known["shows_metrics"]) == Monitor.config
    assert launched.invitation(Monitor(), {"RANK": "0"}) is None  # type: ignore[arg-type]
    assert launched.invitation(Monitor(), {"LOCAL_RANK": "0"}) is None  # type: ignore[arg-type]
    Monitor.starts = None
    assert launched.invitation(Monitor(), {}) is None  # type: ignore[arg-type]
