"""RANK107: the same batch through the same weights gives different results."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ddpdebug.detectors.comparison import MAX_NAMES, within
from ddpdebug.detectors.examples import digest, step_at, steps
from ddpdebug.detectors.kinds import Detector, Examples, Facts, Fields, Finding, Findings, Severity, Step, Threshold
from ddpdebug.schema.announcements import (
    LOSS_FUNCTIONS,
    NUMBER,
    Agreement,
    Constants,
    LossSettings,
    NumberChange,
    Numbers,
    Precision,
)
from ddpdebug.schema.row import Flag, Row
from ddpdebug.schema.step import outvoted

_SAME: dict[str, Any] = {"batch_digest": digest(1), "record_digest": digest(2), "output_digest": digest(3), "loss": 1.0}
_LOOKED = {"step": 4, "output": "a1", "weights": "b1"}
_ODD: dict[int, Any] = {2: {"output_digest": digest(9), "loss": 1.5}}
_PRECISION: dict[str, Any] = {"step": 0, "autocast": None, "matmul": None}
_TABLE: dict[str, Any] = {"step": 4, "tensors": {"embed.b": "(2, 32):aa", "mean": "(3,):cc"}}
_PLAIN_CAUSES = [
    "a tensor in a plain attribute, made under a seed per rank: DDP broadcasts parameters and buffers only"
]
_PLAIN_ACTIONS = ["`self.register_buffer(name, tensor)` instead of an attribute, or make it under one seed"]
_LOSS: dict[str, Any] = {LOSS_FUNCTIONS: "NllLoss", "NllLoss.reduction": "1", "NllLoss.weight": "(3,):aa"}
_LOSS_CAUSES = [
    "an argument of the loss that depends on the rank, or on a file or an environment variable of one machine",
    "weights of classes that each rank has counted in its own part of the data",
]
_LOSS_ACTIONS = [
    "read the settings on one rank and `broadcast_object_list` them",
    "`all_reduce` the counts of the classes, and make the weights of the sums",
]
_SETTING_CAUSES = [
    "a configuration file or an environment variable of one machine, or an argument that depends on the rank",
    "intended: each rank has a rate or a temperature of its own",
]
_NUMBER_CAUSES = [
    "code that runs on some ranks only, or depends on what each rank has measured, sets the attribute",
    "a schedule that counts each rank's own steps or time",
]
_NUMBER_ACTIONS = [
    "set it on all ranks, from a value that all of them have: a step number, or one that rank 0 has broadcast"
]
_SET: dict[str, Any] = {"was": 1.0, "value": 0.5, "step": 25, "times": 1}
_BACK: dict[str, Any] = {"was": 0.5, "value": 1.0, "step": 33, "times": 1}
_ON: dict[str, Any] = {"was": 0.5, "value": 0.2, "step": 32, "times": 8}


def _numbers(*changes: Mapping[str, Any]) -> Facts:
    return Facts(topic="numbers:0", values={rank: {"step": 31, "changes": own} for rank, own in enumerate(changes)})


def _rates(*rates: float) -> Facts:
    told = {rank: {"step": 4, "tensors": {"drop.p": f"{NUMBER}{rate}"}} for rank, rate in enumerate(rates)}
    return Facts(topic="constants:0", values=told)


def _losses(settings: Mapping[str, str]) -> Facts:
    told = {"step": 15, "location": "train.py:9", "settings": _LOSS}
    return Facts(topic="loss_settings:0", values={0: told, 1: {**told, "settings": settings}, 2: told})


def _both(first: NumberChange | None, later: NumberChange | None) -> NumberChange | None:
    """Return two changes of a number, one after the other, as one."""
    if first is None or later is None:
        return first or later
    return replace(first, value=later.value, times=first.times + later.times)


def _shown(own: Mapping[int, NumberChange | None]) -> dict[int, float]:
    """Return the number that each rank has; one that told of no change has the one that the others had."""
    was = next(change.was for change in own.values() if change is not None)
    return {rank: was if change is None else change.value for rank, change in own.items()}


_DROPOUT: dict[str, Any] = {"flags": Flag.RNG_USED_IN_FORWARD}


class OutputsDisagree(Detector):
    """Ranks that were fed the same batch, with the same weights, buffers and modes, computed another output or loss.

    Impact: the ranks compute different functions. Their gradients are averaged all the same, and evaluation depends
    on which rank does it.

    Diagnosis: the evidence has each rank's loss or output fingerprint. Run the named batch on both ranks with forward
    hooks that print `output.double().sum()` per module; the first module that differs is the one to read.

    Causes:
    - `precision`: autocast, TF32, matmul precision or deterministic settings differ between ranks
    - a setting that is not a parameter or a buffer differs: eps, temperature, a mask length, a module replaced by hand
    - different library versions or device types on the nodes
    - a tensor kept in a plain attribute, which DDP does not broadcast: drawn under a seed per rank (random features,
      noise tables), or a cache or running average that each rank updates from its own data
    - the loss differs: class weights that each rank has counted in its own part of the data, label smoothing or a
      reduction that depends on the rank
    - a defective device

    Remedy:
    - `precision`: set precision and determinism switches on all ranks: `torch.backends.cuda.matmul.allow_tf32`,
      `autocast`
    - read all settings from one place and broadcast them; keep state in buffers
    - `register_buffer` what the model computes with and does not train: DDP then broadcasts it from rank 0
    - if only one device is off and the software is the same, swap the device and compare again
    """

    code = "RANK107"
    all_ranks = True
    severity = Severity.ERROR
    title = "the same batch and weights give different results"
    incident = ("phase", "ranks")
    reads = ("output_digest", "eval_output_digest")
    of_several = True
    topics = ("agreement", "precision", "constants", "numbers", "loss_settings")
    number_changes = Threshold(
        2,
        "changes of a plain number between two looks that make it each rank's own",
        source="chosen: a setting is set once; what follows a rank's own batch changes in every step",
    )
    same_loss = Threshold(
        1e-5,
        "relative distance of losses of one batch and equal weights that is none (or `--tolerance`)",
        source="calculated: another kernel rounds another way",
    )
    fires_on = Examples(
        lambda: step_at(
            4, odd={2: {"eval_output_digest": 8}}, eval_batch_digest=digest(1), eval_output_digest=digest(2)
        ),
        lambda: step_at(4, odd=_ODD, rng_digest=digest(5), **_SAME),
        lambda: Facts(topic="agreement:1", values={0: _LOOKED, 1: _LOOKED, 2: {**_LOOKED, "output": "c1"}}),
        lambda: Facts(topic="precision:0", values={0: _PRECISION, 1: {**_PRECISION, "autocast": "bfloat16"}}),
        lambda: Facts(topic="constants:0", values={0: _TABLE, 1: {"step": 4, "tensors": {"embed.b": "(2, 32):bb"}}}),
        lambda: _rates(0.1, 0.5),
        lambda: _losses({**_LOSS, "NllLoss.weight": "(3,):bb"}),
        lambda: _losses({**_LOSS, LOSS_FUNCTIONS: "NllLoss + Sum"}),  # label smoothing
        lambda: (_numbers({}, {"head.temperature": _SET}, {}), _numbers({}, {}, {})),
        lambda: (_numbers({}, {"tau": {**_SET, "times": 9}}), _numbers({}, {"tau": _ON})),  # a schedule on one rank
        lambda: (_numbers({"drop.p": _SET}, {"drop.p": {**_SET, "value": 0.6}}), _numbers({}, {})),
    )
    silent_on = Examples(
        lambda: step_at(4, eval_batch_digest=digest(1), eval_output_digest=digest(2)),
        lambda: step_at(4, odd={2: {"eval_batch_digest": 7, "eval_output_digest": 8}}, eval_batch_digest=digest(1)),
        lambda: step_at(4, rng_digest=digest(5), **_SAME),
        lambda: step_at(4, odd={2: {**_ODD[2], **_DROPOUT}}, flags=Flag.RNG_USED_IN_FORWARD, **_SAME),
        lambda: step_at(4, odd={2: {**_ODD[2], "params_before_digest": 5}}, **_SAME),
        lambda: step_at(4, flags=Flag.BATCH_SAMPLED, odd=_ODD, **{**_SAME, "record_digest": 0}),
        lambda: steps(4),
        lambda: _rates(0.1, 0.1),
        lambda: Facts(topic="agreement:1", values={0: _LOOKED, 1: _LOOKED}),
        lambda: Facts(topic="precision:0", values={0: _PRECISION, 1: _PRECISION}),
        lambda: Facts(topic="constants:0", values={0: _TABLE, 1: _TABLE}),
        lambda: _losses(_LOSS),
        lambda: _losses({LOSS_FUNCTIONS: "MseLoss", "MseLoss.reduction": "2"}),  # a task of its own for each rank
        lambda: _losses({**_LOSS, "NllLoss.weight": "(5,):bb"}),  # and classes of its own
        lambda: _numbers({"temperature": _SET}, {"temperature": _SET}),
        lambda: _numbers({"tokens": {**_SET, "times": 16}}, {"tokens": {**_SET, "value": 3.0, "times": 16}}),
        lambda: _numbers({}, {"temperature": {**_SET, "value": 1.0}}),  # and back again
        lambda: (_numbers({}, {"rows": _SET}), _numbers({}, {"rows": _BACK})),  # the last batch of an epoch
        lambda: (
            _numbers({}, {"rows": {**_SET, "value": 1.0, "times": 2}}),
            _numbers({}, {"rows": _SET}),
            _numbers({}, {}),
        ),
        lambda: (  # of another shape: this rank's own part of something
            Facts(topic="constants:0", values={0: _TABLE, 1: {"step": 4, "tensors": {"embed.b": "(2, 30):bb"}}}),
        ),
    )

    def __init__(self, config: Fields | None = None) -> None:
        super().__init__(config)
        #: topic -> name -> rank -> change: numbers that were not equal when they were looked at last
        self._differing: dict[str, dict[str, dict[int, NumberChange | None]]] = {}
        self._quantities: set[tuple[str, str]] = set()  # numbers of each rank's own, and what was told

    def explained_by(self, finding: Finding, cause: Finding) -> bool:
        """Fold what was measured in eval mode alone into dropout that is active there."""
        return cause.code != "RCP820" or finding.phase in {"evaluation", "agreement probe"}

    def can_show(self, step: Step) -> bool:
        return bool(_fed_alike(step) or _evaluated_alike(step))

    def wants_all(self, step: Step) -> bool:
        return self.can_show(step)

    def detect(self, step: Step) -> Findings:
        for ranks in _fed_alike(step):
            rows = {rank: step.rows[rank] for rank in ranks}
            finding = self._judge(step, rows)
            if finding is not None:
                yield finding
        for ranks in _evaluated_alike(step):
            outputs = {rank: int(step.rows[rank].eval_output_digest) for rank in ranks}
            if len(set(outputs.values())) > 1:
                shown = {str(rank): f"{value:016x}" for rank, value in outputs.items()}
                yield self.finding(
                    step,
                    ranks=outvoted(outputs),
                    subject=("output",),
                    phase="evaluation",
                    evidence={"fed_alike": ranks, "output": shown},
                )

    def _judge(self, step: Step, rows: Mapping[int, Row]) -> Finding | None:
        outputs = {rank: int(row.output_digest) for rank, row in rows.items()}
        losses = {rank: row.loss for rank, row in rows.items() if math.isfinite(row.loss)}
        labels_too = len({row.record_digest for row in rows.values()}) == 1 and rows[min(rows)].record_digest != 0
        parted = all(outputs.values()) and len(set(outputs.values())) > 1
        loss_known = labels_too and len(losses) == len(rows)
        tolerance = float(self.config.get("tolerance") or self.same_loss)
        loss_parted = loss_known and not within(tolerance, losses.values())
        if not parted and not loss_parted:
            return None
        if self.config.get("tolerance") and loss_known and not loss_parted:
            return None
        shown: Mapping[int, object] = losses if loss_parted and not parted else outputs
        return self.finding(
            step,
            severity=Severity.WARNING if parted and loss_known and not loss_parted else self.severity,
            ranks=outvoted(shown),
            subject=("output",) if parted else ("loss",),
            phase="training",
            evidence={
                "fed_alike": sorted(rows),
                "loss": {str(rank): row.loss for rank, row in rows.items()},
                "output": {str(rank): f"{value:016x}" for rank, value in outputs.items()},
            },
        )

    def _precision(self, told: Mapping[int, Precision]) -> Findings:
        """Ranks whose forwards run in different precision compute different functions, whatever they are fed."""
        settings = {
            "autocast": {rank: str(fact.autocast) for rank, fact in told.items()},
            "matmul": {rank: str(fact.matmul) for rank, fact in told.items()},
        }
        for key, values in settings.items():
            if len(set(values.values())) > 1:
                yield self.finding(
                    title="ranks run the same model in different precision",
                    step=max(fact.step or 0 for fact in told.values()),
                    ranks=outvoted(values),
                    subject=(key,),
                    phase="precision",
                    evidence={"values": {str(rank): value for rank, value in values.items()}},
                )

    def _constants(self, told: Mapping[int, Constants]) -> Findings:
        """Constants that differ, from the first step on. A warning: a rank may have a table of its own on purpose."""
        numbers = {rank: {n: v for n, v in fact.tensors.items() if v.startswith(NUMBER)} for rank, fact in told.items()}
        same = len({frozenset(own) for own in numbers.values()}) == 1  # else these are other models: stages
        yield from self._apart(
            numbers if same else {},
            title="a setting of the model differs between ranks",
            phase="settings",
            causes=_SETTING_CAUSES,
            actions=_LOSS_ACTIONS[:1],
        )
        yield from self._apart(
            {rank: {n: v for n, v in fact.tensors.items() if n not in numbers[rank]} for rank, fact in told.items()},
            title="ranks compute with different constants",
            phase="constants",
            causes=_PLAIN_CAUSES,
            actions=_PLAIN_ACTIONS,
        )

    def _losses(self, told: Mapping[int, LossSettings]) -> Findings:
        """Settings of a loss that differ, where all ranks have a loss function in common: others are other tasks."""
        tables = {rank: fact.settings for rank, fact in told.items()}
        functions = [set(table.get(LOSS_FUNCTIONS, "").split(" + ")) for table in tables.values()]
        of_one_line = len({fact.location for fact in told.values()}) == 1
        if of_one_line and set.intersection(*functions):
            yield from self._apart(
                tables,
                title="the loss has other settings on some ranks",
                step=max(fact.step or 0 for fact in told.values()),
                location=told[min(told)].location,
                phase="loss",
                causes=_LOSS_CAUSES,
                actions=_LOSS_ACTIONS,
            )

    def _apart(self, tables: Mapping[int, Mapping[str, str]], *, step: int = 0, **said: Any) -> Findings:
        """What has one shape and not one value."""
        common = set.intersection(*(set(table) for table in tables.values())) if len(tables) > 1 else set()
        shown = {name: [table[name] for table in tables.values()] for name in sorted(common)}
        names = [
            name
            for name, values in shown.items()
            if len(set(values)) > 1 and len({value.rpartition(":")[0] for value in values}) == 1
        ]
        if names:
            yield self.finding(
                severity=Severity.WARNING,
                step=step,
                ranks=outvoted({rank: tuple(table[name] for name in names) for rank, table in tables.items()}),
                subject=tuple(names[:MAX_NAMES]),
                evidence={
                    "differing": len(names),
                    "values": {str(rank): table[names[0]].removeprefix(NUMBER) for rank, table in tables.items()},
                },
                **said,
            )

    def _changed_numbers(self, topic: str, told: Mapping[int, Numbers]) -> Findings:
        """Numbers that were equal and are not any more. A warning: the model may compute with them or not.

        At two looks in a row, and none that has ever come back by itself: the size of a batch is nearly always the same
        on all ranks, and now and then another one.
        """
        before = self._differing.get(topic, {})
        now: dict[str, dict[int, NumberChange | None]] = {}
        found: dict[str, dict[int, NumberChange | None]] = {}
        for name in sorted({*before, *(name for fact in told.values() for name in fact.changes)}):
            new = {rank: fact.changes.get(name) for rank, fact in told.items()}
            if self._is_own_quantity(new):
                self._quantities.add((topic, name))
            if (topic, name) in self._quantities:
                continue
            known = before.get(name, {})
            own = {rank: _both(known.get(rank), change) for rank, change in new.items()}
            if len({*_shown(own).values()}) > 1:
                now[name] = own
            if name in now and name in before:
                self._quantities.add((topic, name))  # once is enough
                found[name] = now.pop(name)
        self._differing[topic] = now
        if not found:
            return
        name, own = next(iter(found.items()))
        was = next(change.was for change in own.values() if change is not None)
        shown = _shown(own)
        everybody = all(change is not None for change in own.values())
        yield self.finding(
            title="a number that the model computes with was changed on some ranks only",
            severity=Severity.WARNING,
            step=min(change.step for changes in found.values() for change in changes.values() if change is not None),
            last_step=max(fact.step or 0 for fact in told.values()),
            ranks=outvoted(shown) if everybody else tuple(rank for rank, change in own.items() if change is not None),
            subject=tuple(found)[:MAX_NAMES],
            phase="numbers",
            causes=_NUMBER_CAUSES,
            actions=_NUMBER_ACTIONS,
            evidence={"numbers": len(found), "was": was, "values": {str(rank): value for rank, value in shown.items()}},
        )

    def _is_own_quantity(self, changes: Mapping[int, NumberChange | None]) -> bool:
        """Whether a number follows what each rank has: it changes all the time, or has gone and come back."""
        known = [change for change in changes.values() if change is not None]
        if any(change.times > 1 and change.value == change.was for change in known):
            return True
        often = len(known) == len(changes) and max(change.times for change in known) > self.number_changes
        return often and len({change.value for change in known}) > 1

    def compare(self, topic: str, facts: Mapping[int, Any]) -> Findings:
        told: dict[int, Any] = dict(sorted(facts.items()))
        if topic.startswith("precision"):
            yield from self._precision(told)
        elif topic.startswith("constants"):
            yield from self._constants(told)
        elif topic.startswith("loss_settings"):
            yield from self._losses(told)
        elif topic.startswith("numbers"):
            yield from self._changed_numbers(topic, told)
        else:
            yield from self._agreement(told)

    def _agreement(self, told: Mapping[int, Agreement]) -> Findings:
        outputs = {rank: fact.output for rank, fact in told.items()}
        if len(set(outputs.values())) < 2:
            return
        yield self.finding(
            step=max((fact.step for fact in told.values() if fact.step is not None), default=self.next_step),
            ranks=outvoted(outputs),
            subject=("output",),
            phase="agreement probe",
            evidence={
                "output": {str(rank): value for rank, value in outputs.items()},
                "weights": {str(rank): fact.weights for rank, fact in told.items()},
            },
        )


def _fed_alike(step: Step) -> list[list[int]]:
    """Return groups of ranks that had the same batch, weights, buffers and modes, and no luck of their own."""
    if not _repeated(step, "batch_digest") or step.any(Flag.LOCAL_ONLY):
        return []
    groups: dict[tuple[int, ...], list[int]] = {}
    for rank, row in step.rows.items():
        # A sampled fingerprint does not prove that batches are equal; the records' does if it is there.
        if (
            row.batch_digest
            and row.params_before_digest
            and not (row.has(Flag.BATCH_SAMPLED) and not row.record_digest)
        ):
            groups.setdefault(_conditions(row), []).append(rank)
    return [ranks for ranks in groups.values() if len(ranks) > 1]


def _evaluated_alike(step: Step) -> list[list[int]]:
    """Return groups of ranks whose forwards in eval mode, before this step, had the same inputs and weights."""
    if not _repeated(step, "eval_batch_digest") or step.any(Flag.LOCAL_ONLY):
        return []
    groups: dict[tuple[int, ...], list[int]] = {}
    for rank, row in step.rows.items():
        if row.eval_batch_digest and row.params_before_digest:
            key = (row.eval_batch_digest, row.params_before_digest, row.frozen_params_digest)
            groups.setdefault(key, []).append(rank)
    return [ranks for ranks in groups.values() if len(ranks) > 1]


def _repeated(step: Step, name: str) -> bool:
    """Whether two ranks have the same digest."""
    known = [value for value in step.columns[name] if value]
    return len(set(known)) < len(known)


def _conditions(row: Row) -> tuple[int, ...]:
    luck = row.rng_digest if row.has(Flag.RNG_USED_IN_FORWARD) else 0
    record = row.record_digest if row.has(Flag.BATCH_SAMPLED) else 0
    known = (row.batch_digest, record, row.params_before_digest, row.frozen_params_digest, row.modes_digest)
    return (*known, row.buffers_digest, luck, row.micro_batches)
