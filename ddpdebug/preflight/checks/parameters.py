"""Point 2, the audit of the parameters: shape and dtype, their optimizer and group, and their gradient."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ddpdebug.errors import UsageError
from ddpdebug.preflight.capture.copies import copied
from ddpdebug.preflight.checks.unregistered import unregistered
from ddpdebug.preflight.examine import each
from ddpdebug.preflight.observe import gradients_of, observe
from ddpdebug.preflight.output.results import Check, Status, Table
from ddpdebug.preflight.sandbox.trials import looking
from ddpdebug.preflight.subject import Subject
from ddpdebug.probes.ranges import dtype_name

#: Share of the parameters that is frozen from which on it is worth a line; fine-tuning freezes most on purpose.
_LARGE_PART = 0.5
_NAMED = 5
#: Batches whose gradients are computed: what is 0 in so many is always 0.
_BATCHES = 4
_SEED = 7
#: Parameters that are tried: the ones behind the same cut behave alike.
_TRIED = 12


def check(subject: Subject) -> list[Check]:
    """Audit the parameters."""
    gradients, untouched = _gradients(subject)
    held = _Held(subject)
    return each(
        table=lambda: [_table(subject, held, gradients)],
        in_the_optimizer=lambda: _optimized(subject, held, gradients),
        optimizer_without_model=lambda: [_foreign(subject, held, gradients)],
        reached_by_the_loss=lambda: _reached(subject, held, gradients, untouched),
        frozen=lambda: [_frozen(subject, held)],
        tied_weights=lambda: _tied(subject),
        decay_of_norms_and_biases=lambda: _decay(subject, held),
        registered=lambda: unregistered(subject),
    )


class _Held:
    """The parameter groups of the optimizers, by the parameter's name."""

    def __init__(self, subject: Subject) -> None:
        self.optimizers: list[dict[str, Any]] = subject.facts.get("holdings", [])
        self.groups: dict[str, list[tuple[int, int, Mapping[str, Any]]]] = {}
        self.stepped: Counter[str] = Counter()
        for number, optimizer in enumerate(self.optimizers):
            for at, group in enumerate(optimizer["groups"]):
                for name in group["names"]:
                    self.groups.setdefault(name, []).append((number, at, group))
                    self.stepped[name] += optimizer["stepped"]


def _gradients(subject: Subject) -> tuple[dict[str, float | None] | None, str]:
    """Return the largest magnitude of each parameter's gradient over the batches; None and why where there are none."""
    found: dict[str, float | None] = {}
    try:
        batches = subject.recorded(_BATCHES)
    except UsageError as error:
        return None, str(error)
    for batch in batches:
        model = copied(subject.model)
        seen = observe(subject, batch, model)
        if seen.loss is None:
            return None, f"the loss raises {type(seen.error).__name__}: {seen.error}"
        for name, gradient in gradients_of(seen.loss, model).items():
            value = None if gradient is None else float(gradient.abs().max()) if gradient.numel() else 0.0
            before = found.get(name)
            found[name] = value if before is None else before if value is None else max(before, value)
    return found, ""


def _table(subject: Subject, held: _Held, gradients: Mapping[str, float | None] | None) -> Check:
    rows: list[tuple[Any, ...]] = []
    for name, p in subject.model.named_parameters():
        groups = held.groups.get(name, [])
        _, at, group = groups[0] if groups else (None, "", {})
        kind = dtype_name(p)
        gradient = "" if gradients is None or not p.requires_grad else gradients.get(name)
        settings = tuple("" if group.get(key) is None else group[key] for key in ("lr", "weight_decay"))
        shown = "none" if gradient is None else gradient
        rows.append(
            (name, " x ".join(map(str, p.shape)), kind, "yes" if p.requires_grad else "no", at, *settings, shown)
        )
    own = list(subject.model.parameters())
    trained = sum(p.numel() for p in own if p.requires_grad)
    head = ("parameter", "shape", "dtype", "trainable", "group", "lr", "weight decay", "largest gradient")
    return Check(
        Status.INFO,
        f"{len(own)} parameters with {sum(p.numel() for p in own)} numbers, {trained} of them trainable",
        tables=(Table(head=head, rows=tuple(rows)),),
    )


