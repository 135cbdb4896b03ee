"""SYNC209: several ranks do not train like one process on the same global batch."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from ddpdebug.detectors.comparison import MAX_NAMES
from ddpdebug.detectors.kinds import Detector, Examples, Facts, Fields, Findings, Severity, Threshold
from ddpdebug.schema.announcements import Equivalence, Targets


def _facts(ratio: float, world: int = 4, *, residual: float = 0.0, **more: Any) -> dict[str, Any]:
    """Return what a rank measures; for the examples."""
    off = {"w": [ratio, residual, abs(ratio - 1) + residual], "b": [ratio, residual, abs(ratio - 1) + residual]}
    base = {"world": world, "step": 0, "quantity": "gradient", "bound": 1e-11, "dtype": "float64", "compared": 2}
    return {**base, "off": off, **more}


def _on_mesh(rank: int, **more: Any) -> dict[str, Any]:
    """Return what a rank of a mesh of 2 x 2 measures of its experts; for the examples."""
    mesh = {"dp": [rank // 2, 2], "ep": [rank % 2, 2]}
    return _facts(2.0, **{"off": {"experts.w": [2.0, 0.0, 1.0]}, "mesh": mesh, "compared": 5, **more})


#: Of a mesh, what explains a reading: the cause and what to do.
_UNREDUCED = (
    "the gradient of a parameter that every rank holds whole is that of the rank's own tokens, and nothing adds it up",
    "all-reduce these gradients over the dimension that is named, or make the parameter a DTensor (`SequenceParallel`)",
)
_FACTOR = (
    "gradients are multiplied or divided once too often by the size of a dimension of the mesh",
    "divide by the number of ranks that have different data; another --mesh tells two dimensions of one size apart",
)
_UNEQUAL = (
    "a rank computes with other inputs, positions or weights than one process does at the same place",
    "read the module that is named: positions in a split sequence, a bias that each rank adds, `to_local`, `view`",
)
_CUT = (
    "on the way to these parameters something is not differentiable, or the reduction was told to wait and never ran",
    "differentiate through the collective, and switch the reduction on before the last micro-batch",
)
_DRAWN = (
    "the weights are drawn from another seed, or in another order, than in one process",
    "make the whole model from one seed and shard it then",
)
_UPDATED = (
    "the optimizer computes with this rank's part as if it were the whole (Muon, norms, clipping)",
    "put the gradient together before, and take the own part of the update",
)


_OFFER = "each rank divides its loss by a number of its own; `ddpdebug equivalence` says whether it matters"
_AGREES: dict[str, Any] = {"world": 2, "step": None, "bound": 1e-11, "dtype": "float64", "compared": 2, "off": {}}


def _counted(*numbers: float) -> dict[str, Any]:
    """Return what a rank tells of the numbers that its last 16 losses were divided by."""
    return {"loss": "NllLoss", "reads": 16, "numbers": list(numbers if len(numbers) > 1 else numbers * 16)}


class NotEquivalent(Detector):
    """The gradient that the ranks agreed on differs from the gradient of one process that sees the whole global batch.

    `ddpdebug equivalence` and `assert_equivalent` measure it; a watched run does not, because it has no second process
    to compare with. It says once (phase `counts`) where that is worth measuring: where each rank divides its loss by a
    number of its own, such as its labels that count, and these differ in most steps. This is an `info`; and a warning
    where each rank's number is the same in every step, such as the size of its batches.

    Impact: the result depends on the number of ranks: a change of world size silently changes the loss, the effective
    learning rate or the weight of single samples and tokens.

    Diagnosis: read the ratio first. World size, or one over it: a scaling or a second reduction. A ratio near 1 that
    changes with the batch: averaging over unequal counts. Only some parameters: a module that normalises over its local
    batch. Print the number of tokens or samples that enter the loss on each rank in the named step. On a mesh the
    reading names the dimension whose size a ratio is, or over which the ranks' gradients add up to that of one process.

    Causes:
    - the loss is a mean over local tokens or samples and the ranks hold different numbers of them
    - the loss is multiplied or divided by the world size although DDP already averages
    - gradients are reduced twice: by DDP and again by a manual `all_reduce` with SUM
    - gradients are clipped or changed on each rank before they are reduced
    - BatchNorm or a contrastive loss sees only the local batch

    Remedy:
    - for token averages sum the loss, all-reduce the token count without gradient, and use
      `loss_sum * world_size / global_tokens`: DDP's division by the world size then cancels
    - remove the manual reduction or scaling, or use a plain module with it; clip after `backward()`, once
    - convert with `torch.nn.SyncBatchNorm.convert_sync_batchnorm(model)` where the batch statistics matter
    """

    code = "SYNC209"
    severity = Severity.ERROR
    title = "several ranks do not train like one process on the same global batch"
    incident = ("subject", "phase", "location")
    topics = ("equivalence", "targets")
    counts_apart = Threshold(
        0.25,
        "median difference of the ranks' numbers as a share of their mean, from which on it is reported",
        source="chosen: random masks of some tokens differ by 10 %, and alike on all ranks in the mean",
    )
    same_ratio = Threshold(
        1e-3,
        "relative distance up to which two ratios of gradients are the same",
        source="calculated: both sides are computed in float64, and the numbers that explain a ratio are whole",
    )
    fires_on = Examples(
        lambda: Facts(topic="equivalence", values=dict.fromkeys(range(4), _facts(4.0))),
        lambda: Facts(topic="equivalence", values=dict.fromkeys(range(2), _facts(0.97, 2, residual=0.2))),
        lambda: Facts(topic="equivalence", values={0: _facts(0.5, 2), 1: _AGREES}),
        lambda: Facts(topic="equivalence", values=dict.fromkeys(range(2), _facts(1, 2, residual=0.1, batch_norm=True))),
        lambda: Facts(topic="targets", values={0: _counted(210), 1: _counted(*range(120, 136))}),
        lambda: Facts(topic="targets", values={0: _counted(32), 1: _counted(8)}),
        lambda: Facts(topic="equivalence", values={rank: _on_mesh(rank) for rank in range(4)}),
        lambda: Facts(
            topic="equivalence",
            values={
                rank: _on_mesh(rank, adds_up={"experts.w": "sum over ep"}, output=[3, "experts"]) for rank in (0, 1)
            },
        ),
        lambda: Facts(topic="equivalence", values={rank: _on_mesh(rank, quantity="update") for rank in range(4)}),
    )
    silent_on = Examples(
        lambda: Facts(topic="equivalence", values=dict.fromkeys(range(2), _AGREES)),
        lambda: Facts(topic="equivalence", values={0: _AGREES}),
        lambda: Facts(topic="targets", values={0: _counted(32), 1: _counted(32)}),
        lambda: Facts(topic="targets", values={0: _counted(32), 1: _counted(*[32] * 15, 20)}),  # a short last batch
        lambda: Facts(topic="targets", values={0: _counted(200), 1: _counted(*range(170, 186))}),  # random masks
        lambda: Facts(topic="targets", values={0: _counted(0), 1: _counted(0)}),  # not known
    )

    def __init__(self, config: Fields | None = None) -> None:
        super().__init__(config)
        self._offered = False

    def compare(self, topic: str, facts: Mapping[int, Equivalence | Targets]) -> Findings:
        if topic == "targets":
            yield from self._offer({r: fact for r, fact in sorted(facts.items()) if isinstance(fact, Targets)})
            return
        yield from self._measured({r: fact for r, fact in facts.items() if isinstance(fact, Equivalence)})

    def _offer(self, facts: Mapping[int, Targets]) -> Findings:
        """Say once that the ranks' losses are means over different numbers of labels."""
        columns = list(zip(*(fact.numbers for fact in facts.values()), strict=False))
        known = [column for column in columns if min(column) > 0]
        if self._offered or len(facts) < 2 or len(known) < len(columns) or not columns:
            return
        apart = statistics.median((max(column) - min(column)) * len(column) / math.fsum(column) for column in known)
        if apart < self.counts_apart:
            return
        self._offered = True
        fixed = all(len({*fact.numbers}) == 1 for fact in facts.values())
        tokens = self.finding().actions[0]
        more: Fields = {
            "title": _OFFER,
            "severity": Severity.INFO,
            "actions": ("run `ddpdebug equivalence script.py`, if tokens shall weigh the same", tokens),
        }
        if fixed and len(columns) > 1:
            most, least = (pick(facts, key=lambda rank: facts[rank].numbers[0]) for pick in (max, min))
            times = facts[most].numbers[0] / facts[least].numbers[0]
            more = {
                "severity": Severity.WARNING,
                "title": f"a sample of rank {least} weighs {times:.3g} times as much as one of rank {most}: their "
                "batches differ in size, and DDP averages over ranks",
                "actions": (
                    "give all ranks the same batch size",
                    "or multiply each loss by its samples times the world size over those of all ranks",
                ),
            }
        yield self.finding(
            step=0,
            last_step=max((fact.step or 0) for fact in facts.values()),
            ranks=tuple(facts),
            subject=("loss",),
            phase="counts",
            causes=self.finding().causes[:1],
            **more,
            evidence={"numbers": {str(rank): list(fact.numbers[-4:]) for rank, fact in facts.items()}, "apart": apart},
        )

    def _measured(self, facts: Mapping[int, Equivalence]) -> Findings:
        differing = {rank: fact for rank, fact in sorted(facts.items()) if fact.off}
        if not differing:
            return
        step = min(fact.step or 0 for fact in differing.values())
        first = {rank: fact for rank, fact in differing.items() if (fact.step or 0) == step}
        fact = max(first.values(), key=lambda fact: max(entry[2] for entry in fact.off.values()))
        off: dict[str, tuple[float, float, float]] = {}
        for other in first.values():
            off.update({name: entry for name, entry in other.off.items() if entry[2] > off.get(name, (0, 0, -1))[2]})
        names = sorted(off, key=lambda name: (-off[name][2], name))
        only_batch_norm = fact.without_batch_norm == "agree"
        sums = {name: text for other in first.values() for name, text in other.adds_up.items()}
        if (fact.mesh or sums or fact.quantity not in {"gradient", "parameter"}) and not only_batch_norm:
            causes, actions, reading = self._explain_mesh(fact, off, sums)
        else:
            causes, reading = self._explain(fact)
            actions = self._remedies(causes[0])
        yield self.finding(
            severity=Severity.INFO if only_batch_norm else self.severity,
            step=step,
            ranks=tuple(first) if len(first) < len(facts) else (),
            subject=tuple(names[:MAX_NAMES]),
            causes=causes,
            actions=actions,
            evidence={
                "reading": reading,
                **_output(facts),
                "ratio": {name: off[name][0] for name in names[:3]},
                "difference": off[names[0]][2],
                "bound": fact.bound,
                "differing": f"{len(off)} of {fact.compared} {fact.quantity}s",
                "dtype": fact.dtype,
            },
        )

    def _explain_mesh(
        self, fact: Equivalence, off: Mapping[str, tuple[float, float, float]], sums: Mapping[str, str]
    ) -> tuple[Sequence[str], Sequence[str], str]:
        """Return causes and actions, the likeliest first, and what the numbers say of each group of parameters."""
        groups: dict[str, list[str]] = {}
        why: list[tuple[str, str]] = []
        for name, (ratio, rest, _) in off.items():
            factor = self._factor(ratio, fact) if rest < self._slack(fact) else ""
            if name in sums:
                word, dimension = sums[name].split(" over ")
                text = f"differ over {dimension}, and their {word} is that of one process: nothing reduces them there"
                why.append(_UNREDUCED)
            elif fact.quantity in {"initial parameter", "parameter"}:
                text = "differ before the first step" if fact.quantity != "parameter" else "are on no rank at the start"
                why.append(_DRAWN)
            elif not ratio and not rest:
                text = "are missing"
                why.append(_CUT)
            elif factor:
                text = f"are {factor}"
                why.append(_FACTOR)
            else:
                text = "have no common ratio with those of one process"
                why.append(_UPDATED if fact.quantity == "update" else _UNEQUAL)
            groups.setdefault(text, []).append(name)
        if fact.quantity == "update":
            why.insert(0, _UPDATED)
        order = [*dict.fromkeys(why), *(pair for pair in (_UNREDUCED, _FACTOR, _UNEQUAL) if pair not in why)]
        readings = [f"{fact.quantity}s of {_common(names, fact.compared)} {text}" for text, names in groups.items()]
        tokens = (self.finding().causes[0], self.finding().actions[0])
        order.insert(0 if order[0] is _UNEQUAL and fact.output is None else len(order), tokens)
        return [cause for cause, _ in order], [action for _, action in order], "; ".join(readings)

    def _factor(self, ratio: float, fact: Equivalence) -> str:
        """Return a ratio in words: the sizes of dimensions that it is, or one over them; empty where it is none."""
        sizes = {name: size for name, (_, size) in fact.mesh.items() if size > 1}
        pairs = [(f"{a} x {b}", m * n) for (a, m), (b, n) in itertools.combinations(sizes.items(), 2)]
        for invert in (False, True):
            value = 1 / ratio if invert and ratio else ratio
            for table in (sizes.items(), pairs, [("the world", fact.world)]):
                names = [name for name, size in table if self._near(value, size, fact)]
                if names:
                    of = f"the size of {' or '.join(names)}"
                    return f"1/{round(value)} x: 1 / {of}" if invert else f"{round(value)} x: {of}"
        whole = abs(round(ratio)) > 1 and self._near(ratio, round(ratio), fact)
        return f"{round(ratio)} x" if whole else ""

    def _remedies(self, cause: str) -> Sequence[str]:
        """Return the remedies, first the one for `cause`."""
        tokens, reduction, norm = self.finding().actions
        known = self.finding().causes
        first = {known[0]: tokens, known[-1]: norm}.get(cause, reduction)
        return [first, *(remedy for remedy in (tokens, reduction, norm) if remedy != first)]

    def _explain(self, fact: Equivalence) -> tuple[Sequence[str], str]:
        """Return the causes with the likeliest first, and what the numbers say in words."""
        causes: list[str] = list(self.finding().causes)
        tokens, scaling, twice, clipping, local = causes
        if fact.without_batch_norm == "agree":
            reading = (
                "only BatchNorm: with its statistics fixed the ranks and one process agree; each rank normalises over "
                "its part of the batch, which is how DDP is meant to work"
            )
            return [local], reading
        ratio = self._common_ratio(fact)
        world = fact.world
        if ratio is None or self._near(ratio, 1, fact):
            if fact.shards == "batch":
                return [clipping, twice, scaling, tokens, local], (
                    "no common ratio, and the average of the parts' losses is the loss of the whole batch: what the "
                    "ranks do to the gradients makes the difference"
                )
            return [tokens, local, clipping, twice, scaling], (
                "no common ratio: the parts of the batch do not weigh the same on the ranks as in one process"
            )
        for factor, words in ((world, "the world size"), (1 / world, "1 / world size"), (world**2, "world size ** 2")):
            if self._near(ratio, factor, fact):
                return [scaling, twice, tokens, clipping, local], f"all gradients are {words} times as large"
        return causes, f"all gradients are {ratio:.4g} times as large"

    def _common_ratio(self, fact: Equivalence) -> float | None:
        """The one factor between the ranks' gradients and those of one process, None where it is not one."""
        ratios = [ratio for ratio, residual, _ in fact.off.values() if residual < self._slack(fact)]
        if len(ratios) < len(fact.off) or not all(self._near(ratio, ratios[0], fact) for ratio in ratios):
            return None
        return ratios[0]

    def _near(self, value: float, other: float, fact: Equivalence) -> bool:
        return abs(value - other) <= self._slack(fact) * abs(other)

    def _slack(self, fact: Equivalence) -> float:
        """How far two equal ratios may be apart: in 16 bits as far as rounding moves the gradients."""
        return max(self.same_ratio, fact.bound or 0.0)


