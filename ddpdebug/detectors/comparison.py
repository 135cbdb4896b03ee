"""What rules about agreement share: who differs, where, by how much. Torch-free."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from ddpdebug.detectors.base import Fields, RankClasses
from ddpdebug.schema.announcements import Items, Loader, MeshPlace, Structure, WrapperGroup
from ddpdebug.schema.details import Contract, Gradients, Parameters, differing_names
from ddpdebug.schema.finding import MAX_NAMES as MAX_NAMES  # noqa: PLC0414 - the rules have it from here
from ddpdebug.schema.row import CLASS_KINDS, CLASS_SLOTS, Flag
from ddpdebug.schema.step import Blamed, Step, outvoted

#: Of what differs between replicas of sharded parameters, too: the digest of whole ones -> that of a class.
_OF_CLASSES = {"params_after_digest": "params", "grads_digest": "grads", "state_digest": "state"}
#: The columns of these digests.
CLASS_COLUMNS = {kind: tuple(f"class_{slot}_{kind}" for slot in range(CLASS_SLOTS)) for kind in CLASS_KINDS}


def classes_of(step: Step, *fields: str, on_purpose: Flag = Flag.LOCAL_ONLY) -> RankClasses | None:
    """Return what the ranks show in digest fields: None without a majority, empty where they agree.

    A rank that did not compute a field gets the benefit of the doubt. `on_purpose` are the flags of a step whose ranks
    may differ by design.
    """
    key = (fields, int(on_purpose))
    if key not in step.memo:
        step.memo[key] = _classes(step, fields, on_purpose)
    found: RankClasses | None = step.memo[key]
    return found


def made_alike(step: Step) -> bool:
    """Whether the step has left equal parameters on all ranks, of shards on those that hold the same ones."""
    left = "params_after_digest"
    same = classes_of(step, left) == {} if step.any(Flag.SHARDED) else step.agrees(left)
    return same and "foreign_params_digest" not in step.differing


def _classes(step: Step, fields: Sequence[str], on_purpose: Flag) -> RankClasses | None:
    if len(step.rows) < 2 or step.any(on_purpose):
        return None
    known = [name for name in fields if len(step.rows) - step.columns[name].count(0) > 1]
    shared = [kind for name, kind in _OF_CLASSES.items() if name in fields and are_shared(step, kind)]
    if not known and not shared:
        return None
    parted = [name for name in known if name in step.differing]
    families = replica_groups(step) if parted else ()
    columns = [column for name in parted if (column := _column(step, name, families))]
    columns += [column for kind in shared for column in _class_columns(step, kind)]
    if columns:
        return {rank: tuple(column[rank] for column in columns) for rank in step.rows}
    return {} if step.complete else None  # who is missing may be the one that differs


def _column(step: Step, name: str, families: Sequence[Sequence[int]]) -> dict[int, object]:
    return _relative([{rank: getattr(step.rows[rank], name) for rank in family} for family in families])


def _relative(families: Sequence[Mapping[int, int]]) -> dict[int, object]:
    """Return what each rank shows relative to the usual value of its family; empty when no family is at odds."""
    column: dict[int, object] = {}
    for shown in families:
        known = {rank: value for rank, value in shown.items() if value}
        blamed = outvoted(known)
        # without a majority none is the usual one: families that are at odds each must not outvote each other
        usual = 0 if blamed.undecided else next((value for rank, value in known.items() if rank not in blamed), 0)
        column.update({rank: 0 if value in {0, usual} else value for rank, value in shown.items()})
    return column if len(set(column.values())) > 1 else {}


def are_shared(step: Step, kind: str) -> bool:
    """Whether several ranks have shown what they hold of a class of sharded parameters."""
    return any(len(shown) > 1 for shown in step.replicas(kind).values())


def _class_columns(step: Step, kind: str) -> list[dict[int, object]]:
    odd = [shown for shown in step.replicas(kind).values() if len({*shown.values()}) > 1]
    nothing: dict[int, object] = dict.fromkeys(step.rows, 0)
    return [{**nothing, **_relative([shown])} for shown in odd]


def parted_over(step: Step, kind: str) -> Fields:
    """Return what a finding says of replicas that are at odds: over which dimensions, and which ranks should agree."""
    odd = [shown for shown in step.replicas(kind).values() if len({*shown.values()}) > 1]
    if not odd:
        return {}
    places = {rank: fact.places for rank, fact in meshes(step).items()}
    names = sorted({name for own in places.values() for name in own})
    over = [
        name
        for name in names
        if any(len({tuple(places.get(rank, {}).get(name, ())) for rank in shown}) > 1 for shown in odd)
    ]
    return {"dimensions": over, "replicas": sorted(sorted(shown) for shown in odd)[:MAX_NAMES]}


def named(ranks: tuple[int, ...], over: Fields) -> tuple[int, ...]:
    """Return culprits as a finding names them: ranks of several classes at odds do not stand against each other."""
    return tuple(ranks) if len(over.get("replicas", ())) > 1 else ranks


def replica_groups(step: Step) -> Sequence[Sequence[int]]:
    """Return the ranks that should be equal to each other: all, unless separate groups train different models."""
    everyone = [tuple(step.rows)]
    if not separate_groups(step):
        return everyone
    of_ddp: list[Mapping[int, Structure]] = _facts(step, "structure:")
    of_shards = meshes(step)
    models: dict[tuple[str, ...], list[int]] = {}
    for rank in step.rows:
        model = tuple(facts[rank].digest for facts in of_ddp if rank in facts)
        models.setdefault((*model, of_shards[rank].model) if rank in of_shards else model, []).append(rank)
    model_of = {rank: model for model, members in models.items() for rank in members}
    groups = [*_groups(step), *islands(step)]
    mixed = any(len({model_of[rank] for rank in group if rank in model_of}) > 1 for group in groups)
    return everyone if mixed else [tuple(members) for members in models.values()]


def separate_groups(step: Step) -> bool:
    """Whether some DDP reduces over fewer ranks than the world, or FSDP2 does, and nothing joins these groups."""
    return any(len(group) < step.world for group in _groups(step)) or bool(islands(step))


def islands(step: Step) -> Sequence[Sequence[int]]:
    """Return the groups of ranks over which FSDP2 averages, where meshes of fewer ranks than the world hold them."""
    told = meshes(step)
    joined = any(
        fact.staged or not fact.averages or math.prod(size for _, size in fact.places.values()) >= step.world
        for fact in told.values()
    )
    return [] if joined else sorted({fact.averages for fact in told.values()})


def meshes(step: Step) -> Mapping[int, MeshPlace]:
    """Return the places of the ranks on the meshes of the step's optimizer."""
    found: Mapping[int, MeshPlace] = step.facts.get(f"mesh:{step.optimizer}", {})
    return found


