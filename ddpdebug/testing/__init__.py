"""Assertions for users' own tests (the ranks agree, DDP trains like one process), and fault injection.

The assertions are called on all ranks of the default group, raise the same AssertionError on all of them, and talk over
the group's store: no collective of theirs can get in the way of the test's own, and a rank that does not come is named.
"""

from __future__ import annotations

from ddpdebug.testing.agreement import assert_equivalent, assert_ranks_agree, assert_replicas_agree
from ddpdebug.testing.faults import KINDS, Fault

__all__ = ["KINDS", "Fault", "assert_equivalent", "assert_ranks_agree", "assert_replicas_agree"]
