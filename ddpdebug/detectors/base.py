"""What a rule is. Torch-free."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from ddpdebug.detectors import causality
from ddpdebug.schema.announcements import read_announcement
from ddpdebug.schema.finding import UNDECIDED, Finding, Severity
from ddpdebug.schema.row import Flag
from ddpdebug.schema.step import Blamed, Step

_SECTION = re.compile(r"^(Impact|Diagnosis|Causes|Remedy):", re.MULTILINE)

#: Fields of a finding, or of a run's settings, by name.
Fields = Mapping[str, Any]
Findings = Iterator[Finding]
#: Rank -> what it shows; ranks that show the same are of one class. Empty: judged, and nothing differs.
RankClasses = Mapping[int, Hashable]


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """An example's announcements of one topic by all ranks, as `compare` gets them; made of JSON values.

    Raises:
        ValueError: no rank says such a thing.
    """

    topic: str
    values: Mapping[int, Any]

    def __post_init__(self) -> None:
        """Read the values."""
        read = {rank: read_announcement(self.topic, value) for rank, value in self.values.items() if value is not None}
        if None in read.values():
            raise ValueError(f"no {self.topic}: {self.values!r}")
        object.__setattr__(self, "values", read)


class Examples:
    """Sequences of steps (or `Facts`), made when they are read: a job that is watched carries none of them.

    Args:
        makes: each makes one sequence, its only member, or a tuple of several sequences.
    """

    def __init__(self, *makes: Callable[[], Any]) -> None:
        self._makes = makes

    def __get__(self, rule: object, kind: type | None = None) -> tuple[tuple[Any, ...], ...]:
        """Sequences, made anew each time."""
        made = [m if isinstance(m, tuple) else (m,) for m in (make() for make in self._makes)]
        return tuple(sequence for m in made for sequence in (m if isinstance(m[0], tuple) else (m,)))


class Detector:
    """A rule: reads steps, yields findings. May remember earlier steps; may not touch torch, clocks, randomness, I/O.

    The class docstring is the runbook: the first paragraph is the meaning, then the sections `Impact:`,
    `Diagnosis:`, `Causes:` (one per line, `-` bullets, most likely first) and `Remedy:`. A cause and its remedy may
    begin with the words of a finding that speak for them: `schema/likeliest.py`.

    Most rules are of a kind (`kinds.py`) and fill in its hooks; a bare rule overrides `detect`. It is given every step
    exactly once, in order, but for those that do not show what it `reads`. One that needs more than the row names it in
    `wants` and says in `suspects` when: the step then comes to `detect` with `step.details` filled in, as far as the
    ranks answered.

    Which findings explain those of this rule, and which come first within a step, stands in `causality.toml`.
    """

    code: ClassVar[str]
    severity: ClassVar[Severity]
    title: ClassVar[str]
    #: Phase -> the title of a finding of it, where that of all says less.
    titles: ClassVar[Mapping[str, str]] = {}
    #: Detail kinds to collect from every rank before `detect` is called.
    wants: ClassVar[tuple[str, ...]] = ()
    #: The details are wanted of every step that `suspects` names, also while a cause is open.
    every_sample: ClassVar[bool] = False
    #: What a step must show for this rule to look at it: one of these flags on some rank, or one of these columns of
    #: the row known on some rank. None: any step will do; (): none, but for steps that find it `awake`.
    reads: ClassVar[tuple[str | Flag, ...] | None] = None
    #: In a job of one rank steps mean nothing to it.
    of_several: ClassVar[bool] = False
    #: Judges what the last step has left as well (rows with `Flag.LAST_STATE`), which holds no more than its digests.
    last_state: ClassVar[bool] = False
    #: Judges no step of which the rows of some ranks stand for all: who of them is like whom.
    all_ranks: ClassVar[bool] = False
    #: Topics of announcements (`announcements.py`), without `:<k>`, for which `compare` is called when all have spoken.
    topics: ClassVar[tuple[str, ...]] = ()
    #: Rules of one group read the same difference: while an incident of one is open, the others have nothing to add.
    group: ClassVar[str] = ""
    #: Fields that two findings about the same incident have in common; of the subject its first name.
    incident: ClassVar[tuple[str, ...]] = ("phase",)
    #: Of two findings about the same incident the later one knows more: its evidence takes the place of the other's.
    keeps_newest: ClassVar[bool] = False
    #: More may become known of what it has found, once the step is judged: `learned` words it anew.
    learns: ClassVar[bool] = False
    #: Each is fed to a fresh instance; run as tests.
    fires_on: ClassVar[Examples] = Examples()
    silent_on: ClassVar[Examples] = Examples()

    #: The newest step that was judged, which this rule need not have looked at, and the number of the next: kept by who
    #: calls `compare` and `finish`.
    newest: Step | None = None
    next_step: int = 0

    def __init__(self, config: Mapping[str, Any] | None = None) -> None:
        self.config = config or {}
        #: What rules have worked out that others work out from the same steps: one for all rules of a diagnosis.
        self.shared: dict[str, Any] = {}

    @property
    def awake(self) -> bool:
        """Whether it looks at the next step whatever that shows, because of what it remembers."""
        return False

    # --- judging ------------------------------------------------------------------------------------------------------

    def detect(self, step: Step) -> Iterator[Finding]:
        """Findings of one step; called once per step, in order."""
        yield from ()

    def compare(self, topic: str, facts: Mapping[int, Any]) -> Iterator[Finding]:
        """Findings of the announcements of one topic by all ranks, by rank; called when all have spoken."""
        yield from ()

    def learned(self, step: Step) -> Finding | None:
        """Word a finding about a step anew, of which a detail has come again; it must remember nothing."""
        return None

    def meet(self) -> None:
        """Learn that the ranks have met again, in another process group: none has ended."""

    def finish(self) -> Iterator[Finding]:
        """Findings that only the end of the run shows; called once."""
        yield from ()

    def suspects(self, step: Step) -> bool:
        """Whether the details in `wants` are worth asking for; called before `detect`, must not change the memory."""
        return False

    def wants_all(self, step: Step) -> bool:
        """Whether chosen rows show that the rows of all ranks are worth asking for; must not change the memory."""
        return False

    # --- for the diagnosis --------------------------------------------------------------------------------------------

    def can_show(self, step: Step) -> bool:
        """Whether the step could show what this rule looks for, so that its silence means that it is gone.

        Called for steps without a finding; never true for what is said once and does not come and go.
        """
        return True

    def incident_key(self, finding: Finding) -> tuple[Hashable, ...]:
        """What two findings of this rule have in common when they are about the same incident."""
        return tuple(finding.subject[:1] if name == "subject" else getattr(finding, name) for name in self.incident)

    def causal_rank(self, finding: Finding) -> int:
        """The finding's place in the order of causes, upstream is smaller."""
        return causality.rank(self.code)

    def explained_by(self, finding: Finding, cause: Finding) -> bool:
        """Whether an open finding of a code that `causality.toml` puts before this one really explains it."""
        return True

    # --- for rules ----------------------------------------------------------------------------------------------------

    def finding(self, at: Step | None = None, /, **fields: Any) -> Finding:
        """A finding of this rule; unless given with the prose of its runbook, and step and ranks of the step `at`."""
        if at is not None:
            fields = {"step": at.step, "last_step": at.step, "ranks": tuple(sorted(at.everyone)), **fields}
        ranks = fields.get("ranks")
        if isinstance(ranks, Blamed) and ranks.undecided:
            fields["evidence"] = {UNDECIDED: list(map(list, ranks.undecided)), **fields.get("evidence", {})}
        prose = runbook(type(self))
        fields.setdefault("severity", self.severity)
        fields.setdefault("title", self.titles.get(fields.get("phase") or "", self.title))
        fields.setdefault("causes", prose["causes"])
        fields.setdefault("actions", prose["remedy"])
        fields.setdefault("last_step", fields.get("step"))
        return Finding(code=self.code, **fields)


def runbook(rule: type[Detector]) -> dict[str, Any]:
    """The parts of a rule's docstring: meaning, impact, diagnosis (text), causes and remedy (lists)."""
    parts = _SECTION.split(inspect.cleandoc(rule.__doc__ or ""))
    prose: dict[str, Any] = {"meaning": parts[0].strip()}
    for name, text in zip(parts[1::2], parts[2::2], strict=True):
        prose[name.lower()] = text.strip()
    for name in ("causes", "remedy"):
        prose[name] = _bullets(prose.get(name, ""))
    prose.setdefault("impact", "")
    prose.setdefault("diagnosis", "")
    return prose


def _bullets(text: str) -> list[str]:
    joined = re.sub(r"\s*\n\s*(?!- )", " ", text.strip())
    return [line.strip().removeprefix("- ").strip() for line in joined.split("\n") if line.strip()]
