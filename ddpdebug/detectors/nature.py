"""The nature of what a finding is caused by, which decides whether a restart helps: by its code, and by its evidence.

A default of each family, and the codes that are otherwise. Where the evidence tells more (a bit that has flipped, a
rank that was killed), that counts. Torch-free.
"""

from __future__ import annotations

import math
import struct
from enum import Enum

from ddpdebug.schema.finding import Finding


class Nature(Enum):
    """What a cause comes from; the value is its name in files."""

    DETERMINISTIC = "deterministic"
    DATA = "data"
    HARDWARE = "hardware"
    ENVIRONMENT = "environment"
    TRANSIENT = "transient"

    @property
    def helps(self) -> bool:
        """Whether the same job, started again, may go well."""
        return self not in {Nature.DETERMINISTIC, Nature.DATA}

    @property
    def advice(self) -> str:
        """Whether a restart helps, in words."""
        return _ADVICE[self]


_ADVICE = {
    Nature.DETERMINISTIC: "no: the same script and settings do it again",
    Nature.DATA: "no, unless the data or their order are others: the same samples do it again",
    Nature.HARDWARE: "yes, from a checkpoint of before, without that device or host",
    Nature.ENVIRONMENT: "once the machine, its files or its network are mended, or on another host",
    Nature.TRANSIENT: "probably: the same need not come again",
}
_FAMILIES = {
    "RANK": Nature.DETERMINISTIC,
    "SYNC": Nature.DETERMINISTIC,
    "NUM": Nature.DETERMINISTIC,
    "MEM": Nature.DETERMINISTIC,
    "HANG": Nature.TRANSIENT,
    "SLOW": Nature.ENVIRONMENT,
    "FAIL": Nature.DETERMINISTIC,
    "HLTH": Nature.DETERMINISTIC,
    "RCP": Nature.DETERMINISTIC,
    "DATA": Nature.DATA,
}
_CODES = {
    "NUM305": Nature.DATA,
    "MEM405": Nature.DATA,
    "HLTH708": Nature.DATA,
    "HANG502": Nature.DETERMINISTIC,
    "SLOW602": Nature.DETERMINISTIC,
    # loaders that are used wrongly, whatever is in the data
    **dict.fromkeys(("DATA901", "DATA902", "DATA905", "DATA906", "DATA910"), Nature.DETERMINISTIC),
    **dict.fromkeys(("FAIL1011", "FAIL1012", "FAIL1040", "FAIL1042", "FAIL1045", "FAIL1046"), Nature.DATA),
    # variables, addresses, networks, GPUs that are not there, memory for the batches of workers
    **dict.fromkeys(
        ("FAIL1019", "FAIL1020", "FAIL1021", "FAIL1027", "FAIL1028", "FAIL1037", "FAIL1039"), Nature.ENVIRONMENT
    ),
    **dict.fromkeys(("FAIL1022", "FAIL1023", "FAIL1024"), Nature.TRANSIENT),
}
#: Signals by which a process ends of its own.
_CRASHES = ("SIGABRT", "SIGBUS", "SIGFPE", "SIGILL", "SIGSEGV")


def usual(code: str) -> Nature | None:
    """Return the nature of a code whose evidence is not known; None of one that nobody knows."""
    return _CODES.get(code) or _FAMILIES.get(code.rstrip("0123456789"))


def nature(finding: Finding) -> Nature | None:
    """Return the nature of what a finding is caused by; None of a code that nobody knows."""
    evidence = finding.evidence
    if finding.code == "RANK101" and _one_bit(evidence.get("values")):
        return Nature.HARDWARE
    if finding.code in {"HANG503", "FAIL1024"}:  # by how the rank has left, as the others know it
        told = str(evidence.get("left") or evidence.get("missing") or "")
        if "killed" in told and not any(name in told for name in _CRASHES):
            return Nature.ENVIRONMENT
        if any(word in told for word in ("exception", "Error", "finished")):
            return Nature.DETERMINISTIC
    return usual(finding.code)


def restart(finding: Finding) -> dict[str, str] | None:
    """Return for files what a finding is caused by, and whether a restart helps."""
    found = nature(finding)
    return None if found is None else {"cause": found.value, "helps": found.advice}


def _one_bit(values: object) -> bool:
    """Whether two values of an element are one bit apart, in single or in double precision (or half of single)."""
    if not isinstance(values, dict):
        return False
    numbers = [value for value in values.values() if isinstance(value, int | float)]
    known = list(dict.fromkeys(map(float, numbers)))
    if len(numbers) < len(values) or len(known) != 2 or not all(map(math.isfinite, known)):
        return False
    for kind, size in (("<f", 4), ("<d", 8)):
        try:
            words = [int.from_bytes(struct.pack(kind, value), "little") for value in known]
        except OverflowError:  # beyond single precision
            continue
        rounded = [struct.unpack(kind, word.to_bytes(size, "little"))[0] for word in words]
        if rounded == known and (words[0] ^ words[1]).bit_count() == 1:
            return True
    return False
