"""Incidents, open and closed: findings folded into their root causes. Torch-free.

An incident is opened by the first finding about it, counts later occurrences, and is closed when what it
is about is gone. An incident that recurs soon, or at a regular interval, is one incident.
A finding that an open incident explains becomes a consequence: evidence of that incident, not a finding of its own.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ddpdebug.detectors import causality
from ddpdebug.detectors.base import Detector, RankClasses
from ddpdebug.detectors.ignored import Ignored
from ddpdebug.schema.finding import Finding

#: So many quiet steps close an incident. The patience doubles each time that the incident comes back.
QUIET_STEPS = 3
_MAX_DOUBLINGS = 8
#: Steps after which one is looked into anew that is as an ignored incident has it: another may hide behind it.
_SILENT_STEPS = 16
#: An incident that is reopened within so many times its quiet period (in steps) counts as the same incident.
_SOON = 3
#: Distances that differ by less than this share are the same.
_REGULAR = 0.1
_MAX_SUBJECTS = 20
_MAX_CONSEQUENCES = 10
_MAX_CLOSED = 64

#: rank -> class: ranks in different classes have been seen to disagree.
Pattern = Mapping[int, int]


def refine(pattern: Pattern | None, shown: RankClasses) -> Pattern:
    """Return the classes of ranks that agreed so far and still agree."""
    classes: dict[Hashable, int] = {}
    known = pattern or {}
    return {rank: classes.setdefault((known.get(rank), shown[rank]), len(classes)) for rank in sorted(shown)}


def count(pattern: Pattern | None) -> int:
    """Return the number of classes."""
    return len(set(pattern.values())) if pattern else 0


def explains(patterns: Iterable[Pattern], shown: RankClasses) -> bool:
    """Whether the patterns explain a difference: ranks that no pattern separates show the same."""
    known = list(patterns)
    seen: dict[Hashable, Hashable] = {}
    for rank in sorted(shown):
        key = tuple(pattern.get(rank, f"rank {rank}") for pattern in known)
        if seen.setdefault(key, shown[rank]) != shown[rank]:
            return False
    return True


@dataclass(slots=True, eq=False)
class Incident:
    """One problem of a run, with all that is known of it so far."""

    rule: Detector
    finding: Finding
    group: Group
    root: Incident | None = None  # the incident that this one follows from
    told: int = 0  # the count that the outside knows
    changed: bool = False
    distance: int | None = None  # steps from the last time that the same was seen before it was opened

    @property
    def top(self) -> Incident:
        """The incident that is the root cause of this one; itself if it has none."""
        return self if self.root is None else self.root.top

    def again(self, step: int | None) -> None:
        """Count one more occurrence."""
        last = self.finding.last_step
        if step is None or last is None or step > last:
            self.finding = self.finding.seen_again(step)
            self.changed |= self.finding.count & (self.finding.count - 1) == 0  # tell at 2, 4, 8, ...

    def join(self, finding: Finding) -> None:
        """Add a finding about the same incident."""
        ranks = tuple(sorted({*self.finding.ranks, *finding.ranks}))
        subject = tuple(dict.fromkeys((*self.finding.subject, *finding.subject)))[:_MAX_SUBJECTS]
        if (ranks, subject) != (self.finding.ranks, self.finding.subject):
            self.finding = replace(self.finding, ranks=ranks, subject=subject)
            self.changed = True
        if self.rule.keeps_newest:
            told = {key: value for key, value in self.finding.evidence.items() if key == "consequences"}
            self.changed |= finding.phase != self.finding.phase
            self.finding = replace(self.finding, phase=finding.phase, evidence={**finding.evidence, **told})
        self.again(finding.last_step if self.rule.keeps_newest else finding.step)

    def learn(self, finding: Finding) -> None:
        """Update the finding with facts that became known after the incident was opened."""
        told = {key: value for key, value in self.finding.evidence.items() if key == "consequences"}
        names = ("subject", "location", "causes", "actions")
        known = {name: getattr(finding, name) for name in names}
        self.finding = replace(self.finding, **known, evidence={**finding.evidence, **told})
        self.changed = True

    def add_consequence(self, finding: Finding) -> None:
        """Add a consequence of this incident to its evidence, once for each code."""
        known = list(self.finding.evidence.get("consequences", ()))
        if len(known) >= _MAX_CONSEQUENCES or any(text.startswith(finding.code) for text in known):
            return
        since = "" if finding.step is None else f" since step {finding.step}"
        evidence = {**self.finding.evidence, "consequences": [*known, finding.code + since]}
        self.finding = replace(self.finding, evidence=evidence)
        self.changed = True

    def pattern(self) -> Pattern | None:
        """Return the classes into which the incident divides the ranks; None if unknown."""
        if self.group.pattern:
            return self.group.pattern
        ranks = self.finding.ranks
        width = max(ranks, default=-1) + 1
        everyone = range(max(width, self.group.world))
        return {rank: rank if rank in ranks else -1 for rank in everyone} if ranks else None


@dataclass(slots=True, eq=False)
class Group:
    """Rules that read the same difference of one optimizer, and their open incidents."""

    world: int = 0
    incidents: list[Incident] = field(default_factory=list)
    pattern: Pattern | None = None
    before: Pattern | None = None  # `pattern` without the step being judged
    quiet: int = 0
    closings: int = 0
    misses: int = 0
    wait: int = 0

    @property
    def idle(self) -> bool:
        """Whether a step without a difference changes nothing in this group."""
        return not (self.incidents or self.pattern or self.wait)

    @property
    def silent(self) -> bool:
        """Whether there are open incidents and all of them are ignored."""
        return bool(self.incidents) and all(incident.finding.ignored for incident in self.incidents)

    def grows(self, shown: RankClasses) -> bool:
        """Whether ranks differ that agreed so far."""
        return count(refine(self.pattern, shown)) > count(self.pattern)

    def look(self, shown: RankClasses | None) -> None:
        """Add the ranks' values in the step that is judged next."""
        self.before = self.pattern
        if shown:
            self.pattern = refine(self.pattern, shown)

    def again(self, step: int) -> None:
        """Count one more occurrence of each incident."""
        for incident in self.incidents:
            incident.again(step)

    def found(self) -> None:
        """Note that rules have raised findings, possibly of ignored incidents."""
        self.quiet = self.wait = 0
        if not self.silent:
            self.misses = 0

    def rest_if_silent(self) -> None:
        """Wait longer before the next request for details, if all open incidents are ignored."""
        if self.silent:
            self.missed()

    def missed(self) -> None:
        """Count details that were requested in vain: wait longer before the next request."""
        self.misses += 1
        self.wait = min(1 << min(self.misses, 10), _SILENT_STEPS if self.silent else 1 << 10)

    def rest(self) -> list[Incident]:
        """Count a step without a difference; return the incidents that it closes."""
        self.quiet += 1
        if self.quiet < QUIET_STEPS << min(self.closings, _MAX_DOUBLINGS):
            return []
        closed, self.incidents = self.incidents, []
        self.closings += bool(closed)
        self.pattern, self.quiet = None, 0
        return closed