def _optimized(subject: Subject, held: _Held, gradients: Mapping[str, float | None] | None) -> Iterator[Check]:
    if not held.optimizers:
        yield Check(Status.SKIPPED, "no optimizer is known")
        return
    reached = gradients or {}
    missing = [
        name
        for name, p in subject.model.named_parameters()
        if p.requires_grad and name not in held.groups and reached.get(name) is not None
    ]
    twice = sorted(name for name, count in held.stepped.items() if count > 1)
    if missing or twice:
        what = f"{_some(missing)} get a gradient and are in no optimizer" if missing else ""
        and_twice = f"{_some(twice)} are stepped by more than one group or optimizer" if twice else ""
        yield Check(
            Status.FAIL,
            "; ".join(filter(None, (what, and_twice))),
            code="RCP803",
            evidence={"missing": missing, "twice": twice},
            hypotheses=(
                "a part of the model was added or replaced after the optimizer was built",
                "the filter by name that builds the groups leaves them out",
            ),
            actions=("build the optimizer last, from `model.parameters()`; freeze what is to stay as it is",),
        )
    else:
        yield Check(Status.PASS, f"{len(held.groups)} parameters are in one group each")


def _foreign(subject: Subject, held: _Held, gradients: Mapping[str, float | None] | None) -> Check:
    """Judge parameters of an optimizer that are in no model: a mistake where some of the model are in no optimizer."""
    foreign = [shape for o in held.optimizers if o["stepped"] for group in o["groups"] for shape in group["foreign"]]
    own = [list(p.shape) for n, p in subject.model.named_parameters() if p.requires_grad and n not in held.groups]
    replaced = [shape for shape in foreign if shape in own]
    stale = bool(foreign and own) and (len(replaced) > 0 or not held.groups)
    reached = gradients is not None and any(value is not None for value in gradients.values())
    return Check(
        Status.FAIL if stale and reached else Status.INFO if foreign else Status.PASS,
        f"the optimizer holds {len(foreign)} parameters that belong to no model that was called and get no gradient"
        if foreign
        else "every parameter of the optimizers belongs to the model or gets a gradient",
        code="RCP811" if stale and reached else "",
        hypotheses=("the model was replaced, copied or moved after the optimizer was built",) if stale else (),
        actions=("build the optimizer from the model that is trained, after all changes to it",) if stale else (),
    )


def _reached(subject: Subject, held: _Held, gradients: Mapping[str, float | None] | None, why: str) -> Iterator[Check]:
    if gradients is None:
        yield Check(Status.SKIPPED, why)
        return
    # of several optimizers each has its own loss; recorded was the one of the first that stepped
    trained = set(subject.facts.get("trained") or gradients)
    gradients = {name: value for name, value in gradients.items() if name in trained}
    none = [name for name, value in gradients.items() if value is None]
    zero = [name for name, value in gradients.items() if value == 0.0 and not _may_be_zero(subject.model, name)]
    cut, shielded = cut_off(subject, none) if none else ([], [])
    cut, shielded = ([name for name in names if name in held.groups or not held.groups] for names in (cut, shielded))
    whole = bool(none) and len(none) == len(gradients)
    if whole or cut or shielded:
        what = "the loss reaches no trainable parameter"
        part = f"the loss depends on {_some(cut or shielded)} and sends no gradient there"
        yield Check(
            Status.FAIL if whole or cut else Status.WARN,
            (what if whole else part) + ("" if whole or cut else ": they run under no_grad, and are not frozen"),
            code="RCP810",
            evidence={"not reached": none},
            hypotheses=("detach(), .data, .item(), numpy or no_grad between model and loss", "argmax or a cast to int"),
            actions=("follow `loss.grad_fn` back to where it ends; freeze what is not to be trained",),
        )
    else:
        unused = f"; {_some(none)} take no part in the loss" if none else ""
        summary = f"the loss reaches {len(gradients) - len(none)} of {len(gradients)} trainable parameters{unused}"
        status = Status.INFO if none else Status.PASS
        yield Check(status, summary)
    yield Check(
        Status.WARN if zero else Status.PASS,
        f"{_some(zero)} have a gradient of exactly 0 in all batches"
        if zero
        else "no parameter has a gradient of exactly 0 in all batches",
        name="zero gradients",
        code="HLTH714",
        evidence={"zero": zero} if zero else {},
        hypotheses=("dead units in front of it", "a factor, gate or mask of 0"),
    )


def _may_be_zero(model: nn.Module, name: str) -> bool:
    """Whether zero follows from the algebra: what stands behind a weight of 0, and rows that were not looked up.

    A residual branch that starts at 0 (its last weight, or the scale of its norm) lets no gradient into the branch in
    the first step; a bias in front of a norm gets rounding or 0.
    """
    if isinstance(model.get_submodule(name.rpartition(".")[0]), nn.Embedding | nn.EmbeddingBag):
        return True
    weights = [p for n, p in model.named_parameters() if not n.endswith("bias")]
    return name.endswith("bias") or any(p.numel() > 0 and not bool(p.any()) for p in weights)


