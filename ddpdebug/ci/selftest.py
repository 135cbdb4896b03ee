"""Which faults `ddpdebug check --self-test` puts into a script, and which rules must find them. Torch-free."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from ddpdebug.schema.finding import Finding

#: `<fault> <folder>`: what is wrong in this run, and where its ranks share data. Only `--self-test` sets it.
FAULT = "DDPDEBUG_FAULT"
#: The step in which the fault happens.
STEP = 2
#: A run is so long: some faults show only after a few steps.
STEPS = STEP + 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """A fault and the codes one of which must be found; a name that ends in `*` stands for a family's codes."""

    name: str
    meaning: str
    expected: tuple[str, ...]


FAULTS = (
    Fault(name="bit-flip", meaning="one bit of one weight of rank 1 flips after a step", expected=("RANK101",)),
    Fault(name="skipped-all-reduce", meaning="one backward pass is not synchronised", expected=("SYNC*",)),
    Fault(name="other-learning-rate", meaning="rank 1 steps with another learning rate", expected=("RANK104",)),
    Fault(name="nan", meaning="one gradient of rank 1 becomes NaN", expected=("NUM*",)),
    Fault(name="same-data", meaning="all ranks get the batches of rank 0", expected=("DATA901",)),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """The result of one fault's run: the codes that it raised and the healthy run did not."""

    fault: Fault
    found: tuple[str, ...]
    note: str = ""

    @property
    def verified(self) -> bool:
        """Whether a rule that must find the fault has found it."""
        return any(_matches(code, name) for code in self.found for name in self.fault.expected)

    @property
    def words(self) -> str:
        """What a person should read of it."""
        if self.verified:
            return f"found by {', '.join(self.found)}"
        instead = f"; {', '.join(self.found)} was raised instead" if self.found else ""
        return f"not found by {' or '.join(self.fault.expected)}{instead}{f' ({self.note})' if self.note else ''}"


def prove(fault: Fault, findings: Iterable[Finding], healthy: Collection[str], note: str = "") -> Proof:
    """Compare the findings of a run with the fault to the codes of the healthy run."""
    found = dict.fromkeys(finding.code for finding in findings)
    return Proof(fault=fault, found=tuple(code for code in found if code not in healthy), note=note)


def _matches(code: str, name: str) -> bool:
    return code.startswith(name[:-1]) if name.endswith("*") else code == name
