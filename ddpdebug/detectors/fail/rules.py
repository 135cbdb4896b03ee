"""The rules about errors that torch raises, made from the table `errors.toml`. Torch-free."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from typing import Any

from ddpdebug.detectors.base import runbook
from ddpdebug.detectors.examples import steps
from ddpdebug.detectors.fail.texts import LOSS, OF_VICTIMS, Entry, code_of, table
from ddpdebug.detectors.kinds import EventRule, Examples, Facts, Fields, Finding, Findings, Severity
from ddpdebug.errors import essence
from ddpdebug.schema.announcements import Announcement, End, Failure
from ddpdebug.schema.ended import Kind, parse_end
from ddpdebug.schema.finding import MAX_NAMES

#: What torch raises at the first call after a kernel has found a value that it must not be given.
ON_DEVICE = "device-side assert triggered"


class TorchError(EventRule):
    """Base of the rules about errors: a rank has ended with an exception whose text is known."""

    severity = Severity.CRITICAL
    events = ("failure",)

    def judge(self, fact: Failure) -> Fields | None:
        if code_of(fact.reason) != self.code:
            return None
        named = fact.named or (fact.missing if self.code == "FAIL1001" else ())
        evidence: dict[str, Any] = {"error": _error(fact)}
        if self.code == "FAIL1001" and (cut := fact.cut_short) is not None:
            said = " at ".join(part for part in (essence(cut.error), cut.location) if part)
            when = "" if cut.step is None else f" in step {cut.step}"
            evidence = {"observed": f"the backward before was cut short{when}: {said}", **evidence}
            prose = {"causes": _CUT_SHORT, "actions": _WHOLE_OR_NONE}
            place = {"step": fact.raised_in, "phase": "backward", "location": cut.location}
            return {**place, "subject": (), "evidence": evidence, **prose}
        if fact.module is not None:
            evidence["module"] = fact.module
        if fact.tensors:
            evidence["tensors"] = dict(fact.tensors)
        if ON_DEVICE in fact.reason:
            evidence["line"] = "the kernel's own" if fact.blocking else "of a call after the kernel's"
        found = {"step": fact.raised_in, "phase": fact.phase, "subject": named[:MAX_NAMES], "evidence": evidence}
        if self.code == "FAIL1001" and (fact.raised_in or 0) > 2:  # it has gone well before: what this batch leaves out
            evidence["steps_before"] = f"{(fact.raised_in or 0) - 1} steps did not raise"
            return {**found, "causes": (*_NOT_TODAY, *runbook(type(self))["causes"]), "actions": _EACH_TIME}
        return found

    def incident_key(self, finding: Finding) -> tuple[Hashable, ...]:
        return ()  # the same on every rank is one cause; who was first is named


class DepartureError(TorchError):
    """Base of the rule about a rank that has left: judged as soon as it has said how, else at the end.

    At once, because launchers end all ranks as soon as one has failed.
    """

    topics = ("alone", "end")

    def __init__(self, config: Fields | None = None) -> None:
        super().__init__(config)
        self._failures: dict[int, Failure] = {}
        self._ends: dict[int, End] = {}
        self._said = False

    def compare(self, topic: str, facts: Mapping[int, Announcement]) -> Findings:
        for rank, fact in facts.items():
            if isinstance(fact, End):
                self._ends[rank] = fact
            elif isinstance(fact, Failure):
                self._failures.setdefault(rank, fact)
        yield from self._departure(certain=False)

    def meet(self) -> None:
        self._ends.clear()

    def finish(self) -> Findings:
        yield from self._departure(certain=True)

    def _departure(self, *, certain: bool) -> Findings:
        left_alone = {rank: fact for rank, fact in sorted(self._failures.items()) if code_of(fact.reason) == self.code}
        if self._said or not left_alone:
            return
        first = next(iter(left_alone.values()))
        failed = {rank: f for rank, f in sorted(self._failures.items()) if code_of(f.reason) not in OF_VICTIMS}
        done = {rank: end for rank, end in sorted(self._ends.items()) if rank not in self._failures}
        if not (failed or done or certain):
            return
        self._said = True
        silent = {*range(int(self.config.get("world", 0)))} - {*self._failures} - {*done}
        fields: dict[str, Any] = {"step": first.raised_in, "ranks": tuple(silent) if len(silent) == 1 else ()}
        cause, remedy = _KILLED
        left: dict[str, str] | str = "without a word: killed, past the exit handlers, or out of reach"
        if failed:
            culprit = next(iter(failed.values()))
            left = {str(rank): _error(fact) for rank, fact in failed.items()}
            fields |= {"step": culprit.raised_in, "ranks": tuple(failed), "location": culprit.location}
            fields["phase"] = culprit.phase
            cause, remedy = _RAISED
        elif done:
            taken = {rank: max(end.steps.values(), default=0) for rank, end in done.items()}
            left = {str(rank): f"{done[rank].reason} after {taken[rank]} optimizer steps" for rank in done}
            fields |= {"step": min(taken.values()), "ranks": tuple(done)}
            cause, remedy = _DONE
        waiting = {str(rank): _place(fact) for rank, fact in left_alone.items()}
        prose = runbook(type(self))
        fields |= {"causes": _first(cause, prose["causes"]), "actions": _first(remedy, prose["remedy"])}
        yield self.finding(**fields, evidence={"left": left, "others_waited_in": waiting, "their_error": _error(first)})


#: Which of the table's causes and remedies of a departure come first, by how the rank has left.
_RAISED, _KILLED, _DONE = (0, 0), (1, 2), (2, 1)


def _first(number: int, texts: list[str]) -> list[str]:
    return [texts[number], *texts[:number], *texts[number + 1 :]]


def _error(fact: Failure) -> str:
    return essence(parse_end(fact.reason).text)


def _place(fact: Failure) -> str:
    step = None if fact.raised_in is None else f"step {fact.raised_in}"
    return " · ".join(part for part in (step, fact.phase, fact.location) if part)


def _prose(entry: Entry) -> str:
    def bullets(items: Iterable[str]) -> str:
        return "\n".join(f"    - {item}" for item in items)

    return (
        f"{entry.meaning}\n\n    Impact: {entry.impact}\n\n    Diagnosis: {entry.diagnosis}\n\n"
        f"    Causes:\n{bullets(entry.causes)}\n\n    Remedy:\n{bullets(entry.remedy)}\n    "
    )


#: Of FAIL1001, where the script has caught what ended the backward before.
_CUT_SHORT = (
    "an exception that the script has caught cut short the backward before: DDP still waits for the other gradients",
    "no parameter is unused: `find_unused_parameters` cures nothing here",
)
#: ... and where steps before have used the parameters.
_NOT_TODAY = ("a branch that this batch does not take: no image, no such expert, an auxiliary loss that is off",)
_EACH_TIME = (
    "`DistributedDataParallel(..., find_unused_parameters=True)`",
    "or let each forward use the branch: `loss + 0 * branch(anything).sum()`",
)
_WHOLE_OR_NONE = (
    "let the exception end the rank, or find what causes it before backward begins: bad records, lengths, memory",
    "to skip a batch decide it on all ranks alike before the forward: all-reduce a flag",
)
_BASES = {LOSS: DepartureError}
_KNOWN = {"step": 4, "raised_in": 5, "location": "train.py:40", "phase": "forward", "named": ["fc.weight"]}


def _ends_with(reason: str, **known: Any) -> Facts:
    return Facts(topic="alone:failure", values={1: {"reason": f"{Kind.EXCEPTION}: {reason}", **known}})


def _rule(code: str, entry: Entry) -> type[TorchError]:
    fields = {
        "__module__": __name__,
        "__doc__": _prose(entry),
        "code": code,
        "title": entry.title,
        "fires_on": Examples(
            lambda: tuple((_ends_with(text, **known),) for text in entry.examples for known in ({}, _KNOWN))
        ),
        "silent_on": Examples(
            lambda: _ends_with("KeyError: 'labels'"),
            lambda: _ends_with("RuntimeError: the user's own"),
            lambda: steps(3),
        ),
    }
    return type(code, (_BASES.get(code, TorchError),), fields)


globals().update({code: _rule(code, entry) for code, entry in table().items()})