def _frozen(subject: Subject, held: _Held) -> Check:
    own = list(subject.model.named_parameters())
    frozen = [name for name, p in own if not p.requires_grad]
    share = sum(p.numel() for _, p in own if not p.requires_grad) / max(1, sum(p.numel() for _, p in own))
    kept = [name for name in frozen if name in held.groups]
    note = f"; {_some(kept)} are in the optimizer all the same" if kept else ""
    large = share >= _LARGE_PART
    return Check(
        Status.INFO if frozen else Status.PASS,
        f"{_some(frozen)} are frozen, {100 * share:.0f} % of the model: intended?{note}"
        if frozen
        else "nothing is frozen",
        code="RCP812" if large else "",
    )


def _tied(subject: Subject) -> Iterator[Check]:
    names: dict[int, list[str]] = {}
    for name, p in subject.model.named_parameters(remove_duplicate=False):
        names.setdefault(id(p), []).append(name)
    tied = [group for group in names.values() if len(group) > 1]
    alike = _equal_pairs(subject.model)
    if tied:
        yield Check(Status.INFO, "tied: " + "; ".join(" = ".join(group) for group in tied[:_NAMED]))
    if alike:
        yield Check(
            Status.INFO,
            "start equal and are not the same parameter: " + "; ".join(" = ".join(pair) for pair in alike),
            name="equal weights",
            code="RCP818",
            hypotheses=("copied where they should be tied", "copies of one module on purpose (deepcopy)"),
        )


def _equal_pairs(model: nn.Module) -> list[tuple[str, str]]:
    """Return weights that are equal and look random; equal constants are how norms and biases start."""
    seen: dict[tuple[Any, ...], tuple[str, Tensor]] = {}
    pairs = []
    for name, p in model.named_parameters():
        if p.dim() < 2 or p.numel() < 16 or bool((p == p.flatten()[0]).all()):
            continue
        key = (tuple(p.shape), float(p.detach().double().sum()))
        other = seen.setdefault(key, (name, p))
        if other[0] != name and torch.equal(other[1], p):
            pairs.append((other[0], name))
    return pairs[:_NAMED]


def _decay(subject: Subject, held: _Held) -> Iterator[Check]:
    decayed = [
        name
        for name, p in subject.model.named_parameters()
        if p.requires_grad
        and p.dim() <= 1
        and any(group.get("weight_decay") for _, _, group in held.groups.get(name, ()))
    ]
    if decayed:
        yield Check(
            Status.INFO,
            f"weight decay pulls {len(decayed)} scales and biases to 0, for example {_some(decayed)}",
            actions=("many recipes give parameters with one dimension a group with weight_decay=0",),
        )


def _some(names: list[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more


def cut_off(subject: Subject, names: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the parameters that the loss depends on: those used with gradients enabled, and those used without.

    Each is changed a little; where the loss changes, the forward uses it.
    """
    enabled, base = _base(subject)
    if base is None or base != _loss(subject, copied(subject.model)):  # not deterministic even from one seed
        return [], []
    with_grad: list[str] = []
    without: list[str] = []
    for name in _spread(names):
        model = copied(subject.model)
        parameter = dict(model.named_parameters())[name]
        with torch.no_grad():
            noise = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(_SEED))
            parameter.add_(
                0.1 * (float(parameter.std()) if parameter.numel() > 1 else 1.0) * noise.to(parameter) + 1e-3
            )
        if _loss(subject, model) != base:
            (with_grad if enabled.get(name.rpartition(".")[0], True) else without).append(name)
    return with_grad, without


def _spread(names: Sequence[str]) -> Sequence[str]:
    step = max(1, len(names) // _TRIED)
    return names[::step][:_TRIED]


def _base(subject: Subject) -> tuple[dict[str, bool], float | None]:
    """Return by module whether it was called with gradients enabled, and the loss."""
    model, enabled = copied(subject.model), dict[str, bool]()

    def note(name: str, *_: Any) -> None:
        enabled[name] = enabled.get(name, False) or torch.is_grad_enabled()

    with looking(dict(model.named_modules()), before=note):
        return enabled, _loss(subject, model)


def _loss(subject: Subject, model: nn.Module) -> float | None:
    torch.manual_seed(_SEED)
    value = float(subject.loss_of(model, subject.batches[0])[0].detach())
    return value if value == value else None  # noqa: PLR0124 - not a number equals nothing
