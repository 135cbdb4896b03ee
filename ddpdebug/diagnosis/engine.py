"""Runs the rules over the steps in order, requests details from ranks, and folds consequences into causes. Torch-free.

Every rank runs its own copy on the same steps, answers and announcements and comes to the same findings: no clock, no
randomness, no set order. A step that a rule wants details of is parked; later steps queue behind it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from functools import cached_property
from operator import attrgetter, itemgetter
from typing import Any, TypeVar

from ddpdebug.detectors.base import Detector, RankClasses
from ddpdebug.detectors.catalog import catalog
from ddpdebug.detectors.ignored import read
from ddpdebug.detectors.kinds import ComparisonRule
from ddpdebug.diagnosis.local_steps import LocalSteps, mark, unmarked
from ddpdebug.diagnosis.places import Places
from ddpdebug.diagnosis.root_causes import Group, Incidents
from ddpdebug.schema.announcements import Announcement, Dropped, Failure, Scope, scope_of
from ddpdebug.schema.details import KINDS, Detail
from ddpdebug.schema.finding import Finding, Severity
from ddpdebug.schema.requests import Request
from ddpdebug.schema.row import Flag
from ddpdebug.schema.step import Signs, Step, are_many, kind_of

#: A parked step is judged with the details that have come after so many ticks.
DETAIL_TICKS = 200
#: More steps than this do not queue behind a parked one: it is judged with what is there.
QUEUE_STEPS = 192
_MAX_ROUNDS = 64
#: Of more ranks some are asked for details, of those that differ from most so many of each kind.
MOST_ASKED, _OF_ANOTHER = 16, 3
#: Announcements of `Scope.SHARED` are held and judged together, for at most so many steps, or so many ticks where no
#: more steps come.
_HELD_STEPS, _HELD_TICKS = 2, 20
#: Details of so many judged steps may still come.
_LEARNS_OF = 8
#: Combinations of signs that are remembered; a job has few.
_MAX_LOOKING = 256

T = TypeVar("T")


class Reading(IntEnum):
    """What a step means to the rules of one group; of several rules the highest value counts."""

    UNKNOWN = 0  # the step cannot show it
    FREE = 1  # the rule compares nothing: whatever it says counts
    QUIET = 2  # the ranks agree
    WAITING = 3  # looked into before without result
    KNOWN = 4  # the ranks differ as an open incident has it
    NEW = 5  # the ranks differ as no open incident accounts for


@dataclass(slots=True, eq=False)
class _Held:
    """A shared announcement that waits for more ranks: who has said what, steps and ticks since the first one did."""

    topic: str
    values: dict[int, Announcement | None] = field(default_factory=dict)
    steps: int = 0
    ticks: int = 0


@dataclass(slots=True, eq=False)
class _Unit:
    """The rules of a group, which look at a step together or not at all."""

    place: int  # among all
    rules: list[Detector]
    signs: int | None  # of which a step must show one (`Signs`); None where they look at every step
    awake: bool = False  # one of them looks at any step now
    open: set[int] = field(default_factory=set)  # optimizers of which the group waits for something, or for its end
    groups: dict[int, Group] = field(default_factory=dict)  # by optimizer

    def of(self, codes: Container[str]) -> _Unit:
        """Return a part of it."""
        return replace(self, rules=[rule for rule in self.rules if rule.code in codes])

    def shown(self, signs: int) -> bool:
        """Whether a step with these signs means something to it."""
        return self.signs is None or bool(self.signs & signs)

    def stirs(self, optimizer: int) -> bool:
        """Whether a step of this optimizer means something to it without."""
        return self.awake or optimizer in self.open


@dataclass(eq=False)
class _Queued:
    step: Step
    ticks: int = 0
    looked_at: int = -1  # the number of judged steps when the rules were last asked what they want to know
    asked: dict[str, dict[int, Detail | None]] = field(default_factory=dict)  # kind -> rank -> answer
    rules: frozenset[str] = frozenset()  # codes of the rules that asked

    @cached_property
    def who(self) -> frozenset[int]:
        return _asked(self.step)

    @property
    def last(self) -> bool:
        return self.step.last

    def complete(self) -> bool:
        return all(answers.keys() >= self.who for answers in self.asked.values())


#: The groups of rules that speak where replicas train apart.
_OF_REPLICAS = ("gradients", "RANK101", "RANK103")
#: What is said of replicas that parted, once it is known that they are averaged.
_LOCAL: dict[str, Any] = {
    "severity": Severity.INFO,
    "title": "the ranks train apart and are averaged from time to time: local SGD",
    "causes": ("intended: local SGD, DiLoCo, federated averaging with a long period",),
    "actions": ("if the ranks are to agree in each step, wrap the model in DDP, and leave `no_sync()` out",),
}

#: Likewise, once they are gone.
_DROPPED: dict[str, Any] = {
    "severity": Severity.INFO,
    "title": "each rank has trained a model of its own for a while, beside the one that has a DDP",
    "causes": ("intended: a probe of the features, a trial, a search",),
    "actions": ("if what comes of it is used on all ranks, average its gradients, or broadcast it",),
}


class Diagnosis:
    """The rules and their state: takes steps, details and announcements, and returns findings.

    Args:
        world: number of ranks.
        config: settings that rules read (`tolerance`, ...).
        detectors: the rules; all of the catalogue by default.
        on_trouble: told once (part, message) when a rule raised and was switched off.
    """

    def __init__(
        self,
        *,
        world: int,
        config: Mapping[str, Any] | None = None,
        detectors: Sequence[Detector] | None = None,
        on_trouble: Callable[[str, str], None] | None = None,
    ) -> None:
        self.world = world
        rules = [rule(config) for rule in catalog()] if detectors is None else list(detectors)
        self._rules = sorted(rules, key=lambda rule: rule.code)
        shared: dict[str, Any] = {}
        for rule in self._rules:
            rule.shared = shared
        self._seeing_all = frozenset(rule.code for rule in self._rules if _sees_every_step(rule))
        self._comparing = frozenset(rule.code for rule in self._rules if isinstance(rule, ComparisonRule))
        self._signs, self._units = self._united()
        self._looking: dict[int, list[_Unit]] = {}  # signs of a step -> who looks at it
        self._awake: dict[_Unit, None] = {}  # who looks at steps without them as well
        self._newest: Step | None = None  # that was judged
        self._next_step = 0
        self._on_trouble = on_trouble
        self._incidents = Incidents(world, read((config or {}).get("ignore")))
        self._queue: deque[_Queued] = deque()
        self._outbox: list[Request] = []
        self._judged = 0
        self._judged_lately: deque[Step] = deque(maxlen=_LEARNS_OF)  # of which more may become known
        self._rounds: dict[str, dict[int, dict[int, Announcement | None]]] = {}  # topic -> round -> rank -> value
        self._spoken: dict[str, dict[int, int]] = {}  # topic -> rank -> rounds
        #: Announcements, as rules read them: topic -> rank -> the newest.
        self.facts: dict[str, dict[int, Announcement]] = {}
        self._held: list[_Held] = []
        self._places = Places()
        self.local_steps = LocalSteps(config or {})
        self._undecided: dict[int, list[_Queued]] = {}  # optimizer -> steps in which it parted, judged as local so far

    @property
    def busy(self) -> bool:
        """Whether steps wait for answers."""
        return bool(self._queue)

    @property
    def waits(self) -> bool:
        """Whether ticks without news count: a step or an announcement is held until others have come."""
        return bool(self._queue or self._held)

    # --- input --------------------------------------------------------------------------------------------------------

    def feed(self, step: Step) -> list[Request]:
        """Queue the next step; return the detail requests that it causes now."""
        for held in self._held:
            held.steps += 1
        step = unmarked(step)
        if self.local_steps.read(step):
            beside = self.local_steps.is_beside(step.optimizer)
            self._incidents.settle(step.optimizer, _OF_REPLICAS, _DROPPED if beside else _LOCAL)
        self._queue.append(_Queued(step if step.facts is self.facts else replace(step, facts=self.facts)))
        if len(self._queue) == 1:  # of others it is known in the tick what those before them have shown
            self._ask(self._queue[0])
        return self.requests()

    def curious(self, step: Step) -> list[str]:
        """Return the rules that want the rows of all ranks for a step, by what its chosen rows show."""
        asking = [rule for rule in self._rules if type(rule).wants_all is not Detector.wants_all]
        step = replace(step, facts=self.facts)
        return [rule.code for rule in asking if self._run(rule, False, rule.wants_all, step)]

    def adopt(self, findings: Iterable[Finding]) -> None:
        """Adopt the findings of another rank, whose judging this one continues."""
        rules = {rule.code: rule for rule in self._rules}
        for finding in findings:
            if finding.code in rules:
                self._incidents.adopt(rules[finding.code], finding)

    def requests(self) -> list[Request]:
        """Return and clear the detail requests since the last call."""
        requests, self._outbox = self._outbox, []
        return requests

    def _drop(self, optimizer: int) -> None:
        self._undecided.pop(optimizer, None)
        if self.local_steps.drop(optimizer):
            self._incidents.settle(optimizer, _OF_REPLICAS, _DROPPED)

    def answer(
        self, rank: int, optimizer: int, step: int, kind: str, value: Detail | None, *, last: bool = False
    ) -> None:
        """Add one rank's detail; None means that the rank has none."""
        place = optimizer, step, last
        waiting = [q for q in self._queue if (q.step.optimizer, q.step.step, q.last) == place and kind in q.asked]
        for queued in waiting:
            queued.asked[kind][rank] = value
        if not waiting and value is not None:
            self._learn(place, kind, rank, value)

    def _learn(self, place: tuple[int, int, bool], kind: str, rank: int, value: Detail) -> None:
        """Word what was found in a step anew, of which a detail has come once more."""
        for i, judged in enumerate(self._judged_lately):
            if (judged.optimizer, judged.step, judged.last) == place:
                step = judged.with_details({kind: {**judged.details.get(kind, {}), rank: value}})
                self._judged_lately[i] = step
                for rule in [rule for rule in self._rules if rule.learns and kind in rule.wants]:
                    if (finding := self._run(rule, None, rule.learned, step)) is not None:
                        self._incidents.learn(finding)

    def meet(self) -> None:
        """Discard pending announcements after a meeting: all ranks are present again, and will announce anew."""
        for topic, spoken in self._spoken.items():
            self._spoken[topic] = dict.fromkeys(range(self.world), max(spoken.values()))
        self._rounds.clear()
        for rule in list(self._rules):
            self._run(rule, None, rule.meet)

    def tell(self, topic: str, rank: int, value: Announcement | None) -> None:
        """Add one rank's announcement; the scope of its topic decides with which other ranks' it is judged.

        Args:
            topic: as it was sent, with its number.
            value: None is one that could not be read: the rank has spoken, and nobody knows what.
        """
        self._places.hear(rank, value)
        scope = scope_of(topic)
        if scope is Scope.SHARED:
            own = (held for held in self._held if held.topic == topic and rank not in held.values)
            if (found := next(own, None)) is None:
                self._held.append(found := _Held(topic))
            found.values[rank] = value
            return
        if topic.startswith(f"{Dropped.topic}:"):
            self._drop(int(topic.rpartition(":")[2]))
        if scope is Scope.ALONE:
            if topic == Failure.topic:
                self._release(everything=True)  # what the rank said before it failed may be why
            self._compare(topic, {rank: value})
            return
        if value is not None:
            self.facts.setdefault(topic, {})[rank] = value
        spoken = self._spoken.setdefault(topic, {})
        number = spoken[rank] = spoken.get(rank, 0) + 1
        rounds = self._rounds.setdefault(topic, {})
        rounds.setdefault(number, {})[rank] = value
        if len(rounds[number]) == self.world:
            self._compare(topic, dict(sorted(rounds.pop(number).items())))
        while len(rounds) > _MAX_ROUNDS:
            rounds.pop(min(rounds))

    # --- output -------------------------------------------------------------------------------------------------------

    def tick(self) -> list[tuple[Finding, bool]]:
        """Judge the steps that are ready; return findings, with True for new and False for updated ones."""
        for held in self._held:
            held.ticks += 1
        self._release()
        for queued in self._queue:
            queued.ticks += bool(queued.asked)
        while self._queue:
            head = self._queue[0]
            if head.looked_at < self._judged:
                self._ask(head)
            overdue = head.ticks > DETAIL_TICKS or len(self._queue) > QUEUE_STEPS
            if not head.complete() and not overdue:
                break
            self._judge_as_meant(head)
            self._queue.popleft()
        for queued in self._queue:
            if queued.looked_at < 0:
                self._ask(queued)
        return self.news()

    def news(self) -> list[tuple[Finding, bool]]:
        """Return the findings from announcements so far, and judge no step: only this rank has heard them."""
        return self._places.named(self._incidents.news())

    def finish(self) -> list[tuple[Finding, bool]]:
        """Judge all remaining steps with the details at hand, and return also findings that only the end shows."""
        self._release(everything=True)
        while self._queue:
            if self._queue[0].looked_at < 0:
                self._ask(self._queue[0])
            self._judge_as_meant(self._queue.popleft())
        for optimizer in list(self._undecided):
            if not self.local_steps.is_beside(optimizer):
                self._judge_parted(optimizer)
        for rule in list(self._rules):
            self._remind(rule)
            self._admit([(rule, f, None) for f in self._findings(rule, rule.finish)], None)
        return self._places.named(self._incidents.news(last=True))

    # --- rules --------------------------------------------------------------------------------------------------------

    def _united(self) -> tuple[Signs, list[_Unit]]:
        """Return what steps may show, and the rules that judge steps, by group, in code order."""
        groups: dict[str, list[Detector]] = {}
        for rule in self._rules:
            judges = rule.code in self._seeing_all or rule.code in self._comparing or rule.wants
            if judges and (self.world > 1 or not rule.of_several):
                groups.setdefault(rule.group or rule.code, []).append(rule)
        signs = Signs(name for rules in groups.values() for rule in rules for name in rule.reads or ())
        return signs, [_Unit(i, rules, self._read_by(rules, signs)) for i, rules in enumerate(groups.values())]

    def _read_by(self, rules: Sequence[Detector], signs: Signs) -> int | None:
        if any(rule.reads is None for rule in rules):
            return None
        reads = {name for rule in rules for name in rule.reads or ()}
        return signs.of(reads, differing=not any(rule.code in self._seeing_all for rule in rules))

    def _looks(self, step: Step) -> list[_Unit]:
        """Return the rules that a step may mean something to, in code order; in most steps these are few."""
        if step.last or step.details:
            return self._units
        signs = step.memo.get("signs")
        if signs is None:
            signs = step.memo["signs"] = self._signs.shown(step)
        looking = self._looking.get(signs)
        if looking is None:
            if len(self._looking) >= _MAX_LOOKING:
                self._looking.clear()
            looking = self._looking[signs] = [unit for unit in self._units if unit.shown(signs)]
        if self._awake:
            others = [unit for unit in self._awake if not unit.shown(signs) and unit.stirs(step.optimizer)]
            if others:
                return sorted((*looking, *others), key=attrgetter("place"))
        return looking

    def _note(self, unit: _Unit, optimizer: int | None) -> None:
        """Note whether a unit looks at steps that show it nothing as well."""
        unit.awake = any(rule.awake for rule in unit.rules)
        if optimizer is not None and unit.rules:
            (unit.open.discard if self._group(unit, optimizer).idle else unit.open.add)(optimizer)
        if unit.awake or unit.open:
            self._awake[unit] = None
        else:
            self._awake.pop(unit, None)

    def _group(self, unit: _Unit, optimizer: int) -> Group:
        if (group := unit.groups.get(optimizer)) is None:
            group = unit.groups[optimizer] = self._incidents.group(unit.rules[0], optimizer)
        return group

    def _run(self, rule: Detector, otherwise: T, action: Callable[..., T], *args: Any) -> T:
        try:
            return action(*args)
        except Exception as error:  # noqa: BLE001 - one bad rule must not take the others with it
            self._switch_off(rule, error)
            return otherwise

    def _switch_off(self, rule: Detector, error: Exception) -> None:
        self._rules = [r for r in self._rules if r is not rule]
        for unit in self._units:
            unit.rules = [r for r in unit.rules if r is not rule]
        if self._on_trouble is not None:
            self._on_trouble(f"detector:{rule.code}", f"{type(error).__name__}: {error}")

    def _findings(self, rule: Detector, action: Callable[..., Iterable[Finding]], *args: Any) -> list[Finding]:
        return self._run(rule, [], lambda: list(action(*args)))

    def _read(self, rule: Detector, step: Step) -> tuple[Reading, RankClasses | None]:
        unread = (step.last and not rule.last_state) or (step.chosen and _is_beyond(rule, step))
        if unread or not isinstance(rule, ComparisonRule):
            return _UNKNOWN if unread else _FREE
        key = ("classes", rule.code)
        if key not in step.memo:
            step.memo[key] = rule.rank_classes(step)
        shown: RankClasses | None = step.memo[key]
        if shown is None:
            return Reading.UNKNOWN, None
        if not shown:
            return Reading.QUIET, shown
        group = self._incidents.group(rule, step.optimizer)
        if group.grows(shown) or (group.incidents and rule.is_new_event(step)):
            return Reading.NEW, shown
        if group.incidents and not group.silent:
            return Reading.KNOWN, shown
        waits = group.wait > 0 and not (group.silent and step.last)
        return (Reading.WAITING if waits else Reading.NEW), shown

    def _ask(self, queued: _Queued) -> None:
        """Ask for the details of a step that some rule wants and that are not on their way already."""
        queued.looked_at = self._judged
        step = queued.step
        wanted: dict[str, None] = {}
        rules = set(queued.rules)
        others = [q for q in self._queue if q is not queued and q.step.optimizer == step.optimizer]
        pending = {code for other in others for code in other.rules} if queued is not self._queue[0] else set()
        for rule in [rule for unit in self._looks(step) for rule in unit.rules if rule.wants]:
            if rule.code in rules or (rule.code in pending and not rule.every_sample):
                continue
            if self._run(rule, False, self._curious, rule, step):
                rules.add(rule.code)
                wanted.update(dict.fromkeys(rule.wants))
        queued.rules = frozenset(rules)
        for kind in sorted(wanted.keys() - queued.asked.keys(), key=KINDS.index):
            queued.asked[kind] = {}
            about = Request(optimizer=step.optimizer, step=step.step, kind=kind, last=queued.last, ranks=queued.who)
            self._outbox.append(about)

    def _curious(self, rule: Detector, step: Step) -> bool:
        if (step.last and not rule.last_state) or (step.chosen and _is_beyond(rule, step)):
            return False
        if rule.every_sample:
            return rule.suspects(step)
        reading, _ = self._read(rule, step)
        if reading is Reading.KNOWN or reading is Reading.WAITING:
            return False
        if reading is not Reading.NEW and type(rule).suspects is ComparisonRule.suspects:
            return False
        group = self._incidents.group(rule, step.optimizer)
        if reading is not Reading.NEW and (group.incidents or group.wait > 0):
            return False
        return rule.suspects(step)

    # --- judgement ----------------------------------------------------------------------------------------------------

    def _judge_as_meant(self, queued: _Queued) -> None:
        """Judge a step; one in which the replicas part is local SGD until later steps show that it is not."""
        optimizer, local = queued.step.optimizer, self.local_steps
        if local.parted(optimizer):
            self._judge_parted(optimizer)
        step = local.marked(queued.step)
        if local.undecided(queued.step):
            step = mark(step)
            if queued.step.any(Flag.CHECKED):  # no other shows more later; so they are no more than the patience allows
                self._undecided.setdefault(optimizer, []).append(queued)
        elif not local.parted(optimizer) and step is not queued.step:
            self._undecided.pop(optimizer, None)
        self._judge(queued, step)

    def _judge_parted(self, optimizer: int) -> None:
        """Judge the steps of replicas that were not averaged by the rules that have not looked at them yet."""
        for queued in self._undecided.pop(optimizer, ()):
            rules = [rule for rule in self._rules if isinstance(rule, ComparisonRule)]
            local = mark(queued.step)
            pairs = [
                (rule, [self._run(rule, _UNKNOWN, self._read, rule, s)[0] for s in (queued.step, local)])
                for rule in rules
            ]
            self._judge(queued, queued.step, only={rule.code for rule, (now, then) in pairs if now is not then})

    def _judge(self, queued: _Queued, step: Step, only: Container[str] | None = None) -> None:
        details = {
            kind: {rank: answer for rank, answer in sorted(answers.items()) if answer is not None}
            for kind, answers in queued.asked.items()
        }
        step = step.with_details(details) if details else step
        found: dict[str, list[Finding]] = {}
        seeing, comparing, last = self._seeing_all, self._comparing, queued.last
        units = self._looks(step) if only is None else [unit.of(only) for unit in self._units]
        rules = [rule for unit in units for rule in unit.rules]
        readings = {
            rule.code: self._run(rule, _UNKNOWN, self._read, rule, step) if last or rule.code in comparing else _FREE
            for rule in rules
        }
        for rule in rules:
            code = rule.code
            if (last and not rule.last_state) or (step.chosen and _is_beyond(rule, step)):
                continue
            # most steps show nothing, and most rules have nothing to remember of those
            if code in seeing or (code in comparing and readings[code][0] not in _NOTHING):
                try:  # as `_findings` does, once for each rule of each step
                    new = list(rule.detect(step))
                except Exception as error:  # noqa: BLE001 - as in `_run`
                    self._switch_off(rule, error)
                    continue
                if new:
                    found[code] = new
        if found and any(rule.learns and rule.code in found for rule in rules):
            self._judged_lately.append(step)
        self._settle(step, units, readings, found, queued.rules)
        for unit in units if only is None else self._units:
            if unit.signs is not None:
                self._note(unit, step.optimizer)
        self._judged += 1
        self._newest, self._next_step = step, max(self._next_step, step.step + 1)

    def _settle(
        self,
        step: Step,
        units: Sequence[_Unit],
        readings: Mapping[str, tuple[Reading, RankClasses | None]],
        found: dict[str, list[Finding]],
        asked: frozenset[str],
    ) -> None:
        admitted: list[tuple[Detector, Finding, RankClasses | None]] = []
        resting: list[Group] = []
        telling = asked.union(found)
        for group, rules, (reading, shown) in self._stirred(step, units, readings, telling):
            group.look(shown if reading is Reading.NEW else None)
            fresh = [(rule, f, shown) for rule in rules for f in found.get(rule.code, ())]
            if reading is Reading.WAITING:
                group.wait -= 1
                group.again(step.step)  # the ignored ones that are looked past
            elif reading is Reading.KNOWN or (fresh and self._repeats(group, rules, asked)):
                group.quiet = 0
                group.again(step.step)
            elif fresh:
                group.found()
                admitted += fresh
            elif asked.intersection(r.code for r in rules if not r.every_sample):
                group.missed()
            else:
                group.wait = max(0, group.wait - 1)
                if reading is Reading.QUIET or (reading is Reading.FREE and any(r.can_show(step) for r in rules)):
                    resting.append(group)
        self._admit(admitted, step.optimizer)
        for group in {self._incidents.group(rule, step.optimizer) for rule, _, _ in admitted}:
            group.rest_if_silent()
        for group in resting:
            self._incidents.close(group.rest())

    def _stirred(
        self,
        step: Step,
        units: Sequence[_Unit],
        readings: Mapping[str, tuple[Reading, RankClasses | None]],
        telling: frozenset[str],
    ) -> Iterable[tuple[Group, list[Detector], tuple[Reading, RankClasses | None]]]:
        """Yield the groups that a step means something to, and what; in most steps these are few."""
        for unit in units:
            if not (rules := unit.rules):  # they are off
                continue
            group = self._group(unit, step.optimizer)
            read = readings[rules[0].code]
            if len(rules) > 1:
                read = max((readings[rule.code] for rule in rules), key=itemgetter(0))
            if read[1] or not group.idle or (telling and not telling.isdisjoint(rule.code for rule in rules)):
                yield group, rules, read

    @staticmethod
    def _repeats(group: Group, rules: Sequence[Detector], asked: frozenset[str]) -> bool:
        """Whether findings made without the details that name what is wrong are about an open incident."""
        wanting = [rule.code for rule in rules if rule.wants]
        return bool(group.incidents and wanting) and not asked.intersection(wanting)

    def _admit(self, found: Iterable[tuple[Detector, Finding, RankClasses | None]], optimizer: int | None) -> None:
        for rule, finding, shown in sorted(found, key=lambda item: (item[0].causal_rank(item[1]), item[0].code)):
            self._incidents.admit(rule, finding, self._incidents.group(rule, optimizer), shown)

    def _release(self, *, everything: bool = False) -> None:
        waiting, self._held = self._held, []
        for held in waiting:
            overdue = held.steps > _HELD_STEPS or held.ticks > _HELD_TICKS
            if everything or overdue or len(held.values) == self.world:
                self._compare(held.topic, dict(sorted(held.values.items())))
            else:
                self._held.append(held)

    def _compare(self, topic: str, values: Mapping[int, Announcement | None]) -> None:
        name = topic.partition(":")[0]
        known = {rank: value for rank, value in values.items() if value is not None}
        for rule in list(self._rules):
            if known and name in rule.topics:
                self._remind(rule)
                findings = self._findings(rule, rule.compare, topic, known)
                self._admit([(rule, finding, None) for finding in findings], None)
                for unit in self._units:
                    if unit.signs is not None and rule in unit.rules:
                        self._note(unit, None)

    def _remind(self, rule: Detector) -> None:
        """Show a rule the newest step that was judged, which it may not have looked at."""
        rule.newest, rule.next_step = self._newest, self._next_step


