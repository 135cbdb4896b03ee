"""From steps to findings: runs the detectors, finds root causes, reports."""