def _groups(step: Step) -> list[Sequence[int]]:
    told: list[Mapping[int, WrapperGroup]] = _facts(step, "group:")
    return [fact.ranks for facts in told for fact in facts.values() if fact.ranks]


def averaging_groups(step: Step) -> Sequence[Sequence[int]]:
    """Return the groups of ranks that average gradients with each other.

    All ranks, where nothing else is known; none, where ranks hold parts of parameters and nobody says who averages.
    """
    if not step.any(Flag.SHARDED):
        return sorted({tuple(group) for group in _groups(step)}) or [tuple(step.rows)]
    return sorted({fact.averages for fact in meshes(step).values() if fact.averages})


def groups_beside(step: Step) -> set[tuple[int, ...]]:
    """Return the ranks of the smaller process groups that the script has made."""
    told: list[Mapping[int, WrapperGroup | MeshPlace]] = [*_facts(step, "group:"), *_facts(step, "mesh:")]
    return {tuple(group) for facts in told for fact in facts.values() for group in fact.beside}


def _facts(step: Step, prefix: str) -> list[Mapping[int, Any]]:
    return [step.facts[topic] for topic in sorted(topic for topic in step.facts if topic.startswith(prefix))]


def culprits(shown: RankClasses) -> Blamed:
    """Return the outvoted ranks; all without a majority."""
    return outvoted(dict(shown))


def subset(ranks: Collection[int], step: Step) -> bool:
    """Whether the ranks are some, but not all, of the step."""
    return 0 < len(ranks) < len(step.rows)


def blame(changed: Collection[int], step: Step, shown: RankClasses) -> tuple[int, ...]:
    """Return the culprits when it is known which ranks changed something by themselves.

    Usually those that changed. Where most ranks changed, and alike, the one that did not follow is the odd one.
    """
    if not subset(changed, step):
        return culprits(shown)
    alike = len({shown.get(rank) for rank in changed}) == 1
    if alike and 2 * len(changed) > len(step.rows):
        return tuple(sorted(set(step.rows) - set(changed)))
    return tuple(sorted(changed))


def values_of(by_rank: Mapping[int, Mapping[str, Any]], name: str) -> dict[str, Any]:
    """Return rank (as text, for JSON) -> the value of one name."""
    return {str(rank): table.get(name) for rank, table in sorted(by_rank.items())}


def averaged(step: Step) -> set[str]:
    """Return the parameters that no DDP owns and whose gradients are the same on all ranks, and not zero."""
    told = step.answers(Gradients)
    odd = differing_names({rank: own.foreign for rank, own in told.items()})
    return {n for own in told.values() for n in own.foreign if own.step_norms.get(n) != 0} - {*odd}


