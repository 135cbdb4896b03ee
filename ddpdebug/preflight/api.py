"""`ddpdebug.preflight(model, loss_fn, optimizer, batches)`: the preflight from Python."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ddpdebug.errors import UsageError
from ddpdebug.isolation.process_state import preserved
from ddpdebug.nested import cloned, mapped
from ddpdebug.preflight.capture.copies import copied, holdings, loader_restorer, loader_twin, optimizer_maker, unwrapped
from ddpdebug.preflight.capture.sampling import Samples
from ddpdebug.preflight.examine import examine
from ddpdebug.preflight.output.files import write
from ddpdebug.preflight.output.results import Check, Status
from ddpdebug.preflight.output.text import render
from ddpdebug.preflight.sandbox.trials import looking
from ddpdebug.preflight.subject import Subject

#: Batches that are taken of a loader.
BATCHES = 8
_SETTINGS = frozenset({"expect_loss", "causal", "with_model"})
_MODEL_NAMES = frozenset({"model", "net", "network", "module"})


@dataclass(frozen=True, slots=True)
class Preflight:
    """The results of a preflight."""

    checks: tuple[Check, ...]

    @property
    def failed(self) -> tuple[Check, ...]:
        """The checks that failed."""
        return tuple(check for check in self.checks if check.status is Status.FAIL)

    def __str__(self) -> str:
        return render(self.checks)

    def write(self, directory: Path, title: str = "preflight") -> list[Path]:
        """Write JSON, JUnit and an HTML page into a directory; return the files."""
        return write(self.checks, directory, title)


def preflight(
    model: nn.Module,
    loss_fn: Callable[..., Any],
    optimizer: torch.optim.Optimizer | None = None,
    batches: Iterable[Any] = (),
    *,
    val_batches: Iterable[Any] = (),
    only: Sequence[str] | None = None,
    **settings: Any,
) -> Preflight:
    """Check a model, its loss, its optimizer and some batches before training; nothing of them is changed.

    Args:
        model: a module, wrapped or not, as it is before the first step.
        loss_fn: `loss_fn(output, target)` for batches `(inputs, target)`; or `loss_fn(model, batch)`, which is
            assumed where its first parameter is called model, net, network or module.
        optimizer: may be missing.
        batches: a loader or a list; the first 8 are used. An iterator is consumed by that.
        val_batches: of the validation data.
        only: the groups to run, for example `["data", "initial loss"]`; all by default.
        settings: `expect_loss=2.3` (the loss to expect at first), `causal=True` (the model must not see the future),
            `with_model=True` (`loss_fn` takes the model, whatever its parameter is called).

    Raises:
        ddpdebug.UsageError: nothing can be checked with these arguments.
    """
    return Preflight(tuple(examine(subject_of(model, loss_fn, optimizer, batches, val_batches, **settings), only)))


def subject_of(
    model: nn.Module,
    loss_fn: Callable[..., Any],
    optimizer: torch.optim.Optimizer | None,
    batches: Iterable[Any],
    val_batches: Iterable[Any] = (),
    **settings: Any,
) -> Subject:
    """Return the subject of the checks: copies of the caller's model, optimizer and batches."""
    if not isinstance(model, nn.Module):
        raise UsageError(f"preflight needs a torch.nn.Module as model, not {type(model).__name__}")
    unknown = settings.keys() - _SETTINGS
    if unknown:
        raise UsageError(f"unknown setting {min(unknown)!r}; valid are {', '.join(sorted(_SETTINGS))}")
    with_model = settings.pop("with_model", None)
    inner = unwrapped(model)
    names = {id(p): name for name, p in inner.named_parameters()}
    with preserved(plain=True):
        own, validation = _taken(batches), _taken(val_batches)
        if not own:
            raise UsageError("preflight needs at least one batch")
        twin = copied(inner)
    held = [] if optimizer is None else holdings([(optimizer, True)], names)
    return Subject(
        model=twin,
        loss_of=_loss_of(loss_fn, takes_model(loss_fn) if with_model is None else bool(with_model)),
        optimizer_for=None if optimizer is None else optimizer_maker(optimizer, names),
        batches=own,
        val_batches=validation,
        samples=Samples(),
        settings=settings,
        facts={"holdings": held},
    )


def _taken(batches: Iterable[Any]) -> list[Any]:
    restore = loader_restorer(batches)
    try:
        return [cloned(batch) for batch in itertools.islice(loader_twin(batches), BATCHES)]
    finally:
        restore()


def takes_model(loss_fn: Callable[..., Any]) -> bool:
    """Whether the first parameter of a loss function is named like a model rather than like its output."""
    try:
        names = list(inspect.signature(loss_fn).parameters)
    except (TypeError, ValueError):
        return False
    return bool(names) and names[0] in _MODEL_NAMES


def _loss_of(loss_fn: Callable[..., Any], with_model: bool) -> Callable[[nn.Module, Any], tuple[Tensor, Any]]:  # noqa: FBT001
    def from_model(model: nn.Module, batch: Any) -> tuple[Tensor, Any]:
        outputs: list[Any] = []
        with looking({"": model}, after=lambda _, __, output: outputs.append(output)):
            loss = loss_fn(model, cloned(batch))
        return loss, outputs[0] if outputs else None

    def from_output(model: nn.Module, batch: Any) -> tuple[Tensor, Any]:
        try:
            inputs, target = _on_device(cloned(batch), model)
        except (TypeError, ValueError):
            raise UsageError(
                "loss_fn(output, target) needs batches (inputs, target); for others give loss_fn(model, batch)"
            ) from None
        output = model(**inputs) if isinstance(inputs, dict) else model(inputs)
        return loss_fn(output, target), output

    return from_model if with_model else from_output


def _on_device(batch: Any, model: nn.Module) -> Any:
    """Return a batch where the model is, as a training loop would."""
    device = next((p.device for p in model.parameters()), None)
    return mapped(batch, lambda item: item.to(device) if isinstance(item, Tensor) else item, kinds=True)