def _is_beyond(rule: Detector, step: Step) -> bool:
    """Whether the chosen rows of a step cannot show what a rule looks for."""
    compares = isinstance(rule, ComparisonRule) and not rule.by_kind
    return rule.all_ranks or (step.parted and compares)


def _asked(step: Step) -> frozenset[int]:
    """Return who is asked about a step: all ranks, of very many some of each kind, most of the largest."""
    if not are_many(len(step.rows)):
        return frozenset(step.rows)
    kinds: dict[tuple[float, ...], list[int]] = {}
    for rank, row in step.rows.items():
        kinds.setdefault(kind_of(row), []).append(rank)
    largest, *others = sorted(kinds.values(), key=lambda ranks: (-len(ranks), ranks))
    found = largest[: MOST_ASKED // 2]
    for ranks in others:
        found += ranks[: min(_OF_ANOTHER, MOST_ASKED - len(found))]
    return frozenset(found)


def _sees_every_step(rule: Detector) -> bool:
    """Whether a rule must be given every step: one that compares nothing, looks for more than that, or remembers."""
    if not isinstance(rule, ComparisonRule):
        return type(rule).detect is not Detector.detect
    kind, plain = type(rule), ComparisonRule
    return (kind.detect, kind.remember, kind.suspects) != (plain.detect, plain.remember, plain.suspects)


_UNKNOWN: tuple[Reading, RankClasses | None] = (Reading.UNKNOWN, None)
_FREE: tuple[Reading, RankClasses | None] = (Reading.FREE, None)
_NOTHING = frozenset({Reading.UNKNOWN, Reading.QUIET})
