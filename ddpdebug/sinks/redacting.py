"""Hides what looks secret in the texts of records, before any sink sees them. Torch-free."""

from __future__ import annotations

from dataclasses import replace

from ddpdebug.redaction import Redactor
from ddpdebug.schema.finding import Finding
from ddpdebug.sinks import FindingRaised, Record, RunEnded, RunStarted, Saved, Trouble


def redacted(record: Record, redactor: Redactor) -> Record:
    """Return a record without secrets; the same one where it has none, or no texts."""
    match record:
        case FindingRaised():
            return replace(record, finding=redacted_finding(record.finding, redactor))
        case Trouble():
            return replace(record, message=redactor.text(record.message))
        case RunEnded():
            return replace(record, reason=redactor.text(record.reason))
        case Saved():
            return replace(record, payload=redactor.value(record.payload))
        case RunStarted():
            return replace(record, command=tuple(redactor.words), config=redactor.value(record.config))
    return record


def redacted_finding(finding: Finding, redactor: Redactor) -> Finding:
    """Return a finding without secrets in its texts."""
    changed = {
        name: redactor.value(getattr(finding, name))
        for name in ("title", "subject", "location", "evidence", "causes", "actions")
    }
    return replace(finding, **{name: value for name, value in changed.items() if value is not getattr(finding, name)})