def _common(names: Sequence[str], compared: int) -> str:
    """Return a few names, or what many have in common."""
    if len(names) == compared:
        return "all parameters"
    if len(names) <= 2:
        return " and ".join(f"`{name}`" for name in names)
    parts = [
        part[0]
        for part in itertools.takewhile(
            lambda part: len({*part}) == 1, zip(*(n.split(".") for n in names), strict=False)
        )
    ]
    return f"`{'.'.join(parts)}`" if parts else f"{len(names)} parameters, such as `{names[0]}`"


def _output(facts: Mapping[int, Equivalence]) -> dict[str, str]:
    """Return the first module whose output is no part of that of one process, and on which ranks."""
    found = {rank: fact.output for rank, fact in facts.items() if fact.output is not None}
    if not found:
        return {}
    first = min(found.values())
    ranks = [rank for rank, output in found.items() if output == first]
    alike = [
        f"{name} {at}"
        for name, (at, _) in facts[ranks[0]].mesh.items()
        if len(ranks) < len(facts)
        and {rank for rank, fact in facts.items() if fact.mesh.get(name, (None,))[0] == at} == {*ranks}
    ]
    where = "all ranks" if len(ranks) == len(facts) else " and ".join(alike) or ", ".join(f"rank {r}" for r in ranks)
    return {"output": f"`{first[1]}` is the first whose output is no part of that of one process ({where})"}
