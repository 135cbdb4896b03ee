"""The subject of a preflight: copies of the model and its optimizer, the loss function, and some batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from ddpdebug.errors import UsageError

if TYPE_CHECKING:
    from ddpdebug.preflight.capture.copies import OptimizerFor
    from ddpdebug.preflight.capture.sampling import Samples

#: Computes the loss of a batch with a model: (scalar loss, what the model returned).
LossOf = Callable[[torch.nn.Module, Any], tuple[torch.Tensor, Any]]


@dataclass(slots=True, kw_only=True)
class Subject:
    """The training to examine; every check works on copies of the model.

    Args:
        model: as it was before the first optimizer step, without any DDP wrapper.
        loss_of: the caller's loss.
        optimizer_for: None when there is no optimizer.
        batches: the first batches in the order of training; what they are is up to `loss_of`.
        micro_batches: per optimizer step.
        val_batches: of the validation data, where they are known.
        samples: of the data sets, as the script's loaders and the user's own code give them.
        settings: what the user told the checks: `expect_loss`, `causal`.
        facts: what the capture saw of the script besides (seeds, loaders, call sites), JSON values.
    """

    model: torch.nn.Module
    loss_of: LossOf
    optimizer_for: OptimizerFor | None
    batches: Sequence[Any]
    micro_batches: int = 1
    val_batches: Sequence[Any] = ()
    samples: Samples | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)

    def recorded(self, most: int) -> Sequence[Any]:
        """Return at most `most` of the first batches.

        Raises:
            ddpdebug.UsageError: there is none, and why.
        """
        if not self.batches:
            raise UsageError(f"the loss could not be recorded: {self.facts.get('not_recorded') or 'no batches'}")
        return self.batches[:most]
