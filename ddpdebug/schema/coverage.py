"""The coverage of a run: checks that were made and checks that were not, with texts. Pure and torch-free.

Having no findings means something only where something was looked at. `RankCoverage` is one rank's own account,
`Tally` counts what the ranks' rows say together, `Coverage` joins them, and `Coverage.gaps` are the things that nobody
checked, each with a reason and what to do. Terminal, `run.json`, verdict, metrics and pages all show this one record.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from enum import IntEnum
from typing import Any

from ddpdebug.schema.announcements import RankCoverage, short, table_items
from ddpdebug.schema.row import Flag
from ddpdebug.schema.step import Step

#: Of so many ranks each is listed in `run.json`; of more only those with something to tell.
MAX_RANKS = 64
#: Fewer evaluations show nothing anyway.
_EVALUATIONS = 2
_COMPARED = ("params_before_digest", "params_after_digest", "foreign_params_digest", "frozen_params_digest")
_REDUCED = ("grads_digest", "foreign_grads_digest")


class Weight(IntEnum):
    """The weight of a gap against the verdict *no findings*."""

    NOTE = 0  # they stand: it was left out on purpose, or only explains
    PART = 1  # something that is normally checked was not
    ESSENTIAL = 2  # nothing, or nothing between the ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """A missing check: `part` is one of `PARTS`, `text` says what is not checked and why, `action` the remedy."""

    part: str
    weight: Weight
    text: str
    action: str = ""

    @property
    def words(self) -> str:
        """The text of the gap, with its remedy if the gap is of the gravest kind."""
        return f"{self.text}; {self.action}" if self.action and self.weight is Weight.ESSENTIAL else self.text


#: What a gap may be about: the values of the metric's label.
PARTS = (
    "steps",
    "ranks",
    "parameters",
    "gradients",
    "optimizer",
    "forward",
    "numerics",
    "recipe",
    "data",
    "memory",
    "detectors",
    "other",
)
#: What the probes look at -> the keys under which they go off, without their `probe:`. Those in `_NOTES` only explain.
_PROBES = {
    "parameters": "parameters frozen replicas built last-state structure sharding shard-parameters",
    "gradients": "gradients step-gradients shard-gradients wrapper no-sync comm-hook backward clip gather call-site",
    "optimizer": "optimizer copies by-hand row scaler hyper state threads",
    "forward": "forward batch output broadcast buffers layers constants",
    "numerics": "numerics numerics-forward numerics-loss numerics-gradients numerics-after numerics-end modules entry "
    "guard loss-backward",
    "recipe": "recipe recipe-forward losses labels leaks clearing schedules resume audit moves modes beside epochs "
    "chance inputs views axes cuts no-grad unregistered attention rollouts evaluation observe load",
    "data": "loader items splits draws",
    "memory": "memory memory-limit input-sizes",
    "other": "coverage cut scene place loss_line disk spawned collectives own-times collector device-times captures",
}
_NOTES = {
    "scene",
    "place",
    "loss_line",
    "disk",
    "collectives",
    "own-times",
    "collector",
    "device-times",
}
_KINDS: dict[str, tuple[str, Weight]] = {
    f"probe:{key}": (about, Weight.NOTE if key in _NOTES else Weight.PART)
    for about, keys in _PROBES.items()
    for key in keys.split()
}
#: The same of other parts, and of probes that another version had, by the first words of their names.
_OTHERS = (
    ("forward", ("probe:",)),
    ("detectors", ("answer:", "detector:", "diagnosis", "message:", "exchange:", "row", "tick", "schedule")),
    ("detectors", ("a row of", "a message of")),
    ("memory", ("memory",)),
    ("other", ("patch", "progress", "sinks", "torch", "device")),
)


def kind_of(part: str) -> tuple[str, Weight]:
    """Return the subject of a part of ddpdebug, one of `PARTS`, and the weight of its absence."""
    known = next((about for about, words in _OTHERS if part.startswith(words)), "")
    return _KINDS.get(part) or (known or "other", Weight.PART if known else Weight.NOTE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Coverage:
    """The coverage of a run so far.

    Args:
        world: ranks that the run has.
        compared: ranks whose parameters or gradients stood side by side when this last happened; 1 in a world of one.
        since: the first step of that.
        until: the newest one.
        joined: the newest step of which rows of several ranks came together, checked in full or not.
        newest: the newest step that was judged.
        last_checked: whether that one was checked in full; None before the first.
        checked: steps that were checked in full on every rank that was there.
        gradients: whether gradients were ever compared, or seen in a world of one.
        losses: whether a loss was ever seen.
        validated: whether a validation loss was ever told or seen.
        own: whether parameters differed in each step that was compared: no DDP averages them, or the script says that
            they may differ (local steps, a Join).
        never: ranks of which no row was ever seen, at most `MAX_RANKS`; empty until some was.
        apart: why the ranks cannot be compared, or not any more; empty while they can.
        ranks: the ranks' own accounts, as far as they are known, by rank.
        certain: the first minute is over: what has not begun by now will not begin by itself.
        ended: nothing will come any more.
    """

    world: int = 1
    compared: int = 0
    since: int | None = None
    until: int | None = None
    joined: int | None = None
    newest: int | None = None
    last_checked: bool | None = None
    checked: int = 0
    gradients: bool = False
    losses: bool = False
    validated: bool = False
    own: bool = False
    never: tuple[int, ...] = ()
    apart: str = ""
    ranks: tuple[RankCoverage, ...] = ()
    certain: bool = False
    ended: bool = False

    @property
    def compared_now(self) -> int:
        """The number of ranks compared at present: 0 once that is impossible, 1 in a world of one."""
        if self.world == 1:
            return min(1, self.steps)
        return 0 if self.apart else self.compared

    @property
    def steps(self) -> int:
        """The largest number of optimizer steps that a rank has seen."""
        return max((rank.steps for rank in self.ranks), default=0)

    @property
    def gaps(self) -> tuple[Gap, ...]:
        """The missing checks, the gravest first; before `certain` some may only not have begun."""
        found = [
            *self._step_gaps(),
            *self._replay_gaps(),
            *self._hand_gaps(),
            *self._rank_gaps(),
            *self._parameter_gaps(),
            *self._off_gaps(),
            *self._notes(),
        ]
        return tuple(sorted(found, key=lambda gap: -gap.weight))

    @property
    def missed(self) -> tuple[Gap, ...]:
        """The gaps that rule out the verdict *clean*."""
        return tuple([gap for gap in self.gaps if gap.weight > Weight.NOTE])

    @property
    def complete(self) -> bool | None:
        """Whether all usual checks were made; None while it is too early to decide."""
        return not self.missed if self.certain or self.ended else None

    def line(self) -> str:
        """Return the coverage on one line."""
        if missed := self.missed:
            return f"not checked: {'; '.join(gap.text for gap in missed)}"
        if not self.steps:
            return "no optimizer step yet"
        if self.world == 1:
            return f"{_counted(self.steps, 'step')} of one rank, {self.checked} checked in full"
        if self.until is None or self.since is None:
            return "nothing compared yet"
        return f"{self.compared} of {_counted(self.world, 'rank')} compared, steps {self.since} to {self.until}"

    def beside(self, codes: Iterable[str]) -> Coverage:
        """Return the coverage beside findings with these codes: a RANK or SYNC finding itself says how ranks differ."""
        return replace(self, own=self.own and not any(code.startswith(("RANK", "SYNC")) for code in codes))

    @property
    def sharding(self) -> str:
        """The comparison of sharded parameters, in words; empty if none are sharded."""
        return next((rank.sharding for rank in self.ranks if rank.sharding), "")

    # --- gaps ---------------------------------------------------------------------------------------------------------

    def _step_gaps(self) -> Iterator[Gap]:
        if self.steps or self.newest is not None:
            return
        backwards = max((rank.backwards for rank in self.ranks), default=0)
        made = max((rank.made for rank in self.ranks), default=0)
        children = sum(rank.children for rank in self.ranks)
        if not (self.ended or backwards or made or children):
            return  # the script may still prepare its data
        if made:
            text = f"{_counted(made, 'optimizer step')} {_was(made)} taken, and none could be looked at"
            action = "see ranks/*/trouble.jsonl in the run directory, and report it"
        elif children:
            text = (
                f"no optimizer step was seen: the script has started {_counted(children, 'process', 'processes')} of "
                f"its own, and {'it has' if children == 1 else 'they have'} not joined a process group"
            )
            action = "train in a process group, or start what trains by torchrun or --nproc-per-node"
        elif backwards:
            text = (
                f"no optimizer step was completed, although backward ran {_counted(backwards, 'time')}; a step is one "
                "of torch.optim's optimizers, or a change of parameters between a backward and the next forward"
            )
            action = "train modules, and use an optimizer, for example torch.optim.SGD in place of an update by hand"
        else:
            text = "no optimizer step was seen"
            action = "give a script that trains, and let it take a step; gradients of torch.func are not followed"
        yield Gap(part="steps", weight=Weight.ESSENTIAL, text=text, action=action)

    def _replay_gaps(self) -> Iterator[Gap]:
        """Say which steps ran on the device alone, as CUDA graphs that hold whole steps."""
        if (count := max((rank.replayed for rank in self.ranks), default=0)) > 0:
            every = count + self.steps
            text = f"{count} of {_counted(every, 'step')} {_was(count)} not seen: a CUDA graph replayed them"
            yield Gap(part="steps", weight=Weight.PART, text=text, action="check some steps without the graph")

    def _hand_gaps(self) -> Iterator[Gap]:
        if any(rank.by_hand and rank.by_hand == rank.steps for rank in self.ranks):
            text = (
                "parameters are updated by hand: a step ends where the next forward begins, and learning rate, "
                "optimizer state and the order of the calls are not looked at"
            )
            yield Gap(part="optimizer", weight=Weight.NOTE, text=text)

    def _rank_gaps(self) -> Iterator[Gap]:
        if self.world < 2:
            return
        behind = self.joined is None or self.steps > self.joined + 1
        if self.apart and behind and (self.steps or not self.ended):
            if self.joined is None:
                text, action = f"nothing is compared between the ranks: {self.apart}", _NEVER_MET
            else:
                text, action = f"the ranks were compared until step {self.joined} only: {self.apart}", _PARTED
            yield Gap(part="ranks", weight=Weight.ESSENTIAL, text=text, action=action)
        elif self.never:
            who = _ranks(self.never)
            text = f"{who} {'is' if len(self.never) == 1 else 'are'} not compared: no step of it was seen"
            yield Gap(part="ranks", weight=Weight.ESSENTIAL, text=text, action=f"see what {who} does, and its log")
        elif self.until is None and self.newest is not None:
            text = "nothing is compared between the ranks: no step was checked in full on two of them"
            yield Gap(part="ranks", weight=Weight.ESSENTIAL, text=text, action="run longer, or with --every-step")

    def _parameter_gaps(self) -> Iterator[Gap]:
        if self.own and self.ended:  # until then one may still be averaged now and then
            text = "the ranks' parameters differed in each step (no DDP, local steps or a Join): they are not compared"
            yield Gap(part="parameters", weight=Weight.ESSENTIAL, text=text, action=_OWN)
        if self.sharding and self.world > 1:
            yield Gap(part="parameters", weight=Weight.NOTE, text=self.sharding)
        for name, weight in (("unwatched", Weight.PART), ("left_out", Weight.NOTE)):
            most: dict[str, int] = {}
            for rank in self.ranks:
                for reason, count in getattr(rank, name).items():
                    most[reason] = max(most.get(reason, 0), count)
            for reason, count in sorted(most.items()):
                text = f"{_counted(count, 'parameter')} not compared: {reason}"
                yield Gap(part="parameters", weight=weight, text=text)

    def _off_gaps(self) -> Iterator[Gap]:
        where: dict[str, list[int]] = {}
        said: dict[str, str] = {}
        for rank in self.ranks:
            for part, message in rank.off.items():
                where.setdefault(part, []).append(rank.rank)
                said.setdefault(part, message)
        for part, ranks in sorted(where.items()):
            about, weight = kind_of(part)
            place = f" on {_ranks(ranks)}" if len(ranks) < self.world else ""
            text = f"{part} is off{place}: {said[part]}"
            yield Gap(part=about, weight=weight, text=text, action="see ranks/*/trouble.jsonl in the run directory")

    def _notes(self) -> Iterator[Gap]:
        if not self.ended or self.newest is None:
            return
        if self.last_checked is False and self.until is not None and self.newest is not None:
            text = f"the last step that was checked in full is {self.until} of {self.newest}"
            yield Gap(part="steps", weight=Weight.NOTE, text=text, action="--every-step checks all")
        if self.until is not None and not self.gradients:
            yield Gap(part="gradients", weight=Weight.NOTE, text="no gradients were seen")
        if not self.losses:
            text = "no loss was seen"
            yield Gap(part="other", weight=Weight.NOTE, text=text, action="pass it to ddpdebug.observe(loss=...)")
        if (gap := self._unvalidated()) is not None:
            yield gap

    def _unvalidated(self) -> Gap | None:
        """Say that a model was evaluated and nobody knows how well; on one rank it may be told for all."""
        count = max((rank.evaluations for rank in self.ranks), default=0)
        if self.validated or count < _EVALUATIONS:
            return None
        text = f"no validation loss was seen in {_counted(count, 'evaluation')}"
        return Gap(part="recipe", weight=Weight.NOTE, text=text, action=_TELL_VALIDATION)

    # --- files --------------------------------------------------------------------------------------------------------

    def to_json(self) -> dict[str, Any]:
        """Return the coverage as JSON values, with its summary line and its gaps in words."""
        record = asdict(self)
        shown = [rank for rank in self.ranks if self.world <= MAX_RANKS or rank.remarkable][:MAX_RANKS]
        record["ranks"] = {str(rank.rank): asdict(rank) for rank in shown}
        record["never"] = list(self.never)
        gaps = [{**asdict(gap), "weight": gap.weight.name.lower()} for gap in self.gaps]
        return {"complete": self.complete, "line": self.line(), "gaps": gaps, "steps": self.steps, **record}

    @classmethod
    def from_json(cls, record: object) -> Coverage | None:
        """Parse a coverage from untrusted JSON; None if it is malformed."""
        if not isinstance(record, Mapping):
            return None
        try:
            ranks = tuple([RankCoverage.from_json(rank) for _, rank in table_items(record.get("ranks"), MAX_RANKS)])
            numbers: dict[str, Any] = {
                name: _number(record.get(name)) for name in ("since", "until", "joined", "newest")
            }
            last = record.get("last_checked")
            return cls(
                world=max(1, int(record["world"])),
                compared=int(record.get("compared", 0)),
                checked=int(record.get("checked", 0)),
                last_checked=last if isinstance(last, bool) else None,
                never=tuple([int(rank) for rank in list(record.get("never", ()))[:MAX_RANKS]]),
                apart=short(record.get("apart") or ""),
                ranks=ranks,
                **{name: record.get(name) is True for name in _SEEN},
                **numbers,
            )
        except (KeyError, TypeError, ValueError, OverflowError, AttributeError):
            return None


_TELL_VALIDATION = "ddpdebug.observe(val_loss=...), an nn loss module or --validation-loss functions shows it"
_SEEN = ("gradients", "losses", "validated", "own", "certain", "ended")
_OWN = "where a part must be equal on all ranks in each step, wrap it in DDP: then it is compared"
_NEVER_MET = "start every rank with ddpdebug, and let the nodes reach each other's ports"
_PARTED = "see how the other ranks have ended, or what has cut the network between the nodes"


class Tally:
    """The coverage by the rows of all ranks, counted step by step."""

    def __init__(self, world: int) -> None:
        #: Fields of `Coverage`, replaced as a whole: another thread may read them.
        self._so_far: dict[str, Any] = {"world": world, **dict.fromkeys(("newest", "since", "until")), "checked": 0}
        self._seen: set[int] = set()
        self._last: dict[int, Step] = {}  # optimizer -> its newest step

    def add(self, step: Step) -> None:
        """Count a step that was judged."""
        known, columns, number = {**self._so_far}, step.columns, step.step
        self._seen |= step.everyone
        self._last[step.optimizer] = step
        full = step.all(Flag.CHECKED)
        if known["newest"] is None or number >= known["newest"]:
            known.update(newest=number, last_checked=full)
            if len(step.rows) > 1:
                known["joined"] = number
        known["checked"] += full
        if not known.get("losses"):
            known["losses"] = any(loss == loss for loss in columns["loss"]) or step.any(Flag.LOSS_NONFINITE)  # noqa: PLR0124 - NaN
        if not known.get("validated"):
            known["validated"] = any(loss == loss for loss in columns["val_loss"])  # noqa: PLR0124 - NaN
        least = min(2, known["world"])
        parameters = max(sum(map(bool, columns[name])) for name in _COMPARED)
        gradients = max(sum(map(bool, columns[name])) for name in _REDUCED)
        if step.chosen:  # a kind has them all, or none has
            parameters, gradients = (len(step.everyone) * (count > 0) for count in (parameters, gradients))
        if step.any(Flag.SHARDED) and full:  # what each rank holds alone is compared by what is the others' too
            parameters = gradients = max(parameters, len(step.everyone))
        if gradients >= least:
            known["gradients"] = True
        if parameters >= least > 1:
            loose = step.all(Flag.NO_DDP) or step.any(Flag.LOCAL_ONLY | Flag.IN_JOIN)
            apart = loose and any(name in step.differing for name in _COMPARED)
            averaged = step.any(Flag.LOCAL_ONLY) and step.agrees("params_before_digest")
            known["own"] = apart and not averaged and known.get("own", True)
        if max(parameters, gradients) >= least:
            known["compared"] = max(parameters, gradients)
            known["since"] = number if known["since"] is None else min(known["since"], number)
            known["until"] = number if known["until"] is None else max(known["until"], number)
        self._so_far = known

    def coverage(
        self,
        ranks: Mapping[int, RankCoverage] | None = None,
        *,
        apart: str = "",
        certain: bool = False,
        ended: bool = False,
    ) -> Coverage:
        """Return the coverage from rows and the ranks' own accounts.

        Args:
            ranks: their own accounts; what the rows say of the others is added.
        """
        known = Coverage(**self._so_far)
        accounts = dict(ranks or {})
        for step in self._last.copy().values():
            for rank in step.everyone:
                account = accounts.get(rank, RankCoverage(rank=rank))
                accounts[rank] = replace(account, steps=max(step.step + 1, account.steps))
        seen = self._seen.copy()
        never = [rank for rank in range(known.world) if rank not in seen][:MAX_RANKS] if seen and not apart else []
        return replace(
            known,
            never=tuple(never),
            apart=apart,
            certain=certain,
            ended=ended,
            ranks=tuple([accounts[rank] for rank in sorted(accounts)]),
        )


def counted_off(coverage: Coverage) -> dict[str, int]:
    """Return the number of gaps for each of `PARTS` that has some, without intended ones."""
    counts: dict[str, int] = {}
    for gap in coverage.missed:
        counts[gap.part] = counts.get(gap.part, 0) + 1
    return counts


def _counted(count: int, noun: str, several: str = "") -> str:
    return f"{count} {noun if count == 1 else several or noun + 's'}"


def _was(count: int) -> str:
    return "was" if count == 1 else "were"


def _ranks(ranks: Iterable[int]) -> str:
    listed = sorted(ranks)
    shown = ", ".join(map(str, listed[:8])) + (f" and {len(listed) - 8} more" if len(listed) > 8 else "")
    return f"{'rank' if len(listed) == 1 else 'ranks'} {shown}"


def _number(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None
