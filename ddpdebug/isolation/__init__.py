"""Isolation of the job from ddpdebug: probes run under a guard, and what the user's code raises stays the user's."""
