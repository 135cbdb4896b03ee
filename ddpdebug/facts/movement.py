"""Contracts 1 and 2: which optimizer updates each parameter and buffer, and the modules' modes. Torch-free."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice, pairwise

from ddpdebug.facts.fact import Fact, about, how_often, over
from ddpdebug.facts.seen import Seen, column, lowest
from ddpdebug.schema.announcements import (
    DetachedParameters,
    EvalDraws,
    FrozenParameters,
    LeftInWeights,
    MissingParameters,
    MovedParameters,
    NoGradParts,
    RankCoverage,
    Structure,
    TrainModeValidation,
    UnregisteredParameters,
)
from ddpdebug.schema.details import (
    BufferDigests,
    Contract,
    HyperParameters,
    LayerParameter,
    LayerStatistics,
    Modes,
    Parameters,
    Recipe,
    Replicas,
)
from ddpdebug.schema.row import Flag

_MAX_NAMES = 3000
#: Settings of an optimizer that only say how it computes, and the rate, which is followed over the steps.
_LEFT_OUT = frozenset({"foreach", "fused", "capturable", "differentiable", "lr", "initial_lr"})
_SETTINGS_DIFFER = 1.0001


def facts(seen: Seen) -> Iterator[Fact]:
    """Yield facts about updates of parameters and buffers, and about module modes."""
    for one in seen.first_rank(Structure):
        prefix = f"ddp{one.number}." if one.number else ""
        for kind, name, _, _, trains in one.value.entries[:_MAX_NAMES]:
            if kind == "parameter":
                yield seen.fact(1, prefix + name, "needs a gradient", "yes" if trains else "no", one.step)
    yield from _parameters(seen)
    yield from _buffers_and_copies(seen)
    for optimizer, steps in seen.steps.items():
        name = f"optimizer {optimizer}"
        missing = ((step.step, lowest(step).without_grad) for step in steps[1:])
        yield from over(about(1, name, "trainable parameters without a gradient"), missing)
        known = [step for step in steps if lowest(step).params_before_digest and lowest(step).params_after_digest]
        moves = ((s.step, lowest(s).params_before_digest != lowest(s).params_after_digest) for s in known)
        yield from how_often(about(1, name, "its step changes parameters"), moves)
        for flag, what in (
            (Flag.PARAMS_CHANGED_OUTSIDE, "parameters change between its steps"),
            (Flag.STATE_CHANGED_OUTSIDE, "its state changes between its steps"),
            (Flag.NO_DDP, "none of its parameters belong to a DDP"),
        ):
            yield from how_often(about(1, name, what), ((step.step, step.any(flag)) for step in steps))
        for which, what in (
            ("frozen_params_digest", "the DDP's parameters that no optimizer has"),
            ("replicas_digest", "copies outside DDP (EMA, teacher)"),
        ):
            digests = [*column(steps, which)]
            changed = ((now[0], now[1] != before[1]) for before, now in pairwise(digests))
            yield from how_often(about(1, what, "change"), changed)
    yield from _audits(seen)
    yield from _settings(seen)
    yield from _modes(seen)


def _parameters(seen: Seen) -> Iterator[Fact]:
    """Yield of each parameter whether it changes, by its digests around steps and its layer's statistics."""
    moved, outside, looks = dict[str, int](), dict[str, int](), defaultdict[str, list[int]](list)
    for _, step, known in seen.details(Parameters):
        after = {**known.after, **known.foreign}
        for name, digest in islice(known.before.items(), _MAX_NAMES):
            looks[name].append(step)
            if after.get(name, digest) != digest:
                moved.setdefault(name, step)
            if known.previous.get(name, digest) != digest:
                outside.setdefault(name, step)
    _frozen(seen, looks, outside)
    gradients = defaultdict[str, list[tuple[int, LayerParameter]]](list)
    for _, step, statistics in seen.details(LayerStatistics):
        for name, one in statistics.parameters.items():
            looks[name].append(step)
            gradients[name].append((step, one))
            if one.update:
                moved.setdefault(name, step)
    for name, steps in looks.items():
        yield about(1, name, "moved by the optimizer", *_whether(moved.get(name), steps))
        yield about(1, name, "moved by something else", *_whether(outside.get(name), steps))
    for name, values in gradients.items():
        yield from _gradient(name, values)


def _frozen(seen: Seen, looks: dict[str, list[int]], outside: dict[str, int]) -> None:
    """Add the looks at parameters that no optimizer has, and which of them have changed."""
    before = dict[str, str]()
    for _, step, known in seen.details(Parameters):
        for name, digest in islice(known.frozen.items(), _MAX_NAMES):
            looks[name].append(step)
            if before.setdefault(name, digest) != digest:
                outside.setdefault(name, step)


def _gradient(name: str, values: Sequence[tuple[int, LayerParameter]]) -> Iterator[Fact]:
    kinds = [(step, "none" if one.grad_norm is None else "some" if one.grad_norm else "zero") for step, one in values]
    best = min((kind for _, kind in kinds), key=("some", "zero", "none").index)
    first = next(step for step, kind in kinds if kind == best) if best == "some" else 0
    yield about(1, name, "gradient", best, first, kinds[-1][0])
    step, rate = next(((step, one.lr) for step, one in values if one.lr is not None), (0, None))
    if rate is not None:
        yield about(5, name, "learning rate", rate, step, step, within=_SETTINGS_DIFFER)


