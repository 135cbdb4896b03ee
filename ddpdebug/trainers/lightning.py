"""The callback for Lightning's Trainer."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from ddpdebug.trainers.attachment import Attachment

if TYPE_CHECKING:
    from lightning.pytorch import Callback
elif "pytorch_lightning" in sys.modules and "lightning.pytorch" not in sys.modules:
    from pytorch_lightning import Callback
else:
    try:
        from lightning.pytorch import Callback
    except ImportError:
        from pytorch_lightning import Callback


class DebugCallback(Callback):
    """Attaches ddpdebug to each `fit` of a Trainer: `Trainer(callbacks=[DebugCallback()])`.

    It attaches before the model is wrapped in DDP and detaches when training ends. Under `ddpdebug run`, or after
    `ddpdebug.watch()`, it uses the monitor that is there.

    Args:
        val_loss: the logged metric that is the validation loss; by default the first one with a name like `val_loss`.
        options: the settings of `ddpdebug run` by their Python names, for example `budget=0.01`.

    Raises:
        ddpdebug.UsageError: an option's name or value is wrong.
    """

    def __init__(self, *, val_loss: str | None = None, **options: Any) -> None:
        self._attachment = Attachment(val_loss, options)

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Attach: the process group exists already, DDP does not."""
        if stage == "fit":
            self._attachment.open()

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """Observe the validation loss that was logged."""
        if not trainer.sanity_checking and trainer.state.fn == "fit":
            self._attachment.tell(trainer.callback_metrics)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Detach, before the model leaves its device."""
        self._attachment.close()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Detach, with the exception as the reason."""
        self._attachment.close(exception)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Detach if nothing was trained."""
        self._attachment.close()


class AddedCallback(DebugCallback):
    """The callback that ddpdebug adds to each Trainer of a watched process; one of the script's own has priority."""

    def __init__(self) -> None:
        self._attachment = Attachment(None, None)

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """Observe the logged validation loss, unless a callback of the script does."""
        if not any(isinstance(one, DebugCallback) and type(one) is not AddedCallback for one in trainer.callbacks):
            super().on_validation_end(trainer, pl_module)