def _together(one: int | None, other: int | None) -> bool:
    return one is not None and other is not None and abs(one - other) <= 1


def _since(incident: Incident, finding: Finding) -> int | None:
    """Return how many steps after an incident was last seen a finding has come."""
    last = incident.finding.step if incident.finding.last_step is None else incident.finding.last_step
    return None if last is None or finding.step is None else finding.step - last


def _is_back(incident: Incident, distance: int | None) -> bool:
    """Whether a closed incident that is seen again after so many steps is the same."""
    if distance is None:
        return False
    patience = QUIET_STEPS << min(max(0, incident.group.closings - 1), _MAX_DOUBLINGS)
    regular = incident.distance is not None and abs(distance - incident.distance) <= _REGULAR * incident.distance
    return regular or distance <= _SOON * patience


class Incidents:
    """All groups; decides whether a finding is new, a repetition or a consequence.

    Args:
        ignored: what nothing is said of. It explains nothing either: what follows from it would disappear with it.
    """

    def __init__(self, world: int, ignored: Sequence[Ignored] = ()) -> None:
        self.world = world
        self._ignored = ignored
        self._groups: dict[tuple[str, int | None], Group] = {}
        self._numbers: dict[str, int] = {}
        self._new: list[Incident] = []
        self._closed: deque[Incident] = deque(maxlen=_MAX_CLOSED)
        self._touched: list[Incident] = []  # closed, or told again at the end of the tick
        self._adopted: dict[str | None, Incident] = {}  # what another rank has found, by id

    def group(self, rule: Detector, optimizer: int | None) -> Group:
        """Return the group of a rule for an optimizer (None: for findings of no optimizer)."""
        key = (rule.group or rule.code, optimizer)
        if key not in self._groups:
            self._groups[key] = Group(world=self.world)
        return self._groups[key]

    def adopt(self, rule: Detector, finding: Finding) -> None:
        """Adopt a finding of another rank: its number is taken, and the same finding here is not new."""
        number = (finding.id or "").rpartition("-")[2]
        if number.isdecimal():
            self._numbers[finding.code] = max(self._numbers.get(finding.code, 0), int(number))
        self._adopted[finding.id] = Incident(rule, finding, Group(self.world), told=finding.count)

    def close(self, incidents: Iterable[Incident]) -> None:
        """Close incidents; those with a grown count are reported once more."""
        for incident in incidents:
            incident.changed |= incident.finding.count != incident.told
            self._closed.append(incident)
            self._touched.append(incident)

    def admit(self, rule: Detector, finding: Finding, group: Group, shown: RankClasses | None) -> None:
        """Admit a finding: join it to a known incident, fold it into one that explains it, or open a new incident."""
        known = self._same(rule, finding, group)
        if known is not None:
            known.join(finding)
            if known.finding.ignored and not (self._entry(known.finding) and self._entry(finding)):
                known.finding = replace(known.finding, ignored=None)  # it is about more than was meant
                self._new = [*(one for one in self._new if one is not known), known]
            if known not in group.incidents:
                group.incidents.append(known)
            return
        incident = Incident(rule, finding, group)
        if (before := self._before(rule, finding, group)) is not None:
            incident.distance = _since(before, finding)
        group.incidents.append(incident)
        source = self._explanation(incident, shown)
        if source is None:
            number = self._numbers[finding.code] = self._numbers.get(finding.code, 0) + 1
            # ranks that cannot talk find different hangs: these are numbered by who has judged them, "1:3"
            own = str(finding.evidence.get("hang") or number).replace(":", ".")
            incident.finding = replace(finding, id=f"{finding.code}-{own}", ignored=self._entry(finding))
            self._new.append(incident)
            return
        incident.root = source
        source.top.add_consequence(finding)
        self._touched.append(source.top)

    def learn(self, finding: Finding) -> None:
        """Update an incident with facts that became known after its finding was raised."""
        for incident in dict.fromkeys((*self._open(), *self._closed)):
            known = incident.finding
            if (known.code, known.step, known.ranks) == (finding.code, finding.step, finding.ranks):
                incident.learn(finding)
                self._touched.append(incident)

    def settle(self, optimizer: int, groups: Iterable[str], said: Mapping[str, Any]) -> None:
        """Say something else of what groups of rules have found of an optimizer: it is no mistake."""
        meant = [self._groups.get((group, optimizer)) for group in groups]
        for incident in dict.fromkeys((*self._open(), *self._closed)):
            if incident.group in meant:
                incident.finding, incident.changed = replace(incident.finding, **said), True
                self._touched.append(incident)

    def _entry(self, finding: Finding) -> str | None:
        return next((str(entry) for entry in self._ignored if entry.covers(finding)), None)

    def _open(self) -> list[Incident]:
        found = [incident for group in self._groups.values() for incident in group.incidents]
        return list(dict.fromkeys(found))

    def _same(self, rule: Detector, finding: Finding, group: Group) -> Incident | None:
        key = rule.incident_key(finding)
        for incident in self._closed:
            # The same line of code again is the same mistake, however long it did no harm in between.
            if (
                finding.location
                and incident.finding.code == finding.code
                and rule.incident_key(incident.finding) == key
            ):
                return incident
        for name, incident in self._adopted.items():
            other = incident.finding  # who has not seen how it began may explain the same difference in another way
            alike = other.ranks == finding.ranks or (finding.ranks and {*finding.ranks} <= {*other.ranks})  # some left
            if other.code == finding.code and (rule.incident_key(other) == key or alike):
                incident.group = group
                return self._adopted.pop(name)
        before = self._before(rule, finding, group)
        if before is not None and _is_back(before, _since(before, finding)):
            return before
        for incident in self._open():
            other = incident.finding
            if other.code != finding.code:
                continue
            if rule.incident_key(other) == key:
                return incident
            # One mistake shows in every optimizer at the same time.
            alike = (other.phase, other.location) == (finding.phase, finding.location)
            if alike and incident.group is not group and _together(other.step, finding.step):
                return incident
        return None

    def _before(self, rule: Detector, finding: Finding, group: Group) -> Incident | None:
        """Return the newest closed incident that a finding repeats; one that followed from another explains nothing."""
        for incident in reversed(self._closed):
            known = incident.finding
            same = (
                known.code == finding.code
                and rule.incident_key(known) == rule.incident_key(finding)
                and (known.phase, known.location, known.ranks) == (finding.phase, finding.location, finding.ranks)
            )
            if same and incident.group is group and incident.root is None:
                return incident
        return None

    def _explanation(self, incident: Incident, shown: RankClasses | None) -> Incident | None:
        rule, finding, upstream = incident.rule, incident.finding, causality.explained_by(incident.rule.code)
        found = [
            c
            for c in (*self._open(), *self._adopted.values())
            if c is not incident and c.finding.code in upstream and not c.finding.ignored
            if rule.explained_by(finding, c.finding)
        ]
        if not found:
            return None
        patterns = [c.pattern() for c in found]
        known = [p for p in patterns if p is not None]
        if shown and len(known) == len(patterns):
            own = [incident.group.before] if incident.group.before else []
            if not explains([*known, *own], shown):
                return None
        return max(
            found, key=lambda c: (c.root is None, c.finding.step or 0, -c.rule.causal_rank(c.finding), c.finding.code)
        )

    def news(self, *, last: bool = False) -> list[tuple[Finding, bool]]:
        """Return new incidents, then changed ones; with `last` also those whose count was not reported."""
        news = [(incident.finding, True) for incident in self._new]
        for incident in self._new:
            incident.told, incident.changed = incident.finding.count, False
        for incident in dict.fromkeys((*self._touched, *self._open())):
            grown = last and (incident.finding.count != incident.told or incident.rule.keeps_newest)
            if incident.root is None and (incident.changed or grown):
                news.append((incident.finding, False))
            incident.told, incident.changed = (
                (incident.finding.count, False) if incident.changed or grown else (incident.told, False)
            )
        self._new, self._touched = [], []
        return news