def _buffers_and_copies(seen: Seen) -> Iterator[Fact]:
    buffers, changed, last = dict[str, str](), dict[str, int](), dict[str, int]()
    for _, step, known in seen.details(BufferDigests):
        for name, digest in islice(known.digests.items(), _MAX_NAMES):
            if name in buffers:
                last[name] = step
                if buffers[name] != digest:
                    changed.setdefault(name, step)
            buffers[name] = digest
    for name, step in last.items():
        yield about(1, f"buffer {name}", "changes", *_whether(changed.get(name), [step]))
    for _, step, copies in seen.details(Replicas):
        for name, copy in copies.copies.items():
            yield about(1, f"copy {name}", "changes", "yes" if copy.changed else "no", step, step)


def _whether(first: int | None, looks: Sequence[int]) -> tuple[str, int, int]:
    return ("no", min(looks), max(looks)) if first is None else ("yes", first, max(looks))


def _settings(seen: Seen) -> Iterator[Fact]:
    """Yield the settings of each optimizer as it began, and what its wrapper leaves out."""
    told = set[int]()
    for optimizer, step, known in seen.details(HyperParameters):
        if optimizer in told:
            continue
        told.add(optimizer)
        for i, group in enumerate(known.groups):
            name = f"optimizer {optimizer}" + (f", group {i}" if len(known.groups) > 1 else "")
            for key, value in group.items():
                if key == "params":
                    yield about(1, name, "has", str(value).partition(",")[0], step, step)
                elif key not in _LEFT_OUT:
                    yield about(5, name, key, str(value), step, step)
    for _, step, contract in seen.details(Contract):
        for name, why in islice(contract.unreduced.items(), _MAX_NAMES):
            yield about(1, name, "not reduced by a DDP", why, step, step)
        yield about(1, "DDP", "is told to leave out", ", ".join(contract.ignored) or "nothing", step, step)


def _audits(seen: Seen) -> Iterator[Fact]:
    """Yield what a rank announces of parameters where there is something to say, and `none` where there is not."""

    def named(statement: str, found: Mapping[str, tuple[int, str | None]], contract: int = 1) -> Fact:
        first = max((step for step, _ in found.values()), default=0)
        place = next((place for _, place in found.values() if place), None)
        return seen.fact(contract, "", statement, ", ".join(sorted(found)[:20]) or "none", first, place=place)

    for statement, kind, names in (
        ("parameters with a gradient that no optimizer has", MissingParameters, "missing"),
        ("frozen parameters that a step has changed", MovedParameters, "names"),
        ("parameters that an evaluation has left changed", LeftInWeights, "names"),
        ("parameters behind a detached place", DetachedParameters, "names"),
        ("parameters of modules that are not registered", UnregisteredParameters, "names"),
    ):
        yield named(
            statement,
            {
                name: (one.step, getattr(one.value, "location", None))
                for one in seen.of(kind)
                for name in getattr(one.value, names)
            },
        )
    parts = {part.path: (one.step, part.location) for one in seen.of(NoGradParts) for part in one.value.parts}
    yield named("modules that train and run without gradients", parts)
    frozen = {f"{one.value.share:.0%}": (one.step, None) for one in seen.of(FrozenParameters)}
    yield named("share of what was to train and is frozen", frozen)
    drawn = {module.path: (one.step, None) for one in seen.of(EvalDraws) for module in one.value.modules}
    yield named("modules that draw random numbers in eval mode", drawn, 2)
    for one in seen.first_rank(RankCoverage):
        yield seen.fact(1, "optimizers", "parameters", str(one.value.parameters), one.step)


def _modes(seen: Seen) -> Iterator[Fact]:
    modes = defaultdict[str, list[tuple[int, bool]]](list)
    for _, step, known in seen.details(Modes):
        for name, training in islice(known.training.items(), _MAX_NAMES):
            modes[name].append((step, training))
    for name, values in modes.items():
        for fact in over(about(2, name, "mode in forwards that train"), values, lambda t: "train" if t else "eval"):
            yield seen.fact(2, name, fact.statement, fact.value, fact.first)
    for optimizer, steps in seen.steps.items():
        for flag, what in (
            (Flag.EVAL_MODE, "forwards train a model, or a part, in eval mode"),
            (Flag.RNG_USED_IN_FORWARD, "forwards draw random numbers"),
        ):
            about_it = about(2, f"optimizer {optimizer}", what)
            yield from how_often(about_it, ((s.step, s.any(flag)) for s in steps))
    yield from _lines(seen)


def _lines(seen: Seen) -> Iterator[Fact]:
    still: dict[str, tuple[int, str | None]] = {}
    for _, step, recipe in seen.details(Recipe):
        if recipe.modes is not None:
            still.setdefault(recipe.modes.part or "the model", (step, recipe.modes.location))
    first, place = next(iter(still.values()), (0, None))
    yield seen.fact(2, "", "parts that train in eval mode", ", ".join(still) or "none", first, place=place)
    lines = dict[str | None, int]()
    for one in seen.of(TrainModeValidation):
        if not one.value.collected:
            lines.setdefault(one.value.location, one.step)
    last = max(lines.values(), default=0)
    place = next((line for line, step in lines.items() if step == last), None)
    yield seen.fact(2, "", "lines that evaluate in train mode", str(len(lines)), last, place=place)