def are_own(step: Step, names: Collection[str], shared: dict[str, Any]) -> bool:
    """Whether each rank trains parameters of its own by these names, where no DDP is involved.

    Stages of a pipeline have not the same names and shapes, or send to each other. Experts differed before the first
    step, when the gradients of other parameters were already averaged, or are marked. Experts that several ranks began
    with alike are replicas of each other: they are nobody's own where their gradients differ.

    Args:
        shared: what the rules of a run share; what is known of an optimizer stays.
    """
    own = own_names(step, shared)
    return own is None or (bool(own) and own >= {*names})


def own_names(step: Step, shared: dict[str, Any]) -> set[str] | None:
    """Return the parameters that each rank has of its own, None where all are: see `are_own`."""
    known: dict[int, set[str] | None] = shared.setdefault("own parameters", {})  # None: all
    alike: dict[int, list[list[int]]] = shared.setdefault("ranks that began with the same own parameters", {})
    asked = step.answers(Contract).values()
    if step.optimizer not in known and step.all(Flag.NO_DDP):
        if len({told.parameters for told in asked}) > 1 or (asked and all([told.messages for told in asked])):
            known[step.optimizer] = None
        elif step.any(Flag.FIRST) and len(step.answers(Gradients)) > 1:
            known[step.optimizer] = found = _apart(step) if averaged(step) else set()
            alike[step.optimizer] = _began_alike(step, found)
    own = known.get(step.optimizer, set())
    if own is None:
        return None
    told = {rank: gradients.foreign for rank, gradients in step.answers(Gradients).items()}
    families = [{rank: told[rank] for rank in ranks if rank in told} for ranks in alike.get(step.optimizer, ())]
    unlike = {name for family in families for name in differing_names(family)}
    return own.union(*[contract.marked for contract in asked]) - unlike


def _began_alike(step: Step, own: Collection[str]) -> list[list[int]]:
    """Return the groups of ranks that began with the same own parameters; none where a rank has its own alone."""
    groups: dict[tuple[str | None, ...], list[int]] = {}
    for rank, told in step.answers(Parameters).items():
        groups.setdefault(tuple(told.before.get(name) for name in sorted(own)), []).append(rank)
    return list(groups.values()) if len(groups) > 1 and all(len(ranks) > 1 for ranks in groups.values()) else []


def _apart(step: Step) -> set[str]:
    """Return the parameters of modules of which some differed before the step: of an expert's biases none may."""
    before = {rank: own.before for rank, own in step.answers(Parameters).items()}
    modules = {name.rpartition(".")[0] for name in differing_names(before) if "." in name}
    every = {name for own in before.values() for name in own}
    return {*differing_names(before), *(name for name in every if name.rpartition(".")[0] in modules)}


def ordered(names: Collection[str], order: Sequence[str]) -> list[str]:
    """Sort names as the model has them; names it does not have come last, by alphabet."""
    place = {name: i for i, name in enumerate(order)}
    return sorted(names, key=lambda name: (place.get(name, len(place)), name))


def within(tolerance: float, numbers: Collection[float]) -> bool:
    """Whether all numbers agree up to a relative tolerance."""
    known = [n for n in numbers if math.isfinite(n)]
    if len(known) < len(numbers):
        return False
    return not known or max(known) - min(known) <= tolerance * max(map(abs, known))


def agree_within(tolerance: float, by_rank: Mapping[int, Mapping[str, Any]], names: Collection[str]) -> bool:
    """Whether the ranks' numbers agree up to a relative tolerance for every name; False where one is missing."""
    for name in names:
        numbers = [table.get(name) for table in by_rank.values()]
        if len(numbers) < 2 or any(number is None for number in numbers):
            return False
        if not within(tolerance, [float(number) for number in numbers if number is not None]):
            return False
    return True


def median_without(values: Sequence[float], value: float) -> float:
    """Return the median of sorted values without one of them."""
    place, half = bisect_left(values, value), (len(values) - 1) // 2
    low, high = (values[i + (i >= place)] for i in (half - (len(values) % 2), half))
    return (low + high) / 2 if len(values) % 2 else high


def text_of(ranks: Collection[int]) -> str:
    """Return ranks as people write them: `2`, `0 and 1`, `0, 1 and 3`."""
    words = [str(rank) for rank in sorted(ranks)]
    return words[0] if len(words) == 1 else ", ".join(words[:-1]) + f" and {words[-1]}" if words else "none"


def announced_at(facts: Mapping[int, Loader | Items], otherwise: int) -> int:
    """Return the newest step that the announcements name, `otherwise` where none does."""
    return max((fact.step for fact in facts.values() if fact.step is not None), default=otherwise)
