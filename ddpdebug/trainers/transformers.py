"""The callback for the Trainer of Transformers."""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback

from ddpdebug.trainers.attachment import Attachment


class DebugCallback(TrainerCallback):
    """Attaches ddpdebug to each `train` of a Trainer: `Trainer(..., callbacks=[DebugCallback()])`.

    It attaches as the Trainer is made, before the model is wrapped in DDP, and detaches when training ends. Under
    `ddpdebug run`, or after `ddpdebug.watch()`, it uses the monitor that is there.

    Args:
        val_loss: the metric that is the validation loss; by default the first one with a name like `eval_loss`.
        options: the settings of `ddpdebug run` by their Python names, for example `budget=0.01`.

    Raises:
        ddpdebug.UsageError: an option's name or value is wrong.
    """

    def __init__(self, *, val_loss: str | None = None, **options: Any) -> None:
        self._attachment, self._val_loss = Attachment(val_loss, options), val_loss
        self._trains = self._told = False
        self._metrics: dict[str, Any] = {}

    def on_init_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Attach: the process group exists already, DDP does not."""
        self._attachment.open()

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Attach if the callback was added later, or an earlier training has ended."""
        self._attachment.open()
        self._trains, self._told, self._metrics = True, False, {}

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **kwargs: Any) -> None:
        """Observe the validation loss; each of several data sets is evaluated by itself."""
        if not self._trains or not metrics:
            return
        self._metrics.update(metrics)
        if self._val_loss is None or self._val_loss in metrics:
            self._told = True
            self._attachment.tell(metrics)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Detach; after an exception, without this event, the monitor ends with the process or a later training."""
        if self._metrics and not self._told:
            self._attachment.tell(self._metrics)  # which says that there is none of that name
        self._trains = False
        self._attachment.close()
