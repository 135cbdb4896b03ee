"""What a rule is. Torch-free."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from ddpdebug.detectors.thresholds import threshold
from ddpdebug.schema.announcements import read_announcement
from ddpdebug.schema.finding import Finding, Severity
from ddpdebug.schema.step import Step

_SECTION = re.compile(r"^(Impact|Diagnosis|Causes|Remedy):", re.MULTILINE)

#: Rank -> what it shows; ranks with equal labels agree. Empty: judged, and nothing differs.
Labels = Mapping[int, Hashable]


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
    """Sequences of steps (or `Facts`), made when they are read: a job that is watched carries none of them."""

    def __init__(self, make: Callable[[], tuple[tuple[Any, ...], ...]] = tuple) -> None:
        self._make = make

    def __get__(self, rule: object, kind: type | None = None) -> tuple[tuple[Any, ...], ...]:
        """Make them, anew each time."""
        return self._make()


class Detector:
    """A rule: reads steps, yields findings. May remember earlier steps; may not touch torch, clocks, randomness, I/O.

    The class docstring is the runbook: the first paragraph is the meaning, then the sections `Impact:`,
    `Diagnosis:`, `Causes:` (one per line, `-` bullets, most likely first) and `Remedy:`.

    A rule that needs more than the row names it in `wants` and says in `suspects` when: the step comes back to `detect`
    with `step.details` filled in (as far as the ranks answered), in order. Every rule sees every step exactly once.

    A rule about ranks that disagree overrides `symptom`: the diagnosis then knows without details that a known cause
    still shows, that it has gone, and that further ranks have parted. Such a rule finds nothing in a step that does not
    show it, and is not asked about those unless it has a memory (an `__init__` of its own) or a `suspects` of its own.
    """

    code: ClassVar[str]
    severity: ClassVar[Severity]
    title: ClassVar[str]
    #: Detail kinds to collect from every rank before `detect` is called.
    wants: ClassVar[tuple[str, ...]] = ()
    #: The details describe some steps whatever happens in them: they are wanted of each, also while a cause is open.
    samples: ClassVar[bool] = False
    #: Judges what the last step has left as well (rows with `Flag.LAST_STATE`), which holds no more than its digests.
    last_state: ClassVar[bool] = False
    #: Topics of announcements (`announcements.py`), without `:<k>`, for which `compare` is called when all have spoken.
    topics: ClassVar[tuple[str, ...]] = ()
    #: Codes that explain this one: while one of them is open, this finding folds into it as evidence.
    follows: ClassVar[tuple[str, ...]] = ()
    #: Rules of one group read the same symptom: while one of them is open, the others have nothing to add.
    group: ClassVar[str] = ""
    #: Place in the chain of causes, upstream is smaller: within one step a finding folds only into what comes before.
    stage: ClassVar[int] = 60
    #: Each is fed to a fresh instance; run as tests.
    fires_on: ClassVar[Examples] = Examples()
    silent_on: ClassVar[Examples] = Examples()

    def __init__(self, config: Mapping[str, Any] | None = None) -> None:
        self.config = config or {}
        self._limits: dict[str, float] = {}

    def limit(self, name: str) -> float:
        """Return a threshold of `thresholds.toml` as the run's settings have it."""
        if name not in self._limits:
            self._limits[name] = threshold(self.config, name)
        return self._limits[name]

    def symptom(self, step: Step) -> Labels | None:
        """Return what each rank shows, empty when nothing differs, None when the step cannot tell."""
        return None

    def sees(self, step: Step) -> bool:
        """Tell whether the step could show what this rule looks for, so that its silence means that it is gone."""
        return True

    def fresh(self, step: Step) -> bool:
        """Tell whether the step shows a new event although the symptom is that of a known cause."""
        return False

    def suspects(self, step: Step) -> bool:
        """Tell, from the rows alone, whether the details are worth asking for. Must not change the rule's memory."""
        return bool(self.symptom(step))

    def cause(self, finding: Finding) -> tuple[Hashable, ...]:
        """Return what makes two findings of this rule the same cause."""
        return finding.subject[:1], finding.phase, finding.location

    def place(self, finding: Finding) -> int:
        """Return the finding's place in the chain of causes."""
        return self.stage

    def folds(self, finding: Finding, cause: Finding) -> bool:
        """Tell whether an open finding of a code in `follows` really explains this one."""
        return True

    def detect(self, step: Step) -> Iterator[Finding]:
        """Judge one step; called once per step in order."""
        yield from ()

    def compare(self, topic: str, facts: Mapping[int, Any]) -> Iterator[Finding]:
        """Judge announcements of one topic, by rank."""
        yield from ()

    def finish(self) -> Iterator[Finding]:
        """Judge what only the end of the run shows."""
        yield from ()

    def finding(self, **fields: Any) -> Finding:
        """Build a finding of this rule, with the causes and actions of its runbook unless given."""
        prose = runbook(type(self))
        fields.setdefault("severity", self.severity)
        fields.setdefault("title", self.title)
        fields.setdefault("causes", prose["causes"])
        fields.setdefault("actions", prose["remedy"])
        fields.setdefault("last_step", fields.get("step"))
        return Finding(code=self.code, **fields)


def runbook(rule: type[Detector]) -> dict[str, Any]:
    """Split a rule's docstring into meaning, impact, diagnosis (text), causes and remedy (lists)."""
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
